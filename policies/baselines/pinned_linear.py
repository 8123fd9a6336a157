"""Pinned linear: the baseline of the agentic-kvc reports, a session pin with a load override over the linear score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import ColumnPolicy, Pick, least, require
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class PinnedLinear(ColumnPolicy):
    """Pin, override, score.

    ``score = ongoing_tokens - alpha x cached_tokens``, lowest wins; ``ongoing_tokens`` is queued prefill plus context
    being decoded, and an instance's load.

    1. A later turn goes to its session's instance, unless that one's load exceeds ``overload_factor`` x the mean load.
    2. An overloaded instance is left for the lowest score among the others; the session moves along.
    3. First turns, requests without a session and those whose instance is gone go to the lowest score of all.

    Source: the agentic-kvc milestone report (8 x H20, 2026-05-22), section 2.4, "PD-Combined": session-sticky routing,
    "if pinned instance > 2x avg load, redirect", cache-hit scoring; the score is that of its section 3.4. It is the
    co-located baseline and, under the offloads, the router of its elastic arm. `linear` here is the score alone.
    Defaults: ``overload_factor`` 2.0, theirs; ``alpha`` 1.0, for which they publish no value.

    Deviations: they do not define load, which is taken to be the score's own; the mean includes the pinned instance;
    ties go by ``tie_break``. There is no floor and no recent term: on an almost idle fleet one request is an overload.
    Complexity: O(n).
    """

    overload_factor: float = 2.0
    alpha: float = 1.0
    name: ClassVar[str] = "pinned_linear"

    def __post_init__(self) -> None:
        require(self.overload_factor >= 1, "pinned_linear: overload_factor must be at least 1")
        require(self.alpha >= 0, "pinned_linear: alpha must not be negative")

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        alpha = self.alpha
        return [
            ongoing - alpha * cached for ongoing, cached in zip(_ongoing(columns), columns.cached_tokens, strict=True)
        ]

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return [
            {"ongoing_tokens": ongoing, "cached_tokens": cached}
            for ongoing, cached in zip(_ongoing(columns), columns.cached_tokens, strict=True)
        ]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        """Answer by the three rules of the class."""
        if fleet.pinned is None:
            reason = Reason.LOWEST_SCORE if request.session_id is None else Reason.SESSION_PLACED
            return Pick(least(fleet, scores), reason)
        if fleet.pinned not in columns.instance:
            return Pick(least(fleet, scores), Reason.SESSION_INSTANCE_GONE)
        home, ongoing = columns.instance.index(fleet.pinned), _ongoing(columns)
        mean = sum(ongoing) / len(ongoing)
        if len(scores) == 1 or ongoing[home] <= self.overload_factor * mean:
            return Pick(home, Reason.SESSION_PINNED)
        skipped = [place == home for place in range(len(scores))]
        return Pick(least(fleet, scores, skipped), Reason.SESSION_OVERLOADED, skipped)


def _ongoing(columns: FleetColumns) -> list[int]:
    """``ongoing_tokens`` of every candidate."""
    return [
        pending + decoding
        for pending, decoding in zip(columns.pending_prefill_tokens, columns.decoding_tokens, strict=True)
    ]
