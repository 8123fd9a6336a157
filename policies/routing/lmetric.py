"""LMetric: new prefill tokens times batch size, with the paper's hotspot detector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.hotspots import is_hotspot
from policies.routing.base import lowest, require
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, Reason, RequestView


def lmetric_score(
    view: InstanceView, prompt_tokens: int, batch: int, decode_weight: float = 0.0, recent_weight: float = 0.0
) -> CandidateScore:
    """``max(1, P) x max(1, BS)``: P is the prefill before this request's first token, its own included.

    ``P = pending_prefill + (prompt - cached) + decode_weight x decoding + recent_weight x recent``, in tokens.
    """
    prefill = (
        view.pending_prefill_tokens
        + prompt_tokens
        - view.cached_tokens
        + decode_weight * view.decoding_tokens
        + recent_weight * view.recent_tokens
    )
    inputs: dict[str, float] = {
        "pending_prefill_tokens": view.pending_prefill_tokens,
        "new_tokens": prompt_tokens - view.cached_tokens,
        "batch": batch,
    }
    if decode_weight:
        inputs["decoding_tokens"] = view.decoding_tokens
    if recent_weight:
        inputs["recent_tokens"] = view.recent_tokens
    return CandidateScore(view.instance, max(1.0, prefill) * max(1, batch), inputs)


@dataclass(frozen=True, slots=True)
class LMetric:
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

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        scores = [lmetric_score(view, request.prompt_tokens, view.requests + 1) for view in fleet.instances]
        if self._skips_holders(fleet):
            scores = [
                score._replace(skipped=view.holds_class) for view, score in zip(fleet.instances, scores, strict=True)
            ]
            return Choice(lowest(fleet, scores).instance, Reason.HOTSPOT_AVOIDED, tuple(scores))
        return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, tuple(scores))

    def _skips_holders(self, fleet: FleetSnapshot) -> bool:
        if not self.detect_hotspots or fleet.hotspot.window < self.min_window:
            return False
        holders = sum(view.holds_class for view in fleet.instances)
        alarmed = is_hotspot(fleet.hotspot.share, holders, len(fleet.instances) - holders)
        return alarmed and fleet.hotspot.streak >= 2 * holders
