"""Prefixes that requests in flight will compute: not yet reported by KV events.

An engine reports blocks after computing them. A request decided 10 ms after a related one must already see the blocks
that one will store, so the hashes of every live request are matched until its events arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LINGER_S = 1.0
"""Seconds for which a finished request is still matched while its events are pending. They leave the engine with the
same step's tokens; on a busy machine the tokens can arrive first.
"""


@dataclass(slots=True)
class _Promise:
    instance: str
    hashes: Sequence[int]
    released: bool = False
    released_s: float | None = None


class Promises:
    """Prompts in flight, per instance. Holds references to the requests' own hash lists and nothing per block.

    Complexity for a prompt of b blocks and f requests in flight on the instance: ``match`` O(f + log b) comparisons,
    more only if several of them match increasingly deep prefixes.
    """

    def __init__(
        self,
        linger_s: float = LINGER_S,
        on_drop: Callable[[str, int, int], None] = lambda instance, last_block, number: None,
    ) -> None:
        self._linger_s = linger_s
        self._on_drop = on_drop
        self._live: dict[str, dict[int, _Promise]] = {}
        self._by_number: dict[int, _Promise] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, instance: str, hashes: Sequence[int]) -> int:
        """Add a request sent to ``instance``; returns the number to release or drop it with."""
        self._number += 1
        promise = self._by_number[self._number] = _Promise(instance, hashes)
        self._live.setdefault(instance, {})[self._number] = promise
        return self._number

    def release(self, number: int) -> None:
        """The request has finished: it is matched a little longer, until its events arrive. Later calls do nothing."""
        promise = self._by_number.get(number)
        if promise is not None:
            promise.released = True

    def drop(self, number: int) -> None:
        """Remove a promise. Later calls do nothing."""
        promise = self._by_number.pop(number, None)
        if promise is not None:
            del self._live[promise.instance][number]
            if promise.hashes:
                self._on_drop(promise.instance, promise.hashes[-1], number)

    def forget_instance(self, instance: str) -> None:
        """Drop all promises of an instance whose cache is gone."""
        for number in list(self._live.get(instance, {})):
            self.drop(number)
        self._live.pop(instance, None)

    def match(
        self, instance: str, hashes: Sequence[int], known: int, now_s: float, reported: Callable[[int, int], bool]
    ) -> int:
        """Longest prefix of ``hashes`` that is held or promised, in blocks; ``known`` of them are already held.

        ``reported(block, number)`` is true if the instance's events have reported the last block of promise ``number``:
        such a finished request is not matched any more, even if the block has been evicted since.
        """
        live = self._live.get(instance)
        if not live:
            return known
        over: list[int] = []
        for number, promise in live.items():
            if promise.released:
                if not promise.hashes or reported(promise.hashes[-1], number):
                    over.append(number)
                    continue
                if promise.released_s is None:
                    promise.released_s = now_s
                elif now_s - promise.released_s > self._linger_s:
                    over.append(number)
                    continue
            theirs = promise.hashes
            # Hashes are chained: equal at one depth means equal before it, so one comparison decides if it reaches
            # deeper.
            if known < len(hashes) and known < len(theirs) and theirs[known] == hashes[known]:
                known = _common(hashes, theirs, known + 1)
        for number in over:
            self.drop(number)
        return known


def _common(ours: Sequence[int], theirs: Sequence[int], known: int) -> int:
    """Length of the common prefix of two chains that are equal up to ``known``, by bisection."""
    low, high = known, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
