"""Client side of one generation request: receiving its body, sending the answer, and detecting that the client left."""

from __future__ import annotations

import asyncio
import http
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from policies.row import Row
from proxy.clients.bounds import ClientBounds, late_body
from proxy.clients.cors import Cors
from proxy.errors import RequestError, encoding_error

Headers = Sequence[tuple[bytes, bytes]]

_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}
STATUS_LINE = {status: b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b"")) for status in range(100, 600)}

LINGER_S = 2.0
"""Seconds a rejected upload may continue before its connection is cut; a client still writing may miss the answer."""


_SMALL_BYTES = 4096
"""Pieces of a body below this size are joined as they arrive."""


class Link(Protocol):
    """Operations that a request needs from its connection."""

    loop: asyncio.AbstractEventLoop

    def writer(self) -> Callable[[bytes], None]:
        """A function that writes to the client."""
        ...

    def end(self, inbound: Inbound, *, keep_alive: bool) -> None:
        """Mark the answer as complete."""
        ...

    def close(self) -> None:
        """Close the connection after everything has been written."""
        ...

    def stop(self) -> None:
        """Accept no more requests."""
        ...

    def cut(self) -> None:
        """Close the connection at once; unwritten data is lost."""
        ...

    def default_headers(self, request: dict[bytes, bytes]) -> Headers:
        """Headers of every answer to a request with these headers."""
        ...

    def peer(self) -> str:
        """The client's address, without its port."""
        ...


class Handler(Protocol):
    """Serves generation requests."""

    bounds: ClientBounds
    """Limits and accounts of all client connections."""
    cors: Cors

    def other_path(self, path: bytes, method: bytes) -> str | None:
        """The entry of the allow-list that has a request which is served like those of known paths, or None."""
        ...

    def opened(self, inbound: Inbound) -> Row:
        """Open the row of a new request; one of the following methods closes it."""
        ...

    def admit(self, inbound: Inbound) -> None:
        """Raise RequestError if the headers alone rule the request out."""
        ...

    def serve(self, inbound: Inbound) -> Coroutine[Any, Any, None]:
        """Serve a request whose body is complete."""
        ...

    def refuse(self, inbound: Inbound, error: RequestError) -> None:
        """Answer a request whose body is not complete and will not be read."""
        ...

    def left(self, inbound: Inbound) -> None:
        """Record that the client left before its body was complete."""
        ...


class _Nobody:
    """Stand-in for uvicorn's message event, which uvicorn sets on its own cycles."""

    def set(self) -> None:
        """Do nothing."""


_NOBODY = _Nobody()


