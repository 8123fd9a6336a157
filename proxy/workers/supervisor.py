"""The parent of the workers: starts them, restarts one that ends or hangs, passes signals on, holds what they share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from proxy.clients.bounds import raise_descriptor_limit
from proxy.errors import RequestError
from proxy.gather.place import changing
from proxy.settings import Settings
from proxy.sharing.frames import Order, WorkerStanding
from proxy.start.address import ListenError
from proxy.start.begin import begin
from proxy.workers.hub import Hub, KeptState
from proxy.workers.process import WorkerProcess
from proxy.workers.reserved import reserved
from proxy.workers.start import WorkerStart
from proxy.workers.watchdog import Watchdog

log = logging.getLogger("warmroute.workers")

FAILED = 1
"""Exit status if workers cannot be started, or one did not end by itself."""
_LEAST_BACKOFF_S = 0.5
_MOST_BACKOFF_S = 30.0
_STEADY_S = 30.0
"""Life of a worker after which its next end is no longer part of a row of failures."""
_ATTEMPTS = 5
"""Failed starts in a row after which the parent gives up, unless another worker serves."""
_ANSWER_S = 10.0
"""Time for a worker to report how long its shutdown may take."""
_RELOAD_S = 30.0
"""Time for the workers to read their settings, during which no request changes them."""
_MARGIN_S = 60.0
_LONGEST_FOLDER = 80
"""Characters; the path of a Unix socket has at most 103 on any system."""
_MEMORY = "/dev/shm"
"""Writable in containers whose root file system is not."""
"""Time for a shutdown beyond what its settings give to requests: files, and the last export of traces."""


def supervise(settings: Settings, config: Path | None, flags: dict[str, Any]) -> int:
    """Serve with ``settings.workers`` processes until SIGINT or SIGTERM; returns the exit status.

    Args:
        settings: those of the proxy.
        config: the settings file; each worker reads it.
        flags: settings of the command line.

    Raises:
        ListenError: an address is in use, or not of this machine, or there is no folder for the workers' sockets.
    """
    raise_descriptor_limit()
    begin(settings)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved(settings.host, settings.port))
        admin = settings.admin
        admin_port = None if admin.port is None else stack.enter_context(reserved(admin.host, admin.port))
        folder = Path(stack.enter_context(_folder()))
        path = None if config is None else str(config.absolute())

        clock_offset_s = time.time() - time.monotonic()

        def start(worker: int, line: int, stacks: int) -> WorkerStart:
            own = (worker, clock_offset_s, os.getpid(), line, stacks)
            return WorkerStart(*own, str(folder), port, admin_port, path, flags)

        return asyncio.run(Supervisor(settings, folder, start).run())


class _End(NamedTuple):
    """End of one process."""

    status: int
    """Exit status, negative for a signal."""
    served: bool
    why: str
    lived_s: float = 0.0
    """Time from its start to its end, or to its last sign of life."""
    hung: bool = False
    """It was killed, as it showed no life."""


class Supervisor:
    """Owner of the worker processes.

    Args:
        settings: those of the proxy.
        folder: that of the workers' sockets.
        start: makes the argument of a worker's process from its number and the descriptors of its line and its stacks.
    """

    def __init__(self, settings: Settings, folder: Path, start: Callable[[int, int, int], WorkerStart]) -> None:
        self._count = settings.workers
        self._silence_s = settings.worker_silence_s
        self._folder = folder
        self._start = start
        self._processes: dict[int, WorkerProcess] = {}
        self._standings = {
            number: WorkerStanding(number, None, False, False, 0, _unix_s(), None) for number in range(self._count)
        }
        sessions, responses = settings.sessions, settings.responses
        kept = KeptState(sessions.capacity, sessions.ttl_s, responses.capacity, responses.ttl_s)
        self._hub = Hub(kept, lambda: tuple(self._standings.values()))
        self._ending = asyncio.Event()
        self._hung_up = asyncio.Event()
        """SIGHUP has come, and no reload has begun since."""
        self._reloads: asyncio.Task[None] | None = None
        self._hurried = False
        self._failed_starts = 0
        self._status = 0

    async def run(self) -> int:
        """Run until all workers have ended; returns the exit status."""
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self._end, signal.SIGINT: self._end, signal.SIGHUP: self._hung_up.set}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # kept during the start (proxy/cli.py)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in range(self._count):
                    group.create_task(self._keep(worker), name=f"worker-{worker}")
                self._reloads = group.create_task(self._reload_at_hangups(), name="reloads")
                if self._silence_s:
                    group.create_task(self._watch(self._silence_s), name="watchdog")
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
        return self._status

    async def _keep(self, worker: int) -> None:
        """Run one worker's processes, one after the other."""
        backoff_s, ready = _LEAST_BACKOFF_S, False
        while not self._ending.is_set():
            end = await self._run(worker)
            if self._ending.is_set():
                self._status = self._status or (0 if end.status == 0 else FAILED)
                return
            ready = ready or end.served
            self._failed_starts = 0 if end.served else self._failed_starts + 1
            if not ready:
                self._give_up(f"worker {worker} {end.why} before it served: the log above has the reason", end.status)
                return
            if self._failed_starts >= _ATTEMPTS and not any(each.serving for each in self._standings.values()):
                self._give_up(f"no worker serves, and {self._failed_starts} starts in a row have failed", end.status)
                return
            if end.served and end.lived_s > _STEADY_S:
                backoff_s = _LEAST_BACKOFF_S
            log.error("worker %d %s: started again in %g s", worker, end.why, backoff_s)
            before = self._standings[worker]
            restarts, hung = before.restarts + 1, before.hung + end.hung
            self._standings[worker] = WorkerStanding(worker, None, False, False, restarts, _unix_s(), end.why, hung)
            await self._ended_within(backoff_s)
            backoff_s = min(_MOST_BACKOFF_S, 2 * backoff_s)

    async def _watch(self, silence_s: float) -> None:
        """Have workers killed that show no life, until the shutdown, which has bounds of its own."""
        watchdog = Watchdog(silence_s, lambda: tuple(self._processes.values()), self._standings.__getitem__)
        while not await self._ended_within(watchdog.look_s):
            await watchdog.look()

    async def _ended_within(self, wait_s: float) -> bool:
        """Wait; True as soon as the shutdown has begun."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._ending.wait()
        return self._ending.is_set()

    async def _run(self, worker: int) -> _End:
        """One process from its start to its end."""
        began_s = time.monotonic()
        process = WorkerProcess(worker, self._hub, self._changed, lambda: tuple(self._processes.values()))
        try:
            await process.start(self._start)
        except OSError as error:
            return _End(FAILED, False, f"cannot be started: {error}")
        self._processes[worker] = process
        self._changed(process)
        try:
            if self._ending.is_set():  # the order to end has been given while it was started
                process.order(Order.END)
            ended = asyncio.create_task(process.ended(), name=f"end-of-{worker}")
            try:
                ending = asyncio.create_task(self._ending.wait(), name=f"ending-{worker}")
                try:
                    await asyncio.wait((ended, ending), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ending.cancel()
                if not ended.done():
                    await self._see_off(process, ended)
                status = await ended
                why = f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status}"
                until_s = time.monotonic()
                if process.hung_s is not None:
                    why, until_s = f"showed no life for {process.hung_s:.0f} s and was killed", process.heard_s
                why = f"(process {process.pid}) {why}"
                return _End(status, process.served, why, until_s - began_s, process.hung_s is not None)
            finally:
                ended.cancel()
        finally:
            del self._processes[worker]
            await process.close()
            self._changed(process)

    async def _see_off(self, process: WorkerProcess, ended: asyncio.Task[int]) -> None:
        """Wait for the end of a process that was ordered to end; kill it if that takes too long."""
        within_s = _ANSWER_S
        while not ended.done():
            await asyncio.wait({ended}, timeout=within_s)
            if ended.done() or process.ends_within_s is None or within_s > _ANSWER_S:
                break
            within_s = process.ends_within_s + _MARGIN_S
        if not ended.done():
            log.error("worker %d (process %d) did not end in time and is killed", process.worker, process.pid)
            process.kill()

    def _end(self) -> None:
        """Begin the shutdown; a second call skips the waiting."""
        if self._ending.is_set() and not self._hurried:
            self._hurried = True
            for process in self._processes.values():
                process.order(Order.HURRY)
            return
        log.info("shutting down %d worker(s)", len(self._processes))
        self._ending.set()
        if self._reloads is not None:
            self._reloads.cancel()
        for process in self._processes.values():
            process.order(Order.END)

    async def _reload_at_hangups(self) -> None:
        """Have the workers reload after each SIGHUP, until cancelled."""
        while await self._hung_up.wait():
            self._hung_up.clear()
            try:
                # A change between the reloads of two workers would be the later one for the first, the earlier for the
                # second.
                async with changing(self._folder):
                    await self._reload()
            except (RequestError, OSError) as error:
                log.warning("the workers reload beside another change, which some may take before it: %s", error)
                await self._reload()

    async def _reload(self) -> None:
        """Have every worker reload, and wait for those that serve."""
        log.info("the workers read their settings again")
        for process in self._processes.values():
            process.order(Order.RELOAD)
        reloading = [process.reloaded() for process in self._processes.values() if process.listed]
        try:
            async with asyncio.timeout(_RELOAD_S):
                await asyncio.gather(*reloading)
        except TimeoutError:
            log.warning("not every worker has read its settings within %g s", _RELOAD_S)

    def _give_up(self, why: str, status: int) -> None:
        if not self._ending.is_set():
            log.error("%s", why)
            self._status = status if status > 0 else FAILED
            self._end()

    def _changed(self, process: WorkerProcess) -> None:
        """Keep the standing of a process."""
        before = self._standings[process.worker]
        current = self._processes.get(process.worker) is process
        self._standings[process.worker] = WorkerStanding(
            process.worker,
            process.pid if current else None,
            process.listed and current,
            process.serves and current,
            before.restarts,
            process.since_unix_s if current else _unix_s(),
            before.last_end,
            before.hung,
        )


def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the workers' sockets. Raises ListenError."""
    refused: list[str] = []
    for place in (None, _MEMORY):
        try:
            folder = tempfile.TemporaryDirectory(prefix="warmroute-", dir=place, ignore_cleanup_errors=True)
        except OSError as error:
            refused.append(f"{place or 'TMPDIR'}: {error.strerror or error}")
            continue
        if len(folder.name) <= _LONGEST_FOLDER:
            return folder
        refused.append(f"{folder.name} is too long for the path of a socket")
        folder.cleanup()
    raise ListenError(f"workers need a folder for their sockets: set TMPDIR to a writable one ({'; '.join(refused)})")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _unix_s() -> float:
    return round(time.time(), 3)
