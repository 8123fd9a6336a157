"""Unified: keep affinity above a gate and below overload, else LMetric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import ColumnPolicy, Pick, is_overloaded, least, longest_cached, require
from policies.routing.lmetric import lmetric_inputs, lmetric_scores
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class Unified(ColumnPolicy):
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

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        return lmetric_scores(columns, request.prompt_tokens, 0, self.decode_weight, self.recent_weight)

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        inputs = lmetric_inputs(columns, request.prompt_tokens, 0)
        if self.decode_weight:
            for each, decoding in zip(inputs, columns.decoding_tokens, strict=True):
                each["decoding_tokens"] = decoding
        if self.recent_weight:
            for each, recent in zip(inputs, columns.recent_tokens, strict=True):
                each["recent_tokens"] = recent
        return inputs

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        pending, names = columns.pending_prefill_tokens, columns.instance
        warmest = longest_cached(fleet, columns, lambda place: (pending[place], names[place] != fleet.pinned))
        if columns.cached_tokens[warmest] <= self.affinity_gate * request.prompt_tokens:
            return Pick(least(fleet, scores), Reason.LOWEST_SCORE)
        if is_overloaded(warmest, columns, self.overload_factor, self.overload_floor_tokens):
            return Pick(least(fleet, scores), Reason.AFFINITY_OVERLOADED)
        return Pick(warmest, Reason.AFFINITY)
