"""SMetric: a session stays with its cache while that instance meets the TTFT objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.costs.formulas import PrefillModel
from policies.routing.base import ColumnPolicy, Pick, choice_of, least, least_of, longest_cached, require
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
        """The same choice as that of ``choose``; the queue is priced only where it decides."""
        model, owns = _owns(request, fleet, columns)
        pending, prefilling, cached = columns.pending_prefill_tokens, columns.prefilling, columns.cached_tokens

        def load_s(place: int) -> float:
            return model.queue_s(pending[place], prefilling[place]) + owns[cached[place]]

        if self._may_stay(request, fleet, columns):
            holder, objective_s = longest_cached(fleet, columns, load_s), self._objective_s(request)
            if load_s(holder) <= objective_s or min([load_s(place) for place in range(len(cached))]) > objective_s:
                return Pick(holder, Reason.AFFINITY)
        # Each at most the score: rounding is monotonic, and no queue is negative.
        bounds = [owns[each] * requests for each, requests in zip(cached, columns.requests, strict=True)]
        first = bounds.index(min(bounds))
        most = load_s(first) * columns.requests[first]
        places = [place for place, bound in enumerate(bounds) if bound <= most]
        scores = [load_s(place) * columns.requests[place] for place in places]
        return Pick(places[least_of(fleet, scores, places)], Reason.LOWEST_SCORE)

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
        if self._may_stay(request, fleet, columns):
            holder, objective_s = longest_cached(fleet, columns, loads.__getitem__), self._objective_s(request)
            if loads[holder] <= objective_s or min(loads) > objective_s:
                return Pick(holder, Reason.AFFINITY)
        return Pick(least(fleet, _balanced(columns, loads)), Reason.LOWEST_SCORE)

    def _may_stay(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> bool:
        """True for a later turn whose longest cached prefix exceeds the ratio."""
        is_first_turn = request.session_id is not None and fleet.pinned is None
        return not is_first_turn and max(columns.cached_tokens) > self.hit_ratio * request.prompt_tokens

    def _objective_s(self, request: RequestView) -> float:
        return self.slack * (self.ttft_slo_s + self.ttft_slo_s_per_1k_tokens * request.prompt_tokens / 1_000)


def _balanced(columns: FleetColumns, loads: Sequence[float]) -> list[float]:
    return [load * requests for load, requests in zip(loads, columns.requests, strict=True)]


def _times(
    request: RequestView, fleet: FleetSnapshot, columns: FleetColumns
) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds queued, and seconds of this prefill, by candidate."""
    model, owns = _owns(request, fleet, columns)
    return model.queues_s(columns.pending_prefill_tokens, columns.prefilling), [
        owns[cached] for cached in columns.cached_tokens
    ]


def _owns(request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> tuple[PrefillModel, dict[int, float]]:
    """The model, and seconds of this prefill by cached tokens, which are mostly equal across instances."""
    model = fleet.costs.prefill if fleet.costs else PrefillModel()
    prompt = request.prompt_tokens
    return model, {cached: model.seconds(prompt - cached, cached) for cached in set(columns.cached_tokens)}
