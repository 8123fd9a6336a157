"""Linear: load minus cache, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import lowest, require
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class Linear:
    """``score = ongoing_tokens + recent_weight x recent_tokens - alpha x cached_tokens``, lowest wins.

    ``ongoing_tokens`` is queued prefill plus context being decoded. Source: the co-located baseline of the agentic-kvc
    reports (8 x H20, 2026-05); the recent term is ours, with a weight that only distinguishes otherwise
    idle instances. Defaults: ``alpha`` 1.0, ``recent_weight`` 0.1. Complexity: O(n).
    """

    alpha: float = 1.0
    recent_weight: float = 0.1
    name: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        require(self.alpha >= 0, "linear: alpha must not be negative")
        require(self.recent_weight >= 0, "linear: recent_weight must not be negative")

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        # One loop without a call per instance: it runs for every instance of every request.
        alpha, weight, new = self.alpha, self.recent_weight, tuple.__new__
        scored = []
        for view in fleet.instances:
            ongoing = view.pending_prefill_tokens + view.decoding_tokens
            recent, cached = view.recent_tokens, view.cached_tokens
            inputs = {"ongoing_tokens": ongoing, "recent_tokens": recent, "cached_tokens": cached}
            score = ongoing + weight * recent - alpha * cached
            scored.append(new(CandidateScore, (view.instance, score, inputs, False, None)))
        scores = tuple(scored)
        return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, scores)
