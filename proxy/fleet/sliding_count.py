"""Event count over a sliding window, in constant memory."""

from __future__ import annotations

from collections import deque

_SLOTS = 10


class SlidingCount:
    """Counts over about the last ``window_s`` seconds, in ten slots: the oldest slot is dropped as a whole.

    At any moment at least nine tenths of the window are covered, and nothing older than the window.
    """

    __slots__ = ("_ends_s", "_newest", "_slot_s", "_slots", "_total")

    def __init__(self, window_s: float) -> None:
        """Raises ValueError for a window that is not positive."""
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self._slot_s = window_s / _SLOTS
        self._slots: deque[list[int]] = deque()
        self._newest: list[int] = []
        """The slot that ends at ``_ends_s``: its number and its count."""
        self._ends_s = float("-inf")
        self._total = 0

    def add(self, now_s: float, count: int = 1) -> None:
        """Add to the count; ``now_s`` must not decrease between calls."""
        self._total += count
        if now_s < self._ends_s:  # no look-ups in between: this runs several times for every request
            self._newest[1] += count
            return
        number = self._expire(now_s)
        self._newest, self._ends_s = [number, count], (number + 1) * self._slot_s
        self._slots.append(self._newest)

    def total(self, now_s: float) -> int:
        """Count within the window that ends at ``now_s``."""
        self._expire(now_s)
        return self._total

    def clear(self) -> None:
        """Reset the count."""
        self._slots.clear()
        self._total = 0
        self._ends_s = float("-inf")

    def _expire(self, now_s: float) -> int:
        number = int(now_s // self._slot_s)
        slots = self._slots
        while slots and slots[0][0] <= number - _SLOTS:
            self._total -= slots.popleft()[1]
        return number
