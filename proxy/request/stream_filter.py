"""Interface of filters that transform a stream between engine and client."""

from __future__ import annotations

from typing import Protocol


class StreamFilter(Protocol):
    """Transforms a stream; must forward or hold back every byte it is fed."""

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes to send for one piece; may be empty. Raises UpstreamError if the stream cannot continue."""
        ...

    def flush(self) -> bytes:
        """Return the bytes still held back at the end. Raises as ``feed`` does."""
        ...


class Unread:
    """Passes a stream on unchanged: a compressed one holds no events that could be read."""

    def feed(self, chunk: bytes) -> bytes:
        """Return the piece."""
        return chunk

    def flush(self) -> bytes:
        """Return nothing, since nothing is held back."""
        return b""
