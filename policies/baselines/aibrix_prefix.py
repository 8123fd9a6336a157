"""AIBrix's ``prefix-cache``: the longest match among instances that are not unusually busy."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from policies.routing.base import lowest, preferred, require
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, Reason, RequestView


@dataclass(frozen=True, slots=True)
class AibrixPrefix:
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

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        loads = [view.requests for view in fleet.instances]
        mean = sum(loads) / len(loads)
        limit = mean + self.sigma_factor * sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
        scores = tuple([self._score(view, request) for view in fleet.instances])
        if max(loads) - min(loads) > self.imbalance_requests:
            return Choice(lowest(fleet, scores).instance, Reason.LEAST_LOADED, scores)

        def rank(view: InstanceView) -> tuple[bool, int, int]:
            per_cent = _per_cent(view, request)
            return per_cent <= 0 or view.requests > limit, -per_cent, view.requests

        holder = preferred(fleet, rank)
        if rank(holder)[0]:
            return Choice(lowest(fleet, scores).instance, Reason.LEAST_LOADED, scores)
        return Choice(holder.instance, Reason.AFFINITY, scores)

    def _score(self, view: InstanceView, request: RequestView) -> CandidateScore:
        return CandidateScore(
            view.instance,
            float(view.requests),
            {"requests": view.requests, "match_per_cent": _per_cent(view, request)},
        )


def _per_cent(view: InstanceView, request: RequestView) -> int:
    return 100 * view.cached_tokens // request.prompt_tokens if request.prompt_tokens else 0
