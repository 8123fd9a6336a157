"""Main listener: uvicorn's HTTP protocol, with generation requests handled before ASGI.

For a relayed event ASGI costs a task wake-up, two dictionaries and a coroutine; here the engine's bytes go from one
socket's callback to the other socket. All other requests go through uvicorn and FastAPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from proxy.clients.inbound import STATUS_LINE, Handler, Headers, Inbound
from proxy.errors import RequestError, draining_error, error_body

PATHS = {b"/v1/completions": "/v1/completions", b"/v1/chat/completions": "/v1/chat/completions"}


class ProxyProtocol(HttpToolsProtocol):
    """One client connection.

    Args:
        handler: serves the generation requests.
        config, server_state, app_state: uvicorn's.
    """

    def __init__(
        self,
        handler: Handler,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._handler = handler
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._receiving: Inbound | None = None
        self._open: list[Inbound] = []

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._stopped:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head:
            if self._head_bytes > self._handler.header_bytes:
                self._refuse_head()
            elif self._head_bytes and self._head_timer is None:
                self._await_head()
        elif self._receiving is not None:
            self._receiving.wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        self._unset_keepalive_if_required()
        for inbound in self._open:
            inbound.lost()
        self._open.clear()
        self._receiving = None
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()

    def pause_writing(self) -> None:
        super().pause_writing()
        for inbound in self._open:
            inbound.set_writable(False)
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()
        for inbound in self._open:
            inbound.set_writable(True)

    def shutdown(self) -> None:
        """Reject a request that is still being received at shutdown (uvicorn's hook)."""
        if self._receiving is not None and not self._receiving.response_complete:
            self._receiving.refuse(draining_error())
        super().shutdown()

    # httptools

    def on_headers_complete(self) -> None:
        """Take over a generation request; all others are left to uvicorn (callback of httptools)."""
        self._in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        size, hosts = len(self.url), 0
        for name, value in self.headers:
            size += len(name) + len(value)
            hosts += name == b"host"
        http_10 = self.parser.get_http_version() == "1.0"
        if size > self._handler.header_bytes:
            self._refuse_head()
            return
        if hosts > 1 or not (hosts or http_10):  # RFC 9112, 3.2
            self._answer_and_close(400, "a request has exactly one Host header", "invalid_http")
            return
        path = PATHS.get(self.url.partition(b"?")[0])
        if path is None or self.parser.get_method() != b"POST":
            self._receiving = None
            super().on_headers_complete()
            return
        before = self.cycle
        inbound = Inbound(
            self,
            self._handler,
            path,
            dict(self.headers),
            http_10=http_10,
            keep_alive=not http_10 and self.parser.should_keep_alive(),
            before=before,
        )
        self.cycle = inbound  # type: ignore[assignment]
        self._receiving = inbound
        self._open.append(inbound)
        inbound.opened()
        if self.expect_100_continue and not inbound.response_complete:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Accept a piece of a body (callback of httptools)."""
        if self._receiving is not None:
            self._receiving.feed(body)
        elif not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Start a complete request (callback of httptools)."""
        self._in_head = True
        inbound, self._receiving = self._receiving, None
        if inbound is None:
            if not self.transport.is_closing():
                super().on_message_complete()
        elif inbound.body_ended():
            self._start(inbound)
        elif not inbound.response_complete:  # an earlier request of this connection is still being answered
            self.flow.pause_reading()
            self.pipeline.appendleft((inbound, self.app))  # type: ignore[arg-type]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start the next pipelined request (uvicorn's hook)."""
        if isinstance(cycle, Inbound):
            self._start(cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def _start(self, inbound: Inbound) -> None:
        task = self.loop.create_task(inbound.serve())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # Link

    def writer(self) -> Callable[[bytes], None]:
        return self.transport.write

    def end(self, inbound: Inbound, *, keep_alive: bool) -> None:
        if inbound in self._open:
            self._open.remove(inbound)
        if not keep_alive:
            self.close()
        self.on_response_complete()

    def close(self) -> None:
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_reader()

    def stop(self) -> None:
        self._stopped = True

    def cut(self) -> None:
        self.transport.abort()

    def default_headers(self) -> Headers:
        return self.server_state.default_headers

    def peer(self) -> str:
        return self.client[0] if self.client else "?"

    # Clients that do not read

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long (uvicorn's hook)."""
        if not self.transport.is_closing():
            self.close()

    def _watch_reader(self) -> None:
        """Start the timer for unread output. A stream's relay has its own bound."""
        if self._stall_timer is None:
            unread_bytes = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(self._handler.client_stall_s, self._look_at_reader, unread_bytes)

    def _look_at_reader(self, unread_bytes: int) -> None:
        self._stall_timer = None
        relayed = any(inbound.on_writable is not None for inbound in self._open)
        if relayed or self.transport.get_write_buffer_size() < unread_bytes:
            self._watch_reader()
        else:
            self.cut()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # Bounds on the request head

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._handler.header_s, self._head_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if not self._head_bytes:  # connected without sending anything: no answer is expected
            self.transport.close()
        else:
            self._answer_and_close(408, "the headers did not arrive in time (timeouts.header_s)", "header_timeout")

    def _refuse_head(self) -> None:
        self._answer_and_close(
            431, f"request line and headers are larger than {self._handler.header_bytes} bytes (limits.header_bytes)",
            "headers_too_large",
        )  # fmt: skip

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP (uvicorn's hook)."""
        inbound = self._receiving
        if inbound is None or inbound.response_complete:
            self._answer_and_close(400, msg, "invalid_http")
            return
        at_once = inbound.refusable
        inbound.refuse(RequestError(400, msg, code="invalid_http"))
        if at_once:
            self.close()

    def _answer_and_close(self, status: int, message: str, code: str) -> None:
        """Reject data that belongs to no request; answers only if no earlier answer is in progress."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(message, "invalid_request_error", code)
            self.transport.write(
                b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (STATUS_LINE[status], len(body), body)
            )
        self.transport.close()
