"""uvicorn's server with the proxy's signal handling and graceful shutdown.

SIGTERM and SIGINT: not ready at once; for ``drain_delay_s``, in which load balancers notice, new requests are still
served, on connections that close after the answer; then the listening sockets close; running requests have
``grace_s``, then every stream ends with an error event. A second signal skips the waiting. SIGHUP reloads the
settings. uvicorn's own handlers would end the process by the signal; here a graceful shutdown has exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from proxy.clients.listening import BoundedServer
from proxy.clients.protocol import ProxyProtocol
from proxy.core import Core

log = logging.getLogger("warmroute.server")

_POLL_S = 0.05
_SETTLE_S = 0.25
"""Time for requests that clients had sent before the listener closed: a closed connection would lose them."""
_FIRST_REQUEST_S = 1.0
"""Time for the requests of connections that were opened before and have sent none, or only its beginning: a load
balancer that lacks CPU opens one and sends later, and does not repeat a request that it has sent on a closed one."""
_UNWIND_S = 5.0
"""Bound on how long cancelled requests take to end."""
_FLUSH_S = 2.0
"""Minimum time for clients to read the end of their answers after the grace period."""


class ProxyServer(BoundedServer):
    """Serves one core's application until a signal ends it."""

    def __init__(self, config: uvicorn.Config, core: Core, on_hangup: Callable[[], None]) -> None:
        handshake_s, shared = core.settings.tls.handshake_s, core.worker is not None
        super().__init__(config, handshake_s, core.clients.refused_handshake, shared_port=shared)
        self._core = core
        self.on_listening: Callable[[], None] = _ignore
        """Called when the main listener listens."""
        self._on_hangup = on_hangup
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._core.port = self.servers[0].sockets[0].getsockname()[1]
            # One that came during the start was kept for now (proxy/cli.py).
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
            self.on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the proxy's signal handlers instead of uvicorn's while the server runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        # A worker's parent forwards both; a supervisor may send them to every process as well, which is no second one.
        end = self.end if self._core.worker is None else self._end_once
        handlers: dict[int, Callable[[], None]] = {
            signal.SIGTERM: end,
            signal.SIGINT: end,
            signal.SIGHUP: self._on_hangup,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def end(self) -> None:
        """Begin the shutdown; a second call skips the waiting."""
        if self.should_exit:
            self._hurry.set()
        self._core.draining = True
        self.should_exit = True

    def _end_once(self) -> None:
        if not self.should_exit:
            self.end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down gracefully; returns when connections and files are closed."""
        core, settings = self._core, self._core.settings
        core.draining = True
        if settings.drain_delay_s:
            log.info("draining: not ready, closing the listener in %g s", settings.drain_delay_s)
            await self._wait(lambda: False, self._now_s() + settings.drain_delay_s)
        await self.stop_listening(sockets)
        closed_s = self._now_s()
        await self._wait(lambda: not self.server_state.connections, closed_s + _SETTLE_S)
        await self._wait(lambda: not self._awaits_request(), closed_s + _FIRST_REQUEST_S)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        ends_s = core.ends_s = self._now_s() + settings.grace_s
        log.info("shutting down: %d request(s) have %g s to finish", self._in_flight(), settings.grace_s)
        await self._wait(lambda: not self._in_flight(), ends_s)
        core.breakdown.end_subscriptions()
        await self._wait(lambda: not core.breakdown.subscribers, self._now_s() + _FLUSH_S)
        await self._cut()
        # Finished answers may still be in transit to slow clients.
        await self._wait(lambda: not self.server_state.connections, max(ends_s, self._now_s() + _FLUSH_S))
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0.01)  # their ends are reported in later turns of the loop, then every request has its row
        await self.lifespan.shutdown()

    async def _cut(self) -> None:
        """Cancel the remaining requests; generation ends its streams with an error event."""
        if self._in_flight():
            log.warning("%d request(s) were cut at the end of the grace period", self._in_flight())
        for connection in list(self.server_state.connections):
            if isinstance(connection, ProxyProtocol):
                connection.refuse_unread()
        tasks = set(self.server_state.tasks)
        for task in tasks:
            task.cancel("shutdown")
        if tasks:
            await asyncio.wait(tasks, timeout=_UNWIND_S)

    async def _wait(self, done: Callable[[], bool], until_s: float) -> None:
        while not done() and not self._hurry.is_set():
            left_s = until_s - self._now_s()
            if left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _POLL_S)):
                    await self._hurry.wait()

    def _awaits_request(self) -> bool:
        """True while a connection is in use whose request has not arrived."""
        return any(isinstance(each, ProxyProtocol) and each.awaits_request for each in self.server_state.connections)

    def _in_flight(self) -> int:
        """Number of generation requests, including those whose body is still arriving."""
        return self._core.breakdown.started - self._core.breakdown.finished

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _ignore() -> None:
    """Default of ``on_listening``."""
