"""The queue of waiting requests: in order of arrival (a deque), or by priority as vLLM's priority scheduling."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from sim.core.sequence import Sequence


class PriorityQueue:
    """Waiting requests, lowest priority value first, then first come first served. O(n) to insert.

    As in vLLM there is no place at the head: a request that is put back, or whose KV has arrived, has the place of its
    own priority and arrival again.
    """

    def __init__(self) -> None:
        self._sorted: list[Sequence] = []

    def append(self, sequence: Sequence) -> None:
        """Insert a request at its place."""
        insort(self._sorted, sequence, key=place_of)

    appendleft = append

    def popleft(self) -> Sequence:
        """Remove and return the first request."""
        return self._sorted.pop(0)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request."""
        self._sorted.remove(sequence)

    def __getitem__(self, index: int) -> Sequence:
        return self._sorted[index]

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sorted)


Waiting = deque[Sequence] | PriorityQueue


def place_of(sequence: Sequence) -> tuple[int, int]:
    """Place of a request in the order of priority scheduling; the greatest one is preempted first."""
    return sequence.request.priority, sequence.arrival
