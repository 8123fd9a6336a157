"""Pinned linear: the baseline of the agentic-kvc reports, a session pin with a load override over the linear score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import lowest, require
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, Reason, RequestView


@dataclass(frozen=True, slots=True)
class PinnedLinear:
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

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        """Answer by the three rules of the class."""
        scores = tuple([self._score(view) for view in fleet.instances])
        if fleet.pinned is None:
            reason = Reason.LOWEST_SCORE if request.session_id is None else Reason.SESSION_PLACED
            return Choice(lowest(fleet, scores).instance, reason, scores)
        home = next((view for view in fleet.instances if view.instance == fleet.pinned), None)
        if home is None:
            return Choice(lowest(fleet, scores).instance, Reason.SESSION_INSTANCE_GONE, scores)
        mean = sum([view.ongoing_tokens for view in fleet.instances]) / len(fleet.instances)
        if len(scores) == 1 or home.ongoing_tokens <= self.overload_factor * mean:
            return Choice(home.instance, Reason.SESSION_PINNED, scores)
        others = tuple([score._replace(skipped=score.instance == home.instance) for score in scores])
        return Choice(lowest(fleet, others).instance, Reason.SESSION_OVERLOADED, others)

    def _score(self, view: InstanceView) -> CandidateScore:
        ongoing, cached = view.ongoing_tokens, view.cached_tokens
        return CandidateScore(
            view.instance, ongoing - self.alpha * cached, {"ongoing_tokens": ongoing, "cached_tokens": cached}
        )
