"""SGLang gateway's ``cache_aware``: the tree's holder of the longest match, regardless of its queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.baselines.shortest_queue import ShortestQueue, is_imbalanced, matched_or_shortest
from policies.routing.base import Pick, least, require
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class SglangCacheAware(ShortestQueue):
    """Longest match, shortest queue; of several holders the last one, not the least busy one.

    1. Queues are uneven (``max - min > balance_abs_threshold`` and ``max > balance_rel_threshold x min``, in requests
       in flight): the fewest requests.
    2. Else, if the best match rate (matched / prompt) exceeds ``cache_threshold``: the holder of that match. Where
       several hold it, the tree names the one that used it last; here that is the session's own instance.
    3. Else the fewest requests. (Releases before 0.3 took the smallest tree; their own documentation still says so.)

    Source: sglang-router 0.3.2 (PyPI sdist, 2026-01-15), ``src/policies/cache_aware.rs`` and ``tree.rs``. Defaults are
    those of its command line: 0.3, 64, 1.5 (the library's own are 0.5, 32, 1.1).

    Deviations: the match comes from this router's block index, bounded by the engine's KV pool, instead of a radix tree
    of 67,108,864 characters per worker; requests without a session, and ties left after these rules, go by
    ``tie_break``. Complexity: O(n).
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    name: ClassVar[str] = "sglang_cache_aware"

    def __post_init__(self) -> None:
        require(0 <= self.cache_threshold <= 1, "sglang_cache_aware: cache_threshold must be between 0 and 1")
        require(self.balance_abs_threshold >= 0, "sglang_cache_aware: balance_abs_threshold must not be negative")
        require(self.balance_rel_threshold >= 1, "sglang_cache_aware: balance_rel_threshold must be at least 1")

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        if is_imbalanced(columns.requests, self.balance_abs_threshold, self.balance_rel_threshold):
            return Pick(least(fleet, columns.requests), Reason.LEAST_LOADED)
        names = columns.instance
        return matched_or_shortest(
            request, fleet, columns, self.cache_threshold, lambda place: names[place] != fleet.pinned
        )
