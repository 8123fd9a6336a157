"""Worker's end of the connection to its parent process: orders, questions, and messages of the other workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from proxy.sharing.frames import (
    Alive,
    Answered,
    Ask,
    AskAlive,
    Delivered,
    FromWorker,
    Order,
    Ordered,
    Question,
    framed,
    next_from_parent,
)
from proxy.sharing.wire import Message

log = logging.getLogger("warmroute.workers")

_ASK_S = 5.0
"""Bound on an answer of the parent, which does little else."""
_KEPT = 4096
"""Messages of others that may wait here; of more, the oldest are lost, as the next full ones replace them."""


class WorkerIdentity(NamedTuple):
    """One worker among several."""

    number: int
    line: ParentLine
    clock_offset_s: float
    """Unix time less monotonic time, as the parent read both once: with it all workers number rows by one clock, which
    steps of the wall clock do not move."""


class LineError(Exception):
    """The parent did not answer in time, or is gone."""


class ParentLine:
    """One connection, used in the context of ``opened``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Answered]] = {}
        self._number = 0
        self._messages: deque[Message] = deque(maxlen=_KEPT)
        self._arrived = asyncio.Event()
        self.on_order: Callable[[Order], None] = _ignore
        """Called with each order of the parent."""
        self.on_lost: Callable[[], None] = _ignore_loss
        """Called when the parent is gone."""

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Read frames in the context."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        task = asyncio.create_task(self._read(reader), name="parent")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self._writer.close()

    def send(self, frame: FromWorker) -> None:
        """Send a frame; it is in the socket, or follows what waits, when this returns. No effect without a parent."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(framed(frame))

    async def ask(self, question: Question) -> Answered:
        """The parent's answer. Raises LineError."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self.send(Ask(number, question))
        try:
            async with asyncio.timeout(_ASK_S):
                return await answer
        except TimeoutError as error:
            raise LineError(f"the parent process did not answer within {_ASK_S:g} s") from error
        finally:
            del self._asked[number]

    def forget_messages(self) -> None:
        """Drop the messages that wait."""
        self._messages.clear()

    async def message(self, timeout_s: float) -> Message | None:
        """Next message of a worker; None if none comes in time."""
        if not self._messages:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
        return self._messages.popleft() if self._messages else None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (frame := await next_from_parent(reader)) is not None:
            if isinstance(frame, Delivered):
                self._messages.append(frame.message)
                self._arrived.set()
            elif isinstance(frame, Ordered):
                self.on_order(frame.order)
            elif isinstance(frame, AskAlive):
                self.send(Alive())
            elif (waiting := self._asked.get(frame.number)) is not None and not waiting.done():
                waiting.set_result(frame)
        self.on_lost()


def _ignore(_: Order) -> None:
    """Default of ``on_order``."""


def _ignore_loss() -> None:
    """Default of ``on_lost``."""
