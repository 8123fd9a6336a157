"""LMetric: new prefill tokens times batch size, with the paper's hotspot detector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.hotspots import is_hotspot
from policies.routing.base import ColumnPolicy, Pick, least, require
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


def lmetric_scores(
    columns: FleetColumns, prompt_tokens: int, own: int, decode_weight: float = 0.0, recent_weight: float = 0.0
) -> list[float]:
    """``max(1, P) x max(1, BS)``: P is the prefill before this request's first token, its own included.

    ``P = pending_prefill + (prompt - cached) + decode_weight x decoding + recent_weight x recent``, in tokens; ``BS``
    is the requests in flight and ``own``.
    """
    prompt = float(prompt_tokens)  # conditions instead of `max`: a call for each candidate takes as long as the rest
    if not decode_weight and not recent_weight:
        return [
            (prefill if (prefill := pending + prompt - cached) > 1.0 else 1.0)
            * (batch if (batch := requests + own) > 1 else 1)
            for pending, cached, requests in zip(
                columns.pending_prefill_tokens, columns.cached_tokens, columns.requests, strict=True
            )
        ]
    return [
        (
            prefill
            if (prefill := pending + prompt - cached + decode_weight * decoding + recent_weight * recent) > 1.0
            else 1.0
        )
        * (batch if (batch := requests + own) > 1 else 1)
        for pending, cached, decoding, recent, requests in zip(
            columns.pending_prefill_tokens,
            columns.cached_tokens,
            columns.decoding_tokens,
            columns.recent_tokens,
            columns.requests,
            strict=True,
        )
    ]


def lmetric_inputs(columns: FleetColumns, prompt_tokens: int, own: int) -> list[dict[str, float]]:
    """Inputs of those scores, without those that a weight adds."""
    return [
        {"pending_prefill_tokens": pending, "new_tokens": prompt_tokens - cached, "batch": requests + own}
        for pending, cached, requests in zip(
            columns.pending_prefill_tokens, columns.cached_tokens, columns.requests, strict=True
        )
    ]


@dataclass(frozen=True, slots=True)
class LMetric(ColumnPolicy):
    """``score = max(1, pending_prefill + new) x max(1, requests + 1)``, lowest wins.

    Source: LMetric, arXiv 2603.15202 (OSDI'26): P x BS, where P counts queued prefill and BS counts this request. Both
    factors are floored at 1, since a product that is 0 on every idle instance would leave the choice to ties.

    Hotspot detector, as in the paper: a prefix class is alarmed while its arrival share x has x/(1-x) > |M|/|others|,
    M being the candidates that hold it; once ``2 |M|`` consecutive requests of an alarmed class went to M, the next one
    skips M. Defaults: ``detect_hotspots`` true, ``min_window`` 16 requests before any alarm (a share of a few
    requests is noise). Complexity: O(n).
    """

    detect_hotspots: bool = True
    min_window: int = 16
    name: ClassVar[str] = "lmetric"

    def __post_init__(self) -> None:
        require(self.min_window >= 1, "lmetric: min_window must be at least 1")

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        return lmetric_scores(columns, request.prompt_tokens, 1)

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return lmetric_inputs(columns, request.prompt_tokens, 1)

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        if self._skips_holders(fleet, columns):
            return Pick(least(fleet, scores, columns.holds_class), Reason.HOTSPOT_AVOIDED, columns.holds_class)
        return Pick(least(fleet, scores), Reason.LOWEST_SCORE)

    def _skips_holders(self, fleet: FleetSnapshot, columns: FleetColumns) -> bool:
        if not self.detect_hotspots or fleet.hotspot.window < self.min_window:
            return False
        holders = sum(columns.holds_class)
        alarmed = is_hotspot(fleet.hotspot.share, holders, len(fleet.instances) - holders)
        return alarmed and fleet.hotspot.streak >= 2 * holders
