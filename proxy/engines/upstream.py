"""The narrow door to the engines on the hot path: what the rest of the proxy knows of HTTP towards an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class UpstreamError(Exception):
    """An engine could not be reached, or its answer broke off."""


class NotConnectedError(UpstreamError):
    """The engine refused the connection or did not accept it in time: it has seen nothing of the request."""


class NotAcceptedError(NotConnectedError):
    """The engine did not accept the connection in time; it, or this process, was busy."""


class Answer(Protocol):
    """An engine's answer: status and headers are there, the body may still come."""

    status: int
    content_type: str

    async def chunk(self) -> bytes:
        """Next piece of the body as it arrived; empty at the end. Raises UpstreamError when it breaks off."""
        ...

    async def read(self) -> bytes:
        """The whole body. Raises UpstreamError when it breaks off."""
        ...

    def pump(self, sink: Callable[[bytes], None], ended: Callable[[UpstreamError | None], None]) -> None:
        """Call ``sink`` with every further piece as it arrives, then ``ended`` once, with what broke it off if so.

        No task wakes up for a piece: this is how a stream is relayed. ``close`` ends it without another call.
        """
        ...

    def pause(self) -> None:
        """Read no more from the engine until ``resume``: its own flow control then holds it back."""
        ...

    def resume(self) -> None:
        """Read on."""
        ...

    def close(self) -> None:
        """Give the connection back when the body was read to its end, else cut it, which aborts the request."""
        ...


class Upstream(Protocol):
    """Posts a body to an engine."""

    connect_timeout_s: float
    """Bound on opening a connection; may be changed at any time."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send; return once status and headers are there.

        Cancelling aborts the request upstream. Raises NotConnectedError or UpstreamError.
        """
        ...

    def in_use(self, base_url: str) -> int:
        """Requests that an engine has not answered to the end."""
        ...

    def cut(self, base_url: str, why: str) -> None:
        """Abort all of them: each raises UpstreamError with ``why``."""
        ...

    def forget(self, base_url: str) -> None:
        """Close the idle connections to an engine that is not used any more."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...
