"""Linear: load minus cache, in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import ColumnPolicy, Pick, least, require
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class Linear(ColumnPolicy):
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

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        alpha, weight = self.alpha, self.recent_weight
        return [
            pending + decoding + weight * recent - alpha * cached
            for pending, decoding, recent, cached in zip(*self._terms(columns), strict=True)
        ]

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return [
            {"ongoing_tokens": pending + decoding, "recent_tokens": recent, "cached_tokens": cached}
            for pending, decoding, recent, cached in zip(*self._terms(columns), strict=True)
        ]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(least(fleet, scores), Reason.LOWEST_SCORE)

    @staticmethod
    def _terms(columns: FleetColumns) -> tuple[Sequence[int], Sequence[int], Sequence[float], Sequence[int]]:
        return columns.pending_prefill_tokens, columns.decoding_tokens, columns.recent_tokens, columns.cached_tokens
