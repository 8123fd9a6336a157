"""Interface of what changes a stream on its way from the engine to the client."""

from __future__ import annotations

from typing import Protocol


class StreamFilter(Protocol):
    """Changes a stream on its way; must pass on or hold back every byte it is fed."""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to send on for one piece; may be empty. Raises UpstreamError if the stream cannot go on."""
        ...

    def flush(self) -> bytes:
        """What is still held back at the end. Raises as ``feed`` does."""
        ...
