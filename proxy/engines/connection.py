"""One HTTP/1.1 connection to an engine as an asyncio protocol.

Pieces of a streamed answer go from the socket's callback to the relay's in one call. A general client wakes a task for
every piece; at 64 streams that is a quarter of a router's work.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import cast

import httptools

from proxy.engines.headers import AnswerHeaders
from proxy.engines.upstream import UpstreamError

_MAX_HEAD_BYTES = 256 * 1024
_MAX_WHOLE_BYTES = 512 * 1024 * 1024
"""Bound on an answer that is read as a whole; a streamed one is unbounded."""
_MAX_WAITING_BYTES = 256 * 1024
"""Bound on unread bytes of a stream before reading from the socket pauses."""
_NO_BODY = frozenset({204, 304})
_EVENTS_END = b"\n\n\r\n"
"""The end of an event and of its chunk."""


class ConnectionLostError(UpstreamError):
    """The engine closed the connection before the first byte of an answer."""


class EngineAnswer:
    """``proxy.engines.upstream.Answer`` of one connection, which it occupies until its end."""

    __slots__ = (
        "_connection",
        "_ended",
        "_error",
        "_pieces",
        "_sink",
        "_waiter",
        "_waiting_bytes",
        "_whole",
        "complete",
        "head_there",
        "headers",
        "passage",
        "status",
    )

    def __init__(self, connection: EngineConnection) -> None:
        self._connection: EngineConnection | None = connection
        self.status = 0
        self.headers = AnswerHeaders()
        self.head_there = False
        self.complete = False
        self._error: UpstreamError | None = None
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self._whole = False
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._ended: Callable[[UpstreamError | None], None] | None = None
        self.passage: Callable[[bytes], bool] | None = None

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamError."""
        while not self.head_there:
            if self._error is not None:
                raise self._broken(self._error)
            await self._wait()

    async def chunk(self) -> bytes:
        while not self._pieces:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._broken(self._error)
            await self._wait()
        return self._take()

    async def read(self) -> bytes:
        self._whole = True
        self.resume()
        while not self.complete:
            if self._error is not None:
                raise self._broken(self._error)
            await self._wait()
        return self._take()

    def pump(
        self,
        sink: Callable[[bytes], None],
        ended: Callable[[UpstreamError | None], None],
        passage: Callable[[bytes], bool] | None = None,
    ) -> None:
        if self._pieces:
            sink(self._take())
        if self.complete or self._error is not None:
            ended(self._error and self._broken(self._error))
            return
        self._sink, self._ended, self.passage = sink, ended, passage
        self.resume()

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        self._sink = self._ended = self.passage = None
        if self._connection is not None:
            self._connection.cut()

    def take_in(self, data: bytes) -> None:
        """Accept a piece of the body."""
        if self._sink is not None:
            self._sink(data)
            return
        self._pieces.append(data)
        self._waiting_bytes += len(data)
        if self._whole:
            if self._waiting_bytes > _MAX_WHOLE_BYTES:
                assert self._connection is not None
                self._connection.cut(f"its answer is larger than {_MAX_WHOLE_BYTES} bytes")
            return
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            self.pause()
        self._wake()

    def end(self) -> None:
        """Mark the body as complete and release the connection. No effect after ``fail``."""
        if self._error is not None:
            return
        self._connection = None
        self.complete = True
        self._finish()

    def fail(self, error: UpstreamError) -> None:
        """Mark the answer as failed, unless it is complete."""
        self._connection = None
        if not self.complete and self._error is None:
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self._wake()
        ended, self._ended, self._sink, self.passage = self._ended, None, None, None
        if ended is not None:
            ended(self._error and self._broken(self._error))

    def _broken(self, error: UpstreamError) -> UpstreamError:
        """A copy of ``error``: a raised one references the frames it passed, and those reference this answer."""
        return type(error)(*error.args)

    def _take(self) -> bytes:
        pieces, self._pieces, self._waiting_bytes = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def head_arrived(self) -> None:
        """Signal that status and headers are set."""
        self.headers.end()
        self.head_there = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        assert self._connection is not None
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class EngineConnection(asyncio.Protocol):
    """HTTP/1.1 client connection with keep-alive; one request at a time.

    Args:
        released: called with this connection when an answer is complete and another request may be sent.
        gone: called once when the connection is closed, from either side.
    """

    loop: asyncio.AbstractEventLoop
    """The event loop, from ``connection_made`` on."""

    def __init__(self, released: Callable[[EngineConnection], None], gone: Callable[[EngineConnection], None]) -> None:
        self._released = released
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: EngineAnswer | None = None
        self._pieces: list[bytes] = []
        self._bytes_seen = 0
        self._framed = False
        self._complete = False
        self._between_chunks = False
        """True if the next byte begins a chunk; False where that is not certain."""
        self._keep_alive = False
        self._extra = False
        self._paused = False
        self._poll: select.poll | None = None
        self.idle_since_s = 0.0
        self.url = ""
        """URL of its last request."""

    @property
    def usable(self) -> bool:
        """True if another request may be sent."""
        return self._transport is not None and self._answer is None and not self._transport.is_closing()

    @property
    def silent(self) -> bool:
        """True if nothing is waiting to be read: on an idle connection that would be its end or a stray answer."""
        return self._poll is None or not self._poll.poll(0)

    def send(self, head: bytes, body: bytes) -> EngineAnswer:
        """Send one request; ``head`` ends with the empty line."""
        assert self._transport is not None
        assert self._answer is None
        self._answer = EngineAnswer(self)
        self._bytes_seen = 0
        self._complete = self._extra = self._between_chunks = False
        if len(body) < 16_384:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return self._answer

    def pause(self) -> None:
        """Stop reading from the socket."""
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading from the socket."""
        if self._paused and self._transport is not None:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def cut(self, why: str | None = None) -> None:
        """Close at once and abort its request; ``why`` becomes the error of the answer."""
        if why is not None and self._answer is not None:
            self._answer.fail(UpstreamError(why))
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        if transport.get_extra_info("ssl_object") is None:  # under TLS, unread session tickets are normal
            self._poll = select.poll()
            self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # an unsolicited answer must not be taken for the next request's
            self.cut()
            return
        # Most reads of a stream are one chunk, which the parser need not see.
        if self._between_chunks and answer.passage is not None and answer.passage(data):
            return
        self._bytes_seen += len(data)
        try:
            self._parser.feed_data(data)  # in C, a fifth of a microsecond for an event
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._flush(answer)
            answer.fail(UpstreamError(f"answered what is not HTTP: {error}"))
            self.cut()
            return
        if self._between_chunks:  # unless the next one's size line has begun, which does not end like this
            self._between_chunks = data.endswith(_EVENTS_END)
        self._flush(answer)
        if self._complete:
            self._end(answer)
        elif not answer.head_there and self._bytes_seen > _MAX_HEAD_BYTES:
            answer.fail(UpstreamError(f"answered more than {_MAX_HEAD_BYTES} bytes of headers"))
            self.cut()

    def _flush(self, answer: EngineAnswer) -> None:
        pieces = self._pieces
        if pieces:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            answer.take_in(data)

    def _end(self, answer: EngineAnswer) -> None:
        self._answer = None
        self.resume()
        if self._keep_alive and not self._extra:
            self._released(self)
        else:
            self.cut()
        answer.end()

    def eof_received(self) -> None:
        """Let the transport close itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._poll = None
        del self._parser  # it references this connection
        answer, self._answer = self._answer, None
        self._gone(self)
        if answer is None:
            return
        if not self._bytes_seen:
            answer.fail(ConnectionLostError(f"closed the connection without an answer{_because(exc)}"))
        elif answer.head_there and not self._framed and exc is None:
            answer.end()  # neither length nor chunks: the answer ends with its connection
        else:
            answer.fail(UpstreamError(f"closed the connection in the middle of its answer{_because(exc)}"))

    # httptools

    def on_message_begin(self) -> None:
        """Callback of httptools: a status line begins."""
        self._framed = False
        self._extra = self._complete  # a second answer directly after the first
        if self._answer is not None and not self._answer.head_there:
            self._answer.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Callback of httptools: one header, or trailer."""
        lowered = name.lower()
        if lowered in {b"content-length", b"transfer-encoding"}:
            self._framed = True
        elif self._answer is not None and not self._answer.head_there:
            self._answer.headers.add(lowered, value)

    def on_headers_complete(self) -> None:
        """Callback of httptools: the headers are complete."""
        answer, status = self._answer, self._parser.get_status_code()
        if answer is None or status < 200 or self._complete:
            return
        if status in _NO_BODY:
            self._framed = True
        answer.status = status
        self._keep_alive = self._parser.should_keep_alive()
        answer.head_arrived()

    def on_body(self, body: bytes) -> None:
        """Callback of httptools: a piece of the body; several of one read are joined."""
        self._between_chunks = False
        if not self._complete:
            self._pieces.append(body)

    def on_chunk_complete(self) -> None:
        """Callback of httptools: a chunk has ended."""
        self._between_chunks = True

    def on_message_complete(self) -> None:
        """Callback of httptools: the answer, or an interim one (1xx), has ended."""
        self._complete = self._complete or (self._answer is not None and self._answer.head_there)


def _because(exc: Exception | None) -> str:
    return f": {exc}" if exc is not None and str(exc) else ""
