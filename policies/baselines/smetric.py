"""SMetric: a session stays with its cache while that instance meets the TTFT objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.costs.formulas import PrefillModel
from policies.routing.base import lowest, preferred, require
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class Smetric:
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

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        model = fleet.costs.prefill if fleet.costs else PrefillModel()
        loads: dict[str, float] = {}
        scores = []
        for view in fleet.instances:
            queued_s = model.queue_s(view.pending_prefill_tokens, view.prefilling)
            own_s = model.predict(request.prompt_tokens - view.cached_tokens, view.cached_tokens).seconds
            loads[view.instance] = queued_s + own_s
            scores.append(
                CandidateScore(
                    view.instance,
                    (queued_s + own_s) * view.requests,
                    {"queued_s": queued_s, "own_s": own_s, "requests": view.requests, "cached": view.cached_tokens},
                )
            )
        is_first_turn = request.session_id is not None and fleet.pinned is None
        if not is_first_turn:
            holder = preferred(fleet, lambda view: (-view.cached_tokens, loads[view.instance]))
            objective_s = self.slack * (self.ttft_slo_s + self.ttft_slo_s_per_1k_tokens * request.prompt_tokens / 1_000)
            sticks = holder.cached_tokens > self.hit_ratio * request.prompt_tokens
            if sticks and (loads[holder.instance] <= objective_s or min(loads.values()) > objective_s):
                return Choice(holder.instance, Reason.AFFINITY, tuple(scores))
        return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, tuple(scores))
