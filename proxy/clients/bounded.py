"""uvicorn's HTTP protocol with bounds on everything that a client may send, for both listeners.

uvicorn bounds neither the size of heads, bodies and trailers nor the time that they take. Here a request reaches the
application when it is complete; until then this class owns it.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from proxy.clients.bounds import SPARE_CONNECTIONS, ClientBounds, large_trailers, late_body
from proxy.clients.inbound import LINGER_S, STATUS_LINE
from proxy.errors import RequestError, dialect_of

_END_OF_AUTHORITY = re.compile(rb"[/?#]")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """One client connection whose requests go to the ASGI application.

    Args:
        bounds: limits, and accounts that all connections share.
        config, server_state, app_state: uvicorn's.
    """

    _spare_connections = 2 * SPARE_CONNECTIONS
    """The admin listener stays open when the main one has used its spare connections."""

    def __init__(
        self,
        bounds: ClientBounds,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.url = b""  # before the first request there is an answer already if there are too many connections
        self._bounds = bounds
        self._spare = False
        self._in_head = True
        self._quiet_bytes = 0
        """Bytes received since the last complete head or piece of a body: of a head, of chunk sizes, of trailers."""
        self._timer: asyncio.TimerHandle | None = None
        """Bound on the head or body that is being received, or on the rest of a refused one."""
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._body: bytearray | None = None
        self._held_bytes = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        bounds = self._bounds
        bounds.open += 1
        self._spare = bounds.crowded
        if bounds.full(self._spare_connections):
            self._answer_and_close(bounds.too_many())
        else:
            self._await(bounds.header_s)

    def data_received(self, data: bytes) -> None:
        if self._stopped or self.transport.is_closing():
            return
        self._quiet_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        except httptools.HttpParserUpgrade as offer:
            if not self._parse_without_upgrades(data, offer):
                return
        if self._quiet_bytes > self._bounds.header_bytes:
            self._refuse_quiet()
        elif self._in_head:
            if self._quiet_bytes:
                self._await(self._bounds.header_s)
        else:
            self._await_body()

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.open -= 1
        self._body = None
        self._release()
        self._stop_timer()
        self._stop_stall_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    # httptools

    def on_message_begin(self) -> None:
        """Begin a head; the scope of ASGI is made when the application gets the request (callback of httptools)."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers are dropped, since nothing here uses them (callback of httptools)."""
        if not self._in_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Check a head and begin to receive the body (callback of httptools)."""
        if self._stopped or self.transport.is_closing() or self.parser.should_upgrade():
            return  # with an offer to upgrade the head is parsed again without it
        self._in_head = False
        self._quiet_bytes = 0
        self._stop_timer()
        size, hosts = len(self.url), 0
        for name, value in self.headers:
            size += len(name) + len(value)
            hosts += name == b"host"
        http_10 = self.parser.get_http_version() == "1.0"
        if size > self._bounds.header_bytes:
            self._refuse_head()
        elif hosts > 1 or not (hosts or http_10):  # RFC 9112, 3.2
            self._answer_and_close(RequestError(400, "a request has exactly one Host header", code="invalid_http"))
        else:
            if not self.url.startswith(b"/"):
                self._to_origin_form()
            self._begin(http_10)

    def on_body(self, body: bytes) -> None:
        """Accept a piece of a body (callback of httptools)."""
        self._quiet_bytes = 0
        if self._body is None:
            return
        bounds = self._bounds
        self._body += body
        self._held_bytes += len(body)
        room = bounds.hold(len(body), len(self._body))
        if len(self._body) > bounds.admin_body_bytes:
            limit = bounds.admin_body_bytes
            self._refuse(
                RequestError(
                    413, f"the body is larger than {limit} bytes (limits.admin_body_bytes)", code="body_too_large"
                )
            )
        elif not room:
            self._refuse(bounds.no_room())

    def on_message_complete(self) -> None:
        """Hand a complete request to uvicorn (callback of httptools)."""
        if self._in_head:  # a head that was not accepted, or that is parsed again
            return
        self._in_head = True
        self._quiet_bytes = 0
        self._stop_timer()
        body, self._body = self._body, None
        if body is None:  # it was refused, and has now been read to its end
            if self._may_answer:
                self.close()
            return
        head = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # makes the scope, and clears the head
        self.url, self.headers, self.expect_100_continue = head
        self.scope["headers"] = self.headers
        super().on_headers_complete()
        if self._spare:
            self.cycle.keep_alive = False
        if body:
            super().on_body(body)  # type: ignore[arg-type]
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held_bytes and self._body is None and not self.pipeline:
            self._release()

    def _to_origin_form(self) -> None:
        """Replace a whole URL, as clients with ``http_proxy`` send it, by its path, and the Host header by its host.

        RFC 9112, 3.2.2: a server accepts this form, and ignores the Host header that came with it.
        """
        scheme, found, rest = self.url.partition(b"://")
        if not found or scheme.lower() not in {b"http", b"https"}:
            return  # such as "*"
        authority = _END_OF_AUTHORITY.split(rest, maxsplit=1)[0]
        path = rest[len(authority) :]
        self.url = path if path.startswith(b"/") else b"/" + path
        others = [header for header in self.headers if header[0] != b"host"]
        self.headers = [(b"host", authority.rpartition(b"@")[2]), *others]

    def _begin(self, http_10: bool) -> None:
        """Receive the body of the request whose head is complete."""
        self._body = bytearray()
        if self.expect_100_continue:
            self.expect_100_continue = False  # else uvicorn would send it again
            if self._may_answer:  # else it would end up inside the earlier answer
                self.transport.write(CONTINUE)

    def _release(self) -> None:
        self._bounds.release(self._held_bytes)
        self._held_bytes = 0

    # Offers to upgrade

    def _parse_without_upgrades(self, data: bytes, offer: httptools.HttpParserUpgrade) -> bool:
        """Parse the head that ends at ``offer`` again without its ``Upgrade`` header, then the rest; False if refused.

        llhttp takes such a head for the last HTTP on the connection and would not return the body. RFC 9110, 7.8: a
        server may ignore the header.
        """
        rest = memoryview(data)
        while True:
            if self._stopped or self.transport.is_closing():
                return False
            if self.parser.get_method() == b"CONNECT":
                self._answer_and_close(RequestError(405, "CONNECT is not supported", code="invalid_http"))
                return False
            rest = rest[offer.args[0] :]
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            try:
                self.parser.feed_data(head)
                self.parser.feed_data(rest)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return False
            except httptools.HttpParserUpgrade as another:
                offer = another
            else:
                return True

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    # Bounds on time

    def _await(self, bound_s: float) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(bound_s, self._late)

    def _await_body(self) -> None:
        """Start the timer of a body that has not been received completely."""
        if self._body is not None:
            self._await(self._bounds.body_s)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._body is not None:
            self._refuse(late_body())
        elif self._quiet_bytes:
            error = RequestError(408, "the headers did not arrive in time (timeouts.header_s)", code="header_timeout")
            self._answer_and_close(error)
        else:  # connected without sending anything: no answer is expected
            self.transport.close()

    # Refusals

    @property
    def _may_answer(self) -> bool:
        """True if no earlier answer of the connection is in progress."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP (uvicorn's hook)."""
        self._answer_and_close(RequestError(400, msg, code="invalid_http"))

    def _refuse_head(self) -> None:
        limit = self._bounds.header_bytes
        message = f"request line and headers are larger than {limit} bytes (limits.header_bytes)"
        self._answer_and_close(RequestError(431, message, code="headers_too_large"))

    def _refuse_quiet(self) -> None:
        if self._in_head:
            self._refuse_head()
        elif self._body is not None:
            self._refuse(large_trailers(self._bounds.header_bytes))
        else:  # already refused
            self.stop()

    def _refuse(self, error: RequestError) -> None:
        """Reject the request that is being received. An earlier answer in progress becomes the last one."""
        self.stop()
        self._body = None
        self._release()
        self._stop_timer()
        if self._may_answer:
            self._answer(error)
            self._timer = self.loop.call_later(LINGER_S, self.close)
        else:
            self.cycle.keep_alive = False

    def _answer_and_close(self, error: RequestError) -> None:
        """Reject data that belongs to no request; answers only if no earlier answer is in progress."""
        if self.transport.is_closing():
            return
        if self._may_answer:
            self._answer(error)
        self.transport.close()

    def _answer(self, error: RequestError) -> None:
        self._bounds.refused(error, self.peer())
        body = dialect_of(self.url.decode("latin-1")).body(error)
        retry = b"" if error.retry_after_s is None else b"retry-after: %d\r\n" % error.retry_after_s
        self.transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b"
            % (STATUS_LINE[error.status], len(body), retry, body)
        )

    @property
    def awaits_request(self) -> bool:
        """True until the head of the first request is complete, and while that of a further one arrives."""
        return self.cycle is None or (self._in_head and self._quiet_bytes > 0)

    def peer(self) -> str:
        """The client's address, without its port."""
        return self.client[0] if self.client else "?"

    def stop(self) -> None:
        """Discard what still arrives."""
        self._stopped = True

    def close(self) -> None:
        """Close the connection after everything has been written."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_reader()

    def cut(self) -> None:
        """Close the connection at once; unwritten data is lost."""
        self.transport.abort()

    # Clients that do not read

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long (uvicorn's hook)."""
        if not self.transport.is_closing():
            self.close()

    def _watch_reader(self) -> None:
        """Start the timer for unread output."""
        if self._stall_timer is None:
            unread_bytes = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(self._bounds.client_stall_s, self._look_at_reader, unread_bytes)

    def _look_at_reader(self, unread_bytes: int) -> None:
        self._stall_timer = None
        if self._relayed or self.transport.get_write_buffer_size() < unread_bytes:
            self._watch_reader()
        else:
            self.cut()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    @property
    def _relayed(self) -> bool:
        """True while a stream is relayed, which has its own bound on a client that does not read."""
        return False
