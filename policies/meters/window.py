"""Sums of several figures over a sliding window, in constant memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import add

_SLOTS = 10


class SlidingSums:
    """Sums over about the last ``window_s`` seconds, in ten slots: the oldest slot is dropped as a whole."""

    __slots__ = ("_before", "_count", "_ends_s", "_newest", "_slot_s", "_slots")

    def __init__(self, count: int, window_s: float) -> None:
        """``count``: number of figures. Raises ValueError for a window that is not positive."""
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self._count = count
        self._slot_s = window_s / _SLOTS
        self._slots: deque[tuple[int, list[float]]] = deque()
        self._newest: list[float] = []
        """Sums of the slot that ends at ``_ends_s``."""
        self._ends_s = float("-inf")
        self._before = [0.0] * count
        """Sums of the slots that have been dropped."""

    def add(self, values: Sequence[float], now_s: float) -> None:
        """Add one value to each sum; ``now_s`` must not decrease between calls."""
        if now_s < self._ends_s:  # no look-ups in between: this runs twice for every request
            self._newest[:] = map(add, self._newest, values)
            return
        number = self._expire(now_s)
        self._newest, self._ends_s = list(values), (number + 1) * self._slot_s
        self._slots.append((number, self._newest))

    def totals(self, now_s: float) -> tuple[float, ...]:
        """Sums within the window that ends at ``now_s``."""
        self._expire(now_s)
        if not self._slots:
            return (0.0,) * self._count
        return tuple(map(sum, zip(*(sums for _, sums in self._slots), strict=True)))

    def since_start(self) -> tuple[float, ...]:
        """Sums of everything that was added, up to ``clear``."""
        return tuple(map(sum, zip(self._before, *(sums for _, sums in self._slots), strict=True)))

    def clear(self) -> None:
        """Reset the sums."""
        self._slots.clear()
        self._before = [0.0] * self._count
        self._ends_s = float("-inf")

    def _expire(self, now_s: float) -> int:
        number = int(now_s // self._slot_s)
        slots = self._slots
        while slots and slots[0][0] <= number - _SLOTS:
            self._before[:] = map(add, self._before, slots.popleft()[1])
        return number
