"""LPWL: least prefill work left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import lowest
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class Lpwl:
    """``score = pending_prefill + max(0, prompt - cached)``, lowest wins. No parameters.

    Source: the agentic-kvc reports, ``analysis/lpwl_5policy_600s.md`` (8 x H20, one run of 600 s): TTFT p90 7,983 ms
    against 11,562 ms for `unified`; a decode term added to it made TTFT p90 18 % worse.

    Deviations: ties go by ``tie_break``. Complexity: O(n).
    """

    name: ClassVar[str] = "lpwl"

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        scores = tuple(
            [
                CandidateScore(
                    view.instance,
                    float(view.pending_prefill_tokens + max(0, request.prompt_tokens - view.cached_tokens)),
                    {
                        "pending_prefill_tokens": view.pending_prefill_tokens,
                        "new_tokens": request.prompt_tokens - view.cached_tokens,
                    },
                )
                for view in fleet.instances
            ]
        )
        return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, scores)
