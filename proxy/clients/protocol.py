"""Main listener: generation requests are handled before ASGI.

For a relayed event ASGI costs a task wake-up, two dictionaries and a coroutine; here the engine's bytes go from one
socket's callback to the other socket. All other requests go through uvicorn and FastAPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from proxy.clients.bounded import CONTINUE, BoundedProtocol
from proxy.clients.bounds import SPARE_CONNECTIONS, large_trailers
from proxy.clients.inbound import Handler, Headers, Inbound
from proxy.errors import RequestError, draining_error
from proxy.paths import POST_PATHS, stored_path


class ProxyProtocol(BoundedProtocol):
    """One client connection of the main listener.

    Args:
        handler: serves the generation requests.
        config, server_state, app_state: uvicorn's.
    """

    _spare_connections = SPARE_CONNECTIONS

    def __init__(
        self,
        handler: Handler,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(handler.bounds, config, server_state, app_state, _loop)
        self._handler = handler
        self._receiving: Inbound | None = None
        self._open: list[Inbound] = []

    # asyncio.Protocol

    def connection_lost(self, exc: Exception | None) -> None:
        for inbound in self._open:
            inbound.lost()
        self._open.clear()
        self._receiving = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        for inbound in self._open:
            inbound.set_writable(False)
        super().pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        for inbound in self._open:
            inbound.set_writable(True)

    def refuse_unread(self) -> None:
        """Reject a request that is still being received at the end of the grace period."""
        if self._receiving is not None and not self._receiving.response_complete:
            self._receiving.refuse(draining_error())

    # httptools

    def _begin(self, http_10: bool) -> None:
        """Take over a generation request; all others are left to uvicorn."""
        bare, _, query = self.url.partition(b"?")
        method = self.parser.get_method()
        path = POST_PATHS.get(bare) if method == b"POST" else None
        if path is None and (path := stored_path(bare, method) or self._handler.other_path(bare, method)) is None:
            super()._begin(http_10)
            return
        if self._spare:
            self._refuse(self._bounds.too_many())
            return
        inbound = Inbound(
            self,
            self._handler,
            path,
            dict(self.headers),
            http_10=http_10,
            keep_alive=not http_10 and self.parser.should_keep_alive(),
            before=self.cycle,
            method="POST" if method == b"POST" else "GET",
            target=self.url.decode("latin-1"),
            query=query.decode("latin-1"),
        )
        expects = self.expect_100_continue and self._may_answer
        self.cycle = inbound  # type: ignore[assignment]
        self._receiving = inbound
        self._open.append(inbound)
        inbound.opened()
        if expects and not inbound.response_complete:
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        """Accept a piece of a body (callback of httptools)."""
        if self._receiving is None:
            super().on_body(body)
        else:
            self._quiet_bytes = 0
            self._receiving.feed(body)

    def on_message_complete(self) -> None:
        """Start a complete request (callback of httptools)."""
        inbound = self._receiving
        if inbound is None:
            super().on_message_complete()
            return
        self._receiving = None
        self._in_head = True
        self._quiet_bytes = 0
        if inbound.body_ended():
            self._start(inbound)
        elif not inbound.response_complete:  # an earlier request of this connection is still being answered
            self.flow.pause_reading()
            self.pipeline.appendleft((inbound, self.app))  # type: ignore[arg-type]

    def _await_body(self) -> None:
        if self._receiving is not None:
            self._receiving.wait()
        else:
            super()._await_body()

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

    def default_headers(self, request: dict[bytes, bytes]) -> Headers:
        defaults = self.server_state.default_headers
        cors = self._handler.cors
        return [*defaults, *cors.headers(request)] if cors.enabled else defaults

    # Bounds

    @property
    def _relayed(self) -> bool:
        return any(inbound.on_writable is not None for inbound in self._open)

    def _refuse_quiet(self) -> None:
        inbound = self._receiving
        if self._in_head or inbound is None:
            super()._refuse_quiet()
            return
        self.stop()
        if not inbound.response_complete:
            inbound.refuse(large_trailers(self._bounds.header_bytes))

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP (uvicorn's hook)."""
        inbound = self._receiving
        if inbound is None or inbound.response_complete:
            super().send_400_response(msg)
            return
        at_once = inbound.refusable
        inbound.refuse(RequestError(400, msg, code="invalid_http"))
        if at_once:
            self.close()
