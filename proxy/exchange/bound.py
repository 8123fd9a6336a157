"""Bound on the time of a part of a task, with less on the way than ``asyncio.timeout``."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self


class Bound:
    """Context that raises TimeoutError after ``seconds``, as ``asyncio.timeout`` does, for use within a task.

    The task is cancelled at the bound. A cancellation for another reason passes through.
    """

    __slots__ = ("_before", "_expired", "_loop", "_seconds", "_task", "_timer")

    _task: asyncio.Task[Any]
    _timer: asyncio.TimerHandle

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._timer = self._loop.call_later(self._seconds, self._expire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()
