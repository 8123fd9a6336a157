"""Eviction orders of a full prefix cache over runs of blocks: LRU, LFU and the offline optimum.

All three keep the cached set closed under prefixes without looking for leaves, because a run is used at least as
often, as late and as soon again as the runs below it, and ties go to the deeper run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, Protocol


class Use(NamedTuple):
    """One request's use of a cache."""

    number: int
    """Index among all requests, increasing."""
    now_s: float
    session: str
    path: Sequence[int]
    """Runs of the prompt, root first."""
    next_uses: Sequence[float]
    """Request number at which this cache next uses each run of the path, or infinity. For the bound only."""


class Eviction(Protocol):
    """One cache's order of eviction. Runs enter by ``use`` and leave by ``drop``."""

    pins: bool
    """True if the prompt being computed cannot be evicted; only the bound sets False."""

    def use(self, use: Use) -> None:
        """Record that a request used the runs of its path; all of them are in the cache now."""

    def victim(self) -> int | None:
        """The run to take blocks from next (its last ones first), never one of the last path; None: no other left."""

    def drop(self, run: int) -> None:
        """Remove a run returned by ``victim`` that has no blocks left in the cache."""


class Lru:
    """Least recently used first, as in vLLM and SGLang. O(1) for each run used or dropped."""

    pins = True

    def __init__(self) -> None:
        self._order: OrderedDict[int, int] = OrderedDict()
        self._now = -1

    def use(self, use: Use) -> None:
        self._now = use.number
        for run in reversed(use.path):
            self._order[run] = use.number
            self._order.move_to_end(run)

    def victim(self) -> int | None:
        run = next(iter(self._order), None)
        return None if run is None or self._order[run] == self._now else run

    def drop(self, run: int) -> None:
        del self._order[run]


class _Ranked:
    """Eviction by a rank that changes only when a run is used: a heap whose stale entries are skipped."""

    pins = True

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = depths
        self._heap: list[tuple[float, float, int, int]] = []
        self._rank: dict[int, tuple[float, float]] = {}
        self._path: set[int] = set()

    def _enter(self, use: Use, ranks: Sequence[tuple[float, float]]) -> None:
        self._path = set(use.path) if self.pins else set()
        for run, rank in zip(use.path, ranks, strict=True):
            self._rank[run] = rank
            heappush(self._heap, (*rank, -self._depths[run], run))

    def victim(self) -> int | None:
        set_aside = []
        found = None
        while self._heap:
            first, second, _, run = entry = self._heap[0]
            if self._rank.get(run) != (first, second):
                heappop(self._heap)
            elif run in self._path:
                set_aside.append(heappop(self._heap))
            else:
                found = entry[3]
                break
        for entry in set_aside:
            heappush(self._heap, entry)
        return found

    def drop(self, run: int) -> None:
        del self._rank[run]


class Lfu(_Ranked):
    """Least often used first, then least recently; uses are counted from the start, of evicted runs too.

    O(log runs) for each run used.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__(depths)
        self._uses: dict[int, int] = {}

    def use(self, use: Use) -> None:
        for run in use.path:
            self._uses[run] = self._uses.get(run, 0) + 1
        self._enter(use, [(self._uses[run], use.number) for run in use.path])


class Belady(_Ranked):
    """Farthest next use first, known from the trace: no cache of the same size can hit more (Belady 1966; bound).

    It may also drop blocks it has just computed, which an engine cannot. O(log runs) for each run used.
    """

    pins = False

    def use(self, use: Use) -> None:
        self._enter(use, [(-next_use, 0.0) for next_use in use.next_uses])


def next_uses(paths: Sequence[Sequence[int]], places: Sequence[int]) -> list[list[float]]:
    """For each request and run of its path: number of the next request that uses it in the same cache, or infinity.

    Args:
        paths: Runs of each request.
        places: Cache of each request.
    """
    coming: dict[tuple[int, int], float] = {}
    found: list[list[float]] = []
    for index in range(len(paths) - 1, -1, -1):
        place = places[index]
        found.append([coming.get((place, run), inf) for run in paths[index]])
        for run in paths[index]:
            coming[place, run] = index
    found.reverse()
    return found
