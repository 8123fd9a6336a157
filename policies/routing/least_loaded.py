"""Least loaded: fewest tokens in flight, regardless of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import lowest, require
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class LeastLoaded:
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

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        scores = tuple(
            CandidateScore(
                view.instance,
                view.pending_prefill_tokens
                + self.decode_weight * view.decoding_tokens
                + self.recent_weight * view.recent_tokens,
                {
                    "pending_prefill_tokens": view.pending_prefill_tokens,
                    "decoding_tokens": view.decoding_tokens,
                    "recent_tokens": view.recent_tokens,
                },
            )
            for view in fleet.instances
        )
        return Choice(lowest(fleet, scores).instance, Reason.LEAST_LOADED, scores)
