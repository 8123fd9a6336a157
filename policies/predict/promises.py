"""Prefixes that requests in flight are about to compute: what KV events will report, but have not yet.

An engine reports blocks once they are computed. A request that is decided 10 ms after its sibling must be shown what
the sibling will have stored by then, so the hashes of every live request stand in until the events take over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LINGER_S = 1.0
"""How long a finished request still stands in for its events. They leave the engine with the same step's tokens; on a
busy machine the tokens can be here first."""


@dataclass(slots=True)
class _Promise:
    instance: str
    hashes: Sequence[int]
    released: bool = False
    released_s: float | None = None


class Promises:
    """The prompts in flight, per instance. Holds references to the requests' own hash lists and nothing per block.

    Complexity for a prompt of b blocks and f requests in flight on the instance: ``match`` O(f + log b) comparisons
    unless several of them reach ever deeper.
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
        """A request was sent to ``instance``; the number to take it back with."""
        self._number += 1
        promise = self._by_number[self._number] = _Promise(instance, hashes)
        self._live.setdefault(instance, {})[self._number] = promise
        return self._number

    def release(self, number: int) -> None:
        """The request is over: it stands in for its last events a little longer. Later calls do nothing."""
        promise = self._by_number.get(number)
        if promise is not None:
            promise.released = True

    def drop(self, number: int) -> None:
        """The request will not have computed its prompt. Later calls do nothing."""
        promise = self._by_number.pop(number, None)
        if promise is not None:
            del self._live[promise.instance][number]
            if promise.hashes:
                self._on_drop(promise.instance, promise.hashes[-1], number)

    def forget_instance(self, instance: str) -> None:
        """The instance's cache is gone, and with it all that was promised there."""
        for number in list(self._live.get(instance, {})):
            self.drop(number)
        self._live.pop(instance, None)

    def match(
        self, instance: str, hashes: Sequence[int], known: int, now_s: float, reported: Callable[[int, int], bool]
    ) -> int:
        """Longest prefix of ``hashes`` that is held or promised, in blocks; ``known`` of them are held already.

        ``reported`` says of a block and the promise that ends with it whether the instance's events have told of it: a
        finished request whose last block they have told of stands in for nothing any more, even if it is evicted since.
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
            # Hashes are chained: equal at one depth means equal before it, so one look tells whether it reaches deeper.
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
