"""Interface to the engines on the hot path, independent of the HTTP client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from proxy.engines.headers import AnswerHeaders


class UpstreamError(Exception):
    """An engine could not be reached, or its answer broke off."""

    seen = True
    """False if the engine has not received the request."""


class NotConnectedError(UpstreamError):
    """The engine refused the connection or did not accept it in time."""

    seen = False


class LostAndRefusedError(NotConnectedError):
    """The connection was lost with the request on it, and the engine refuses another one: it may have died of it."""

    seen = True


class NotAcceptedError(NotConnectedError):
    """The engine did not accept the connection in time; it, or this process, was busy."""


class NoSocketError(NotConnectedError):
    """This process is out of sockets: no fault of the engine, which was not contacted."""


class Answer(Protocol):
    """An engine's answer: status and headers are available, the body may still be arriving."""

    status: int
    headers: AnswerHeaders

    async def chunk(self) -> bytes:
        """Next piece of the body as it arrived; empty at the end. Raises UpstreamError if it breaks off."""
        ...

    async def read(self) -> bytes:
        """The whole body. Raises UpstreamError if it breaks off."""
        ...

    def pump(
        self,
        sink: Callable[[bytes], None],
        ended: Callable[[UpstreamError | None], None],
        passage: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Call ``sink`` with every further piece as it arrives, then ``ended`` once, with the error if it broke off.

        Reads from between two chunks on are first offered to ``passage`` as they are, framing included. It returns True
        if the read was one whole chunk, of which it then has disposed; all others are parsed.

        No task is woken per piece, as needed for relaying streams. After ``close`` neither is called again.
        """
        ...

    def pause(self) -> None:
        """Stop reading from the engine until ``resume``; TCP flow control then slows it down."""
        ...

    def resume(self) -> None:
        """Resume reading from the engine."""
        ...

    def close(self) -> None:
        """Return the connection to the pool if the body was read completely, else cut it, which aborts the request."""
        ...


class Upstream(Protocol):
    """Posts a body to an engine."""

    connect_timeout_s: float
    """Bound on opening a connection, in seconds; may be changed at any time."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a request; returns when status and headers have arrived.

        Cancelling aborts the request upstream. Raises NotConnectedError or UpstreamError.
        """
        ...

    async def send(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a request with any method, to a URL that may have a query and is not remembered. As ``post``."""
        ...

    def in_use(self, base_url: str) -> int:
        """Number of requests to an engine that are not completely answered."""
        ...

    def cut(self, base_url: str, why: str) -> None:
        """Abort all requests to an engine: each raises UpstreamError with ``why``."""
        ...

    def forget(self, base_url: str) -> None:
        """Close the idle connections to an engine that is no longer used."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...
