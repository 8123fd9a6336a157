"""Finished requests that wait until several of them are recorded together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

_ITEMS = 16
"""Items that are recorded together, in half a millisecond: alone, one takes twice as long, since the code is not in the
processor's caches (``docs/decisions/0024-cold-caches.md``)."""
_WAIT_S = 0.1
"""Seconds after which items are recorded although fewer wait."""

Item = TypeVar("Item")


class RecordBatch(Generic[Item]):
    """Items that wait to be recorded, and their timer. Each is recorded once, in the order of ``add``.

    Items wait between ``open`` and ``close`` only; before and after, each is recorded at once. Call ``settle`` before
    reading what ``record`` writes.

    Args:
        record: records one item.
        logger: gets the exceptions of ``record``, which cost no other item.
        loss: message for the log of an item that could not be recorded.
    """

    __slots__ = ("_limit", "_logger", "_loop", "_loss", "_record", "_timer", "_waiting")

    def __init__(self, record: Callable[[Item], None], logger: logging.Logger, loss: Callable[[Item], str]) -> None:
        self._record = record
        self._logger = logger
        self._loss = loss
        self._waiting: list[Item] = []
        self._limit = 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Let up to 15 items wait from now on.

        Args:
            loop: has the timer, so that none waits over 0.1 s; None: they wait for ``settle`` or the sixteenth.
        """
        self._limit, self._loop = _ITEMS, loop

    def add(self, item: Item, at_once: bool = False) -> None:
        """Accept an item; ``at_once``: record it and all that wait now. Does not raise."""
        waiting = self._waiting
        waiting.append(item)
        if at_once or len(waiting) >= self._limit:
            self.settle()
        elif self._loop is not None and self._timer is None:
            self._timer = self._loop.call_later(_WAIT_S, self.settle)

    def settle(self) -> None:
        """Record the items that wait."""
        waiting = self._waiting
        if not waiting:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting = []
        for item in waiting:
            try:
                self._record(item)
            except Exception:  # its request is answered, and must not cost the records of others
                self._logger.exception(self._loss(item))

    def close(self) -> None:
        """Record the items that wait; later ones are recorded at once."""
        self._limit, self._loop = 1, None
        self.settle()
