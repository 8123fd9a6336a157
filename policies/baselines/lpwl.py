"""LPWL: least prefill work left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import ColumnPolicy, Pick, least
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class Lpwl(ColumnPolicy):
    """``score = pending_prefill + max(0, prompt - cached)``, lowest wins. No parameters.

    Source: the agentic-kvc reports, ``analysis/lpwl_5policy_600s.md`` (8 x H20, one run of 600 s): TTFT p90 7,983 ms
    against 11,562 ms for `unified`; a decode term added to it made TTFT p90 18 % worse.

    Deviations: ties go by ``tie_break``. Complexity: O(n).
    """

    name: ClassVar[str] = "lpwl"

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        prompt = request.prompt_tokens
        return [
            float(pending + max(0, prompt - cached))
            for pending, cached in zip(columns.pending_prefill_tokens, columns.cached_tokens, strict=True)
        ]

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return [
            {"pending_prefill_tokens": pending, "new_tokens": request.prompt_tokens - cached}
            for pending, cached in zip(columns.pending_prefill_tokens, columns.cached_tokens, strict=True)
        ]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(least(fleet, scores), Reason.LOWEST_SCORE)
