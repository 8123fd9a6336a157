"""One HTTP connection of the load generator: writes a request, reads and verifies a streamed answer, records times."""

from __future__ import annotations

import asyncio
import re
from time import monotonic
from typing import NamedTuple, cast

import httptools

from bench.data_plane.stub.answers import DONE

NUMBERED = re.compile(r"(?<=inst-)\d+|(?<=127\.0\.0\.1:)\d+|req-\w+")
"""Variable parts of error messages, removed so that equal errors are counted together."""
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class LoadTarget(NamedTuple):
    """Address that requests are sent to."""

    host: str
    port: int


class ClientResult(NamedTuple):
    """One request. Times are ``CLOCK_MONOTONIC`` seconds."""

    sent_s: float
    first_event_s: float
    """First byte of the answer's body; 0 if there was none."""
    ended_s: float
    error: str
    """Empty for a correct and complete answer."""

    @property
    def ttft_ms(self) -> float:
        """Time to the first event, in milliseconds."""
        return (self.first_event_s - self.sent_s) * 1e3


class StaleConnectionError(Exception):
    """A kept connection was closed before any byte of the answer: the request may be sent again."""


class ClientConnection(asyncio.Protocol):
    """One connection; one request at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[str] | None = None
        self._parts: list[bytes] = []
        self._read_anything = False
        self._complete = False
        self.first_event_s = 0.0
        self.events_seen = 0
        self.closed = False
        self.requests = 0
        self.first_event: asyncio.Event | None = None

    # asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not inherit from it

    def data_received(self, data: bytes) -> None:
        self._read_anything = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._finish("stale" if not self._read_anything and self.requests > 1 else f"connection lost: {error}")

    # parser callbacks

    def on_body(self, part: bytes) -> None:
        if not self.first_event_s:
            self.first_event_s = monotonic()
            if self.first_event is not None:
                self.first_event.set()
        self.events_seen += part.count(b"data: {")
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._complete = True
        if not self._parser.should_keep_alive():
            self.closed = True
        self._finish("")

    def _finish(self, problem: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(problem)

    # interface for the load generator

    def send(self, head: bytes, body: bytes) -> float:
        """Write one request; returns the time (``CLOCK_MONOTONIC`` seconds). :meth:`answered` reads the answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._parts = []
        self._read_anything = self._complete = False
        self.first_event_s = 0.0
        self.events_seen = 0
        self.requests += 1
        sent_s = monotonic()
        self.transport.writelines([head, body])
        return sent_s

    async def answered(self, sent_s: float, events: int, timeout_s: float) -> ClientResult:
        """Wait for the answer and verify it: 200, exactly ``events`` events, then ``[DONE]``.

        Raises:
            StaleConnectionError: the kept connection had been closed by the other side.
        """
        assert self._done is not None
        try:
            async with asyncio.timeout(timeout_s):
                problem = await self._done
        except TimeoutError:
            problem = f"no complete answer within {timeout_s:g} s"
        ended_s = monotonic()
        if problem == "stale":
            raise StaleConnectionError
        problem = problem or self._verified(events)
        if problem:
            self.close()
        return ClientResult(sent_s, self.first_event_s, ended_s, problem)

    def _verified(self, events: int) -> str:
        status = self._parser.get_status_code()
        body = b"".join(self._parts)
        if status != 200:
            return f"status {status}: {NUMBERED.sub('...', body[:200].decode(errors='replace'))}"
        found = body.count(b"data: {")
        if found != events:
            return f"{found} events instead of {events}"
        if not body.endswith(DONE) or body.count(DONE) != 1:
            return "no [DONE] at the end"
        return ""

    def close(self) -> None:
        """Close immediately."""
        self.closed = True
        self.transport.abort()


def request_head(target: LoadTarget, path: str, body_bytes: int, session_id: str = "") -> bytes:
    """The request line and headers of a POST."""
    session = f"x-session-id: {session_id}\r\n" if session_id else ""
    return (
        f"POST {path} HTTP/1.1\r\nhost: {target.host}:{target.port}\r\ncontent-type: application/json\r\n"
        f"accept: text/event-stream\r\nuser-agent: bench\r\n{session}content-length: {body_bytes}\r\n\r\n"
    ).encode()


class ConnectionPool:
    """Kept connections to the targets. ``reconnects`` counts requests that met a stale one."""

    def __init__(self) -> None:
        self._idle: dict[LoadTarget, list[ClientConnection]] = {}
        self._all: set[ClientConnection] = set()
        self.reconnects = 0

    async def connection(self, target: LoadTarget) -> ClientConnection:
        """A kept connection, or a new one. Raises OSError."""
        idle = self._idle.setdefault(target, [])
        while idle:
            kept = idle.pop()
            if not kept.closed:
                return kept
            self._all.discard(kept)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            _, connection = await loop.create_connection(ClientConnection, target.host, target.port)
        self._all.add(connection)
        return connection

    def release(self, target: LoadTarget, connection: ClientConnection) -> None:
        """Keep a connection whose answer is complete."""
        if connection.closed:
            self._all.discard(connection)
            connection.transport.close()
        else:
            self._idle[target].append(connection)

    async def request(
        self, target: LoadTarget, path: str, body: bytes, events: int, timeout_s: float, session_id: str = ""
    ) -> ClientResult:
        """One request and its verified answer; a stale connection is replaced once, other failures are returned in the
        result."""
        head = request_head(target, path, len(body), session_id)
        for _ in range(2):
            try:
                connection = await self.connection(target)
            except (OSError, TimeoutError) as error:
                now_s = monotonic()
                return ClientResult(now_s, 0.0, now_s, f"connect: {error!r}")
            sent_s = connection.send(head, body)
            try:
                outcome = await connection.answered(sent_s, events, timeout_s)
            except StaleConnectionError:
                self.reconnects += 1
                continue
            finally:
                if connection.closed or connection._complete:
                    self.release(target, connection)
            return outcome
        now_s = monotonic()
        return ClientResult(now_s, 0.0, now_s, "stale connections only")

    def close(self) -> None:
        """Close every connection."""
        for connection in self._all:
            connection.close()
