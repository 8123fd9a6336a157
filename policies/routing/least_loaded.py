"""Least loaded: fewest tokens in flight, regardless of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import ColumnPolicy, Pick, least, require
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class LeastLoaded(ColumnPolicy):
    """``pending_prefill_tokens + decode_weight x decoding_tokens + recent_weight x recent_tokens``, lowest wins.

    The recent term spreads work even when nothing is in flight, which with agent pacing is most of the time.
    Defaults: ``decode_weight`` 0.1 (a decoding token is far cheaper than one to prefill), ``recent_weight`` 0.1.
    Complexity: O(n).
    """

    decode_weight: float = 0.1
    recent_weight: float = 0.1
    name: ClassVar[str] = "least_loaded"

    def __post_init__(self) -> None:
        require(self.decode_weight >= 0 and self.recent_weight >= 0, "least_loaded: weights must not be negative")

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        decode_weight, recent_weight = self.decode_weight, self.recent_weight
        return [
            pending + decode_weight * decoding + recent_weight * recent
            for pending, decoding, recent in zip(*self._terms(columns), strict=True)
        ]

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return [
            {"pending_prefill_tokens": pending, "decoding_tokens": decoding, "recent_tokens": recent}
            for pending, decoding, recent in zip(*self._terms(columns), strict=True)
        ]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(least(fleet, scores), Reason.LEAST_LOADED)

    @staticmethod
    def _terms(columns: FleetColumns) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
        return columns.pending_prefill_tokens, columns.decoding_tokens, columns.recent_tokens
