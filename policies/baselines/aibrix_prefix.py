"""AIBrix's ``prefix-cache``: the longest match among instances that are not unusually busy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from policies.baselines.shortest_queue import ShortestQueue
from policies.routing.base import Pick, least, require
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class AibrixPrefix(ShortestQueue):
    """Prefix match in per cent, limited to instances without an unusual number of requests.

    1. ``max - min > imbalance_requests`` requests in flight: the fewest requests.
    2. Else, of the instances that match at all and have at most ``mean + sigma_factor x sigma`` requests in flight
       (population standard deviation over all candidates), the highest match in whole per cent; among equals the one
       with the fewest requests.
    3. If there is none, the fewest requests.

    Source: vllm-project/aibrix, ``pkg/plugins/gateway/algorithms/prefix_cache.go`` as of commit e3e10f9e (2026-08-23).
    Defaults are those of its code, 8 and 1; its README documents 16 and 2.

    Deviations: token blocks instead of blocks of 4 characters; requests in flight from this router's ledger instead of
    the engine's running requests; index entries are evicted by KV pool size, not after 20 minutes; ties by
    ``tie_break``, not at random. Complexity: O(n).
    """

    imbalance_requests: int = 8
    sigma_factor: float = 1.0
    name: ClassVar[str] = "aibrix_prefix"

    def __post_init__(self) -> None:
        require(self.imbalance_requests >= 0, "aibrix_prefix: imbalance_requests must not be negative")
        require(self.sigma_factor >= 0, "aibrix_prefix: sigma_factor must not be negative")

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return [
            {"requests": requests, "match_per_cent": per_cent}
            for requests, per_cent in zip(columns.requests, _per_cents(request, columns), strict=True)
        ]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        loads = columns.requests
        if max(loads) - min(loads) > self.imbalance_requests:
            return Pick(least(fleet, loads), Reason.LEAST_LOADED)
        mean = sum(loads) / len(loads)
        limit = mean + self.sigma_factor * sqrt(sum([(load - mean) ** 2 for load in loads]) / len(loads))
        ranks = [
            (per_cent <= 0 or load > limit, -per_cent, load)
            for load, per_cent in zip(loads, _per_cents(request, columns), strict=True)
        ]
        holder = least(fleet, ranks)
        if ranks[holder][0]:
            return Pick(least(fleet, loads), Reason.LEAST_LOADED)
        return Pick(holder, Reason.AFFINITY)


def _per_cents(request: RequestView, columns: FleetColumns) -> list[int]:
    prompt = request.prompt_tokens
    return [100 * cached // prompt if prompt else 0 for cached in columns.cached_tokens]
