"""Session-protecting eviction: keeps blocks of sessions that are likely to return soon, learned online, without an
oracle.

A block's value is its *hit density*: the chance that it is used again, over the time until then (after LHD, Beckmann et
al., NSDI 2018, which does this for single objects). Both depend on how many turns the block's last session has had and
on how long it has been idle, so that first turns, many of which have no second one, are evicted before the history of a
long conversation. The policy learns from the gaps this cache has seen: per class of blocks, the share of those idle
for so long that came back in the next stretch of time (Kaplan-Meier, so sessions still waiting count for as long as
they waited). Blocks that two sessions have used form a separate class.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from bench.analysis.caching.eviction import Use

TURNS = (1, 2, 4, 8, 16)
"""Classes of private blocks: sessions with at least this many turns."""
SHARED = len(TURNS)
"""Class of blocks that two sessions have used."""
EDGES_S = tuple(0.25 * 2**step for step in range(18))
"""Bounds of the idle-time bins, a quarter of a second to nine hours."""
REFRESH_REQUESTS = 64
"""Densities are recomputed after this many requests."""
ENOUGH_RETURNS = 32
"""Until a class has come back this often, its blocks have the average density of all classes."""


class ReturnTimes:
    """Return times of each class of blocks, estimated from observed returns and from blocks still waiting."""

    def __init__(self) -> None:
        bins = len(EDGES_S) + 1
        self._returned = [[0] * bins for _ in range(SHARED + 1)]
        self._waiting: dict[str | int, tuple[int, float]] = {}

    def seen(self, key: str | int, kind: int, now_s: float) -> None:
        """Record a use of ``key`` (a session, or a shared run), which from now on belongs to class ``kind``."""
        before = self._waiting.get(key)
        if before is not None:
            self._returned[before[0]][bisect_right(EDGES_S, now_s - before[1])] += 1
        self._waiting[key] = (kind, now_s)

    def densities(self, now_s: float) -> list[list[float]]:
        """Hit density per second by class and idle bin: chance of coming back over the mean time until then."""
        bins = len(EDGES_S) + 1
        left = [[0] * bins for _ in range(SHARED + 1)]
        for kind, since_s in self._waiting.values():
            left[kind][bisect_right(EDGES_S, now_s - since_s)] += 1
        totals = [[sum(column) for column in zip(*table, strict=True)] for table in (self._returned, left)]
        average = _density(*totals)
        return [
            _density(returned, waiting) if sum(returned) >= ENOUGH_RETURNS else average
            for returned, waiting in zip(self._returned, left, strict=True)
        ]


def _density(returned: Sequence[int], waiting: Sequence[int]) -> list[float]:
    """Hit density by idle bin, from counts by bin; ``waiting`` blocks have been idle for that long and may come
    back."""
    bins = len(returned)
    middles = [EDGES_S[0] / 2, *((a + b) / 2 for a, b in pairwise(EDGES_S)), 1.5 * EDGES_S[-1]]
    densities = [0.0] * bins
    chance = 0.0
    until_s = 0.0
    at_risk = 0
    for index in range(bins - 1, -1, -1):
        # ``chance`` and ``until_s``: coming back in this bin or a later one, given the start of this one, and when.
        at_risk += returned[index] + waiting[index]
        hazard = returned[index] / at_risk if at_risk else 0.0
        until_s = hazard * middles[index] + (1 - hazard) * until_s
        chance = hazard + (1 - hazard) * chance
        if chance > 0:
            start_s = EDGES_S[index - 1] if index else 0.0
            densities[index] = chance * chance / max(until_s - chance * start_s, 1e-3)
    return densities


class SessionProtecting:
    """Lowest hit density first, among runs with nothing cached below them.

    O(log runs) for each run used; O(sessions) every ``REFRESH_REQUESTS`` requests.
    """

    pins = True

    def __init__(self, parents: Sequence[int]) -> None:
        self._parents = parents
        self._returns = ReturnTimes()
        self._turns: dict[str, int] = {}
        self._users: dict[int, str | None] = {}
        """The one session that has used a run; None: several."""
        self._kind: dict[int, int] = {}
        self._used: dict[int, tuple[int, float]] = {}
        """Last request and its time for every cached run."""
        self._below: dict[int, int] = {}
        self._heaps: list[list[tuple[int, float, int]]] = [[] for _ in range(SHARED + 1)]
        self._densities: list[list[float]] = []
        self._requests = 0
        self._now = (-1, 0.0)

    def use(self, use: Use) -> None:
        turns = self._turns[use.session] = self._turns.get(use.session, 0) + 1
        private = bisect_right(TURNS, turns) - 1
        self._returns.seen(use.session, private, use.now_s)
        self._now = (use.number, use.now_s)
        for run in use.path:
            user = self._users.setdefault(run, use.session)
            if user != use.session:
                self._users[run] = None
                self._returns.seen(run, SHARED, use.now_s)
            self._kind[run] = private if self._users[run] is not None else SHARED
            if run not in self._used:
                parent = self._parents[run]
                if parent >= 0:
                    self._below[parent] = self._below.get(parent, 0) + 1
            self._used[run] = self._now
        if use.path:
            self._enter(use.path[-1])
        if self._requests % REFRESH_REQUESTS == 0:
            self._densities = self._returns.densities(use.now_s)
        self._requests += 1

    def _enter(self, run: int) -> None:
        if not self._below.get(run):
            heappush(self._heaps[self._kind[run]], (*self._used[run], run))

    def victim(self) -> int | None:
        found: tuple[float, int, int] | None = None
        for kind, heap in enumerate(self._heaps):
            while heap and not self._current(kind, heap[0]):
                heappop(heap)
            if not heap or heap[0][0] == self._now[0]:
                continue
            index, since_s, run = heap[0]
            density = self._densities[kind][bisect_right(EDGES_S, self._now[1] - since_s)]
            if found is None or (density, index) < found[:2]:
                found = (density, index, run)
        return found[2] if found else None

    def _current(self, kind: int, entry: tuple[int, float, int]) -> bool:
        run = entry[2]
        return self._used.get(run) == entry[:2] and self._kind[run] == kind and not self._below.get(run)

    def drop(self, run: int) -> None:
        del self._used[run]
        parent = self._parents[run]
        if parent >= 0:
            self._below[parent] -= 1
            self._enter(parent)
