"""Unified: keep affinity above a gate and below overload, else LMetric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import is_overloaded, lowest, preferred, require
from policies.routing.lmetric import lmetric_score
from policies.snapshot import FleetSnapshot
from policies.types import Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class Unified:
    """Affinity gate with LMetric fallback and an explicit tie-break.

    1. The instance with the longest cached prefix keeps the request when that prefix covers more than ``affinity_gate``
       of the prompt and the instance is not overloaded (queued prefill above ``overload_factor`` x the fleet's mean).
    2. Otherwise the lowest ``max(1, pending + new + decode_weight x decoding + recent_weight x recent)
       x max(1, requests)``.

    Source: policy "unified" of the agentic-kvc ablation with its changes A (factor 1.3 instead of 2.0) and B'
    (decode-load weight and ``max(num_requests, 1)``); they did not publish the decode weight, ours is 0.01. The recent
    term (0.1) is ours: it spreads first turns over an idle fleet. ``overload_floor_tokens`` 20,000, as in
    ``session_sticky``.
    Complexity: O(n).
    """

    affinity_gate: float = 0.5
    overload_factor: float = 1.3
    overload_floor_tokens: int = 20_000
    decode_weight: float = 0.01
    recent_weight: float = 0.1
    name: ClassVar[str] = "unified"

    def __post_init__(self) -> None:
        require(0 <= self.affinity_gate <= 1, "unified: affinity_gate must be between 0 and 1")
        require(self.overload_factor >= 1, "unified: overload_factor must be at least 1")
        require(self.overload_floor_tokens >= 0, "unified: overload_floor_tokens must not be negative")
        require(self.decode_weight >= 0 and self.recent_weight >= 0, "unified: weights must not be negative")

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        scores = tuple(
            lmetric_score(view, request.prompt_tokens, view.requests, self.decode_weight, self.recent_weight)
            for view in fleet.instances
        )
        warmest = preferred(
            fleet,
            lambda view: (-view.cached_tokens, view.pending_prefill_tokens, view.instance != fleet.pinned),
        )
        if warmest.cached_tokens <= self.affinity_gate * request.prompt_tokens:
            return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, scores)
        if is_overloaded(warmest, fleet, self.overload_factor, self.overload_floor_tokens):
            return Choice(lowest(fleet, scores).instance, Reason.AFFINITY_OVERLOADED, scores)
        return Choice(warmest.instance, Reason.AFFINITY, scores)
