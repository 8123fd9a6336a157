"""uvicorn's server with the proxy's signals and its way of ending.

SIGTERM and SIGINT: not ready at once, new generation requests are refused; after ``drain_delay_s``, in which load
balancers notice, the listening sockets close; what runs has ``grace_s``, then every stream ends with an error event.
A second signal skips the waiting. SIGHUP reads the settings again. uvicorn's own handlers would end the process by the
signal it was sent; an ordinary end has exit code 0 here.
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

from proxy.core import Core

log = logging.getLogger("warmroute.server")

_LOOK_S = 0.05
_UNWIND_S = 5.0
"""Bound on how long requests that were cut take to end."""
_FLUSH_S = 2.0
"""What a client has at least to read the end of its answer, once the grace is over."""


class ProxyServer(uvicorn.Server):
    """Serves one core's application until a signal ends it."""

    def __init__(self, config: uvicorn.Config, core: Core, on_hangup: Callable[[], None]) -> None:
        super().__init__(config)
        self._core = core
        self._on_hangup = on_hangup
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        if self.started:
            self._core.port = self.servers[0].sockets[0].getsockname()[1]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours instead of uvicorn's, for as long as the server runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers: dict[int, Callable[[], None]] = {
            signal.SIGTERM: self.end,
            signal.SIGINT: self.end,
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
        """Begin to end; the second time, without waiting for anybody."""
        if self.should_exit:
            self._hurry.set()
        self._core.draining = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End in order; returns when connections and files are closed."""
        core, settings = self._core, self._core.settings
        core.draining = True
        if settings.drain_delay_s:
            log.info("draining: not ready, listening for %g s more", settings.drain_delay_s)
            await self._wait(lambda: False, self._now_s() + settings.drain_delay_s)
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        ends_s = core.ends_s = self._now_s() + settings.grace_s
        log.info("shutting down: %d request(s) have %g s", self._in_flight(), settings.grace_s)
        await self._wait(lambda: not self._in_flight(), ends_s)
        await self._cut()
        # What is finished may still be on its way to clients that read slowly.
        await self._wait(lambda: not self.server_state.connections, max(ends_s, self._now_s() + _FLUSH_S))
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0.01)  # their ends are told in the next turns of the loop: every request has its record
        await self.lifespan.shutdown()

    async def _cut(self) -> None:
        """Cancel what is left; generation ends its streams with an error event."""
        if self._in_flight():
            log.warning("%d request(s) were cut at the end of their grace", self._in_flight())
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
                async with asyncio.timeout(min(left_s, _LOOK_S)):
                    await self._hurry.wait()

    def _in_flight(self) -> int:
        """Generation requests, those whose body is still arriving included."""
        return self._core.breakdown.started - self._core.breakdown.finished

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
