"""One process of a worker, seen from its parent: its line, and its place in the shared state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from proxy.sharing.frames import (
    Ask,
    AskAlive,
    Changed,
    Delivered,
    Ending,
    FromParent,
    FromWorker,
    Listed,
    Order,
    Ordered,
    Publish,
    Reloaded,
    Reread,
    Serving,
    Shown,
    framed,
    next_from_worker,
)
from proxy.sharing.wire import Message
from proxy.workers.hub import Hub
from proxy.workers.start import STACKS_SIGNAL, WorkerStart, encode_start

log = logging.getLogger("warmroute.workers")

_WAITING_BYTES = 8 * 1024 * 1024
"""Bytes that may wait for a worker that does not read; messages above are dropped, and later ones replace them."""
_LAST_FRAMES_S = 5.0
_STACKS_S = 1.0
"""Time that a process has to write the stacks of its threads; if it can, it takes milliseconds."""
_STACKS_BYTES = 16_384
_SOURCE = str(Path(__file__).parents[2])
_PATH = "PYTHONPATH"


class WorkerProcess:
    """One process of worker ``worker``, from ``start`` to ``close``.

    Args:
        worker: number of the worker.
        hub: state of all workers.
        on_change: called when it can be asked, or serves.
        all_processes: reads those that run now, this one included.
    """

    pid: int

    def __init__(
        self,
        worker: int,
        hub: Hub,
        on_change: Callable[[WorkerProcess], None],
        all_processes: Callable[[], Iterable[WorkerProcess]],
    ) -> None:
        self.worker = worker
        self.listed = self.serves = self.served = False
        self.since_unix_s = round(time.time(), 3)
        self.ends_within_s: float | None = None
        """Bound that it has given for its shutdown."""
        self.heard_s = time.monotonic()
        """Time of its last frame; before the first, of its beginning."""
        self.hung_s: float | None = None
        """Silence after which it was killed; None: it was not killed for that."""
        self._reread = asyncio.Event()
        self._hub = hub
        self._on_change = on_change
        self._all = all_processes
        self._process: asyncio.subprocess.Process
        self._writer: asyncio.StreamWriter
        self._frames: asyncio.Task[None]
        self._stacks: socket.socket

    async def start(self, argument: Callable[[int, int, int], WorkerStart]) -> None:
        """Start the process. Raises OSError."""
        ours, theirs = socket.socketpair()
        self._stacks, stacks = socket.socketpair()
        stacks.setblocking(False)  # a process that is full of threads must not wait in the signal handler
        self._stacks.setblocking(False)
        with theirs, stacks:
            try:
                start = argument(self.worker, theirs.fileno(), stacks.fileno())
                # A session of its own: a terminal's Ctrl-C reaches the parent alone, which passes it on.
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "proxy.workers", encode_start(start)),
                    # The same source as this process, whatever the current folder has.
                    env={**os.environ, _PATH: os.pathsep.join(filter(None, (_SOURCE, os.environ.get(_PATH))))},
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), stacks.fileno()),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                self._stacks.close()
                raise
        self.pid = self._process.pid
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._frames = asyncio.create_task(self._read(reader), name=f"frames-of-{self.worker}")

    async def ended(self) -> int:
        """Exit status, negative for a signal, once the process has ended and its last frames are read."""
        status = await self._process.wait()
        await asyncio.wait({self._frames}, timeout=_LAST_FRAMES_S)
        return status

    def order(self, order: Order) -> None:
        """Give an order."""
        if order is Order.RELOAD:
            self._reread.clear()
        self.send(Ordered(order))

    async def reloaded(self) -> None:
        """Wait until it has ended the reload that it was ordered last, or has ended itself."""
        await self._reread.wait()

    def kill(self) -> None:
        """End it without its consent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def kill_hung(self, silent_s: float) -> None:
        """End it after a silence of so many seconds."""
        self.hung_s = silent_s
        self.kill()

    def ask_for_life(self) -> None:
        """Have it send a frame from its event loop."""
        self.send(AskAlive())

    async def stacks(self) -> str:
        """Stacks of its threads; empty for a process that is stopped, or has ended."""
        if self._process.returncode is not None:
            return ""
        self._written()  # of an earlier time, at which it could not be read any more
        self._process.send_signal(STACKS_SIGNAL)
        await asyncio.sleep(_STACKS_S)
        return self._written()

    def send(self, frame: FromParent) -> None:
        """Send a frame."""
        if not self._writer.is_closing():
            self._writer.write(framed(frame))

    def deliver(self, delivered: bytes) -> None:
        """Send a framed message of a worker, unless too much waits already."""
        if not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() < _WAITING_BYTES:
            self._writer.write(delivered)

    async def close(self) -> None:
        """End the process if it has not ended, and forget its part of the shared state."""
        try:
            if self._process.returncode is None:
                self.kill()
                await self._process.wait()
        finally:
            self._frames.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._frames
            self._writer.close()
            self._stacks.close()
            for message in self._hub.lost(self.worker):
                self._pass_on(message)

    def _written(self) -> str:
        with contextlib.suppress(BlockingIOError):
            return self._stacks.recv(_STACKS_BYTES).decode("utf-8", "replace").strip()
        return ""

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await next_from_worker(reader)) is not None:
                self._take(frame)
        except ValueError as error:  # another version's worker cannot be here, so this is a fault of ours
            log.error("worker %d sent an unreadable frame and is killed: %s", self.worker, error)
            self.kill()
        finally:
            self._reread.set()

    def _take(self, frame: FromWorker) -> None:
        now_s = self.heard_s = time.monotonic()
        if isinstance(frame, Publish):
            self._hub.publish(frame.message, now_s)
            self._pass_on(frame.message)
        elif isinstance(frame, Ask):
            self.send(self._hub.answer(self.worker, frame, now_s))
        elif isinstance(frame, Changed):
            self._hub.changed(frame.change)
        elif isinstance(frame, Reloaded):
            self._hub.reloaded(frame.keys)
        elif isinstance(frame, Reread):
            self._reread.set()
        elif isinstance(frame, Shown):
            self._hub.shown(self.worker, frame.families)
        elif isinstance(frame, Ending):
            self.ends_within_s = frame.within_s
        elif isinstance(frame, Listed):
            self.listed = True
            self._on_change(self)
        elif isinstance(frame, Serving):
            log.info("worker %d (process %d) serves", self.worker, self.pid)
            self.serves = self.served = True
            self._on_change(self)

    def _pass_on(self, message: Message) -> None:
        """Send a message to all workers; to its own only if it is full, as proof that the line works."""
        delivered = framed(Delivered(message))
        for process in self._all():
            if process is not self or message.full:
                process.deliver(delivered)
