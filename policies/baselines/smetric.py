"""SMetric: a session stays with its cache while that instance meets the TTFT objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.costs.formulas import PrefillModel
from policies.routing.base import ColumnPolicy, Pick, choice_of, least, longest_cached, require
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class Smetric(ColumnPolicy):
    """Cache affinity within the TTFT objective, else load balancing.

    ``load(i) = queued(i) + c_lin x n + c_attn x n x (L - n / 2)`` seconds of prefill, for ``n`` new of ``L`` prompt
    tokens; ``meets(i) = load(i) <= slack x (ttft_slo_s + ttft_slo_s_per_1k_tokens x L / 1000)``.

    1. A later turn goes to the instance with the longest cached prefix (of equals the lowest load) if that exceeds
       ``hit_ratio`` of the prompt and the instance meets the objective, or none does.
    2. Everything else goes to the lowest ``load x requests``.

    Source: SMetric, arXiv 2607.08565; the parameters, their defaults and the factor ``requests`` (in flight, for
    co-located serving) are those of the implementation proposed to vllm-project/router: ``src/policies/smetric.rs`` and
    its documentation, commit 8bef7312.

    Deviations: seconds by this router's prefill model instead of tokens over a rate observed per worker; a request
    without a session id counts as a later turn when it passes the ratio; the ratio is of the prompt, because what the
    previous turn sent is not in the snapshot, so a turn that more than doubles its session is balanced; ties go by
    ``tie_break``. Complexity: O(n).
    """

    hit_ratio: float = 0.5
    slack: float = 1.0
    ttft_slo_s: float = 1.0
    ttft_slo_s_per_1k_tokens: float = 0.0625
    name: ClassVar[str] = "smetric"

    def __post_init__(self) -> None:
        require(0 <= self.hit_ratio <= 1, "smetric: hit_ratio must be between 0 and 1")
        require(self.slack >= 0, "smetric: slack must not be negative")
        require(self.ttft_slo_s >= 0, "smetric: ttft_slo_s must not be negative")
        require(self.ttft_slo_s_per_1k_tokens >= 0, "smetric: ttft_slo_s_per_1k_tokens must not be negative")

    def quick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Pick:
        queued, own = _times(request, fleet, columns)
        loads = [queued_s + own_s for queued_s, own_s in zip(queued, own, strict=True)]
        return self._placed(request, fleet, columns, loads)

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        columns = FleetColumns.of(fleet.instances)
        queued, own = _times(request, fleet, columns)
        loads = [queued_s + own_s for queued_s, own_s in zip(queued, own, strict=True)]
        inputs = [
            {"queued_s": queued_s, "own_s": own_s, "requests": requests, "cached": cached}
            for queued_s, own_s, requests, cached in zip(
                queued, own, columns.requests, columns.cached_tokens, strict=True
            )
        ]
        placed = self._placed(request, fleet, columns, loads)
        return choice_of(columns, placed, _balanced(columns, loads), inputs)

    def _placed(
        self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, loads: Sequence[float]
    ) -> Pick:
        is_first_turn = request.session_id is not None and fleet.pinned is None
        cached, prompt = columns.cached_tokens, request.prompt_tokens
        if not is_first_turn and max(cached) > self.hit_ratio * prompt:
            holder = longest_cached(fleet, columns, loads.__getitem__)
            objective_s = self.slack * (self.ttft_slo_s + self.ttft_slo_s_per_1k_tokens * prompt / 1_000)
            if loads[holder] <= objective_s or min(loads) > objective_s:
                return Pick(holder, Reason.AFFINITY)
        return Pick(least(fleet, _balanced(columns, loads)), Reason.LOWEST_SCORE)


def _balanced(columns: FleetColumns, loads: Sequence[float]) -> list[float]:
    return [load * requests for load, requests in zip(loads, columns.requests, strict=True)]


def _times(
    request: RequestView, fleet: FleetSnapshot, columns: FleetColumns
) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds queued, and seconds of this prefill, by candidate."""
    model = fleet.costs.prefill if fleet.costs else PrefillModel()
    prompt = request.prompt_tokens
    # By cached tokens, which are mostly equal across instances.
    owns = {cached: model.seconds(prompt - cached, cached) for cached in set(columns.cached_tokens)}
    return model.queues_s(columns.pending_prefill_tokens, columns.prefilling), [
        owns[cached] for cached in columns.cached_tokens
    ]
