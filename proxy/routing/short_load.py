"""Requests in flight that are on no ledger: what the least loaded instance is chosen by, besides the ledger."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator

from policies.ledger import Ledger


class ShortLoad:
    """Short requests in flight by instance."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._in_flight: Counter[str] = Counter()
        self._chosen = 0

    def least_loaded(self, candidates: Collection[str]) -> str:
        """The candidate with the fewest requests in flight of all kinds; equal ones take turns. O(candidates)."""
        load = {name: self._ledger.requests(name) + self._in_flight[name] for name in candidates}
        least = min(load.values())
        equal = sorted(name for name, requests in load.items() if requests == least)
        self._chosen += 1
        return equal[self._chosen % len(equal)]

    def requests(self, instance: str) -> int:
        """Short requests in flight on an instance."""
        return self._in_flight.get(instance, 0)

    @contextlib.contextmanager
    def on(self, instance: str) -> Iterator[None]:
        """Count one request on an instance within the context."""
        self._in_flight[instance] += 1
        try:
            yield
        finally:
            self._in_flight[instance] -= 1
            if not self._in_flight[instance]:
                del self._in_flight[instance]
