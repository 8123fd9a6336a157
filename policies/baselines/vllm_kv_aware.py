"""vLLM Router's ``kv_aware``: prefill tokens times batch size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import ColumnPolicy, Pick, least
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class VllmKvAware(ColumnPolicy):
    """``cost = (active_prefill + new) x (requests + 1)``, lowest wins; ties by fewer requests.

    Source: vllm-project/router 0.1.17 (PyPI sdist, 2026-11-04), ``src/policies/kv_aware.rs``, ``MultiplicativeScorer``
    over ``cost_components``, with its defaults: temperature 0 (no sampling), no session affinity. The last prompt token
    is never credited as cached, there as here.

    Deviations: all cached tokens count as being on the device, where the source credits host, external and disk tiers
    with 0.8, 0.6 and 0.3; this router's index predicts them unless KV events are connected. It is `lmetric` without the
    hotspot detector. Complexity: O(n).
    """

    name: ClassVar[str] = "vllm_kv_aware"

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        prompt = request.prompt_tokens
        return [
            float((pending + prompt - cached) * (requests + 1))
            for pending, cached, requests in zip(*self._terms(columns), strict=True)
        ]

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return [
            {"pending_prefill_tokens": pending, "new_tokens": request.prompt_tokens - cached, "requests": requests}
            for pending, cached, requests in zip(*self._terms(columns), strict=True)
        ]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(least(fleet, scores), Reason.LOWEST_SCORE)

    @staticmethod
    def _terms(columns: FleetColumns) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        return columns.pending_prefill_tokens, columns.cached_tokens, columns.requests