class Inbound:
    """One incoming request and its answer.

    Takes the place of uvicorn's request cycle and therefore has the attributes that uvicorn reads.

    Args:
        link: the connection.
        handler: serves the request.
        path: path of the URL, without query; for paths with an id in them, their pattern.
        headers: names in lower case; of a repeated name the last.
        http_10: the client uses HTTP/1.0: no chunks, no keep-alive.
        keep_alive: the connection may serve another request.
        before: the previous request on the same connection, an ``Inbound`` or uvicorn's.
        method: in capitals.
        target: path and query as the client sent them; empty: the path.
        query: the query, without its question mark.
    """

    def __init__(
        self,
        link: Link,
        handler: Handler,
        path: str,
        headers: dict[bytes, bytes],
        *,
        http_10: bool,
        keep_alive: bool,
        before: Any,
        method: str = "POST",
        target: str = "",
        query: str = "",
    ) -> None:
        self._link = link
        self._handler = handler
        self.path = path
        self.method = method
        self.target = target or path
        self.query = query
        self.headers = headers
        self.keep_alive = keep_alive
        self.message_event = _NOBODY
        self.response_complete = False
        self.started = False
        """True once the head of the answer is set: no other answer is possible."""
        self.arrived_s = time.perf_counter()
        self.arrived_unix_s = time.time()
        self.gone = False
        self.on_gone: Callable[[], object] | None = None
        """Called once if the client leaves before its answer is complete."""
        self.on_writable: Callable[[bool], None] | None = None
        """Called with False when the client does not read fast enough, and with True when it reads again."""
        self.writable = True
        self._http_10 = http_10
        self._before = before
        self._bounds = handler.bounds
        self._parts: list[bytes | bytearray] = []
        self._size = 0
        self._body_complete = False
        self._served = False
        self._muted = False
        self._link_write = link.writer()  # cached: it is called for every event
        self._head = b""
        self._chunked = False
        self._timer: asyncio.TimerHandle | None = None
        self.row = handler.opened(self)

    # Receiving, called by the connection

    def opened(self) -> None:
        """Process the headers: reject requests that are not allowed or too large."""
        if self.refusable:  # else ``serve`` checks again in its turn
            try:
                self._handler.admit(self)
            except RequestError as error:
                self.refuse(error)
                return
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and (encoded := encoding_error(encoding.decode("latin-1"))) is not None:
            self.refuse(encoded)
            return
        announced = self.headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._bounds.body_bytes:
            self._refuse_size()

    def feed(self, part: bytes) -> None:
        """Accept a piece of the body."""
        if self.response_complete:
            return
        self._size += len(part)
        room = self._bounds.hold(len(part), self._size)
        if self._size > self._bounds.body_bytes:
            self._refuse_size()
        elif not room:
            self.refuse(self._bounds.no_room())
        elif self._parts and len(part) < _SMALL_BYTES:
            self._join(part)
        else:
            self._parts.append(part)

    def wait(self) -> None:
        """Start the body's timer if it has not been received completely."""
        if not self._body_complete and not self.response_complete and self._timer is None:
            self._timer = self._link.loop.call_later(self._bounds.body_s, self._late)

    def body_ended(self) -> bool:
        """Mark the body as complete. True if the request can be served now."""
        self._body_complete = True
        self._stop_timer()
        if self.response_complete:  # it was rejected, and has now been read to its end
            if not self._muted:  # else an earlier answer is in progress, and closes the connection at its end
                self._link.close()
            return False
        return self._before is None or bool(self._before.response_complete)

    @property
    def refusable(self) -> bool:
        """True if an error can be answered at once: neither this answer nor an earlier one is in progress."""
        return not self.started and (self._before is None or bool(self._before.response_complete))

    def refuse(self, error: RequestError) -> None:
        """Reject the request. If an earlier answer of the connection is in progress, that becomes the last one."""
        self._stop_timer()
        if not self.refusable:
            self._muted = True
            self._before.keep_alive = False
            self._link.stop()
        self._handler.refuse(self, error)

    def serve(self) -> Coroutine[Any, Any, None]:
        """Coroutine that serves the request: its body is complete, and earlier requests are answered."""
        self._before = None
        self._served = True
        return self._handler.serve(self)

    @property
    def peer(self) -> str:
        """The client's address, without its port."""
        return self._link.peer()

    @property
    def body(self) -> bytes:
        """The whole body."""
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]  # type: ignore[return-value]  # the first piece is never a bytearray

    def lost(self) -> None:
        """Record that the connection is closed."""
        self._stop_timer()
        self._release()
        if self.gone or self.response_complete:
            return
        self.gone = True
        if not self._served:
            self._handler.left(self)
        elif self.on_gone is not None:
            self.on_gone()

    def set_writable(self, writable: bool) -> None:
        """Record that the connection's write buffer has crossed its limit, in either direction."""
        self.writable = writable
        if self.on_writable is not None:
            self.on_writable(writable)

    def _join(self, part: bytes) -> None:
        """Append a small piece to the one before: a bytes object of its own costs 33 bytes and a place in the list."""
        last = self._parts[-1]
        if isinstance(last, bytearray):
            last += part
        else:
            self._parts.append(bytearray(part))

    def _drop(self) -> None:
        """Free the body; the connection keeps this object until its next request."""
        self._parts.clear()
        self._release()

    def _release(self) -> None:
        self._bounds.release(self._size)
        self._size = 0

    def _late(self) -> None:
        self._timer = None
        self.refuse(late_body())

    def _refuse_size(self) -> None:
        limit = self._bounds.body_bytes
        self.refuse(
            RequestError(413, f"the body is larger than {limit} bytes (limits.body_bytes)", code="body_too_large")
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Sending, called by the handler

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """Set status and headers, sent with the first piece of the body; ``length`` in bytes, None if unknown."""
        self.started = True
        if not self._body_complete:
            self.keep_alive = False
        self._chunked = length is None and not self._http_10
        if length is None and self._http_10:
            self.keep_alive = False
        lines = [STATUS_LINE[status]]
        for name, value in (*self._link.default_headers(self.headers), *headers):
            lines += (name, b": ", value, b"\r\n")
        if length is not None:
            lines.append(b"content-length: %d\r\n" % length)
        elif self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def write(self, data: bytes) -> None:
        """Write a piece of the body; not empty. Never blocks; ``writable`` is False while the client is slow."""
        if self.gone:
            return
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        if self._head:
            framed, self._head = self._head + framed, b""
        self._link_write(framed)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """A function that writes whole chunks as they are framed; None if the body is not sent in chunks.

        For an answer whose head has been written, while the client is there (``gone``).
        """
        return self._link_write if self._chunked and not self._head else None

    def finish(self, data: bytes = b"") -> None:
        """Write the last piece of the body, if any, and end it."""
        if self.response_complete:
            return
        self.response_complete = True
        self._stop_timer()
        self._drop()
        if self.gone or self._muted:
            return
        end = b""
        if self._chunked:
            end = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        else:
            end = data
        self._link_write(self._head + end)
        self._head = b""
        if self._body_complete:
            self._link.end(self, keep_alive=self.keep_alive)
        else:
            self._timer = self._link.loop.call_later(LINGER_S, self._link.close)

    def abandon(self) -> None:
        """Cut the connection: the answer is incomplete, and the client must not take it for complete."""
        self.response_complete = True
        self._drop()
        self._link.cut()
