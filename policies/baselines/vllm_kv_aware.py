"""vLLM Router's ``kv_aware``: prefill tokens times batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import lowest
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class VllmKvAware:
    """``cost = (active_prefill + new) x (requests + 1)``, lowest wins; ties by fewer requests.

    Source: vllm-project/router 0.1.17 (PyPI sdist, 2026-11-04), ``src/policies/kv_aware.rs``, ``MultiplicativeScorer``
    over ``cost_components``, with its defaults: temperature 0 (no sampling), no session affinity. The last prompt token
    is never credited as cached, there as here.

    Deviations: all cached tokens count as being on the device, where the source credits host, external and disk tiers
    with 0.8, 0.6 and 0.3; this router's index predicts them unless KV events are connected. It is `lmetric` without the
    hotspot detector. Complexity: O(n).
    """

    name: ClassVar[str] = "vllm_kv_aware"

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        scores = tuple(
            [
                CandidateScore(
                    view.instance,
                    float(
                        (view.pending_prefill_tokens + request.prompt_tokens - view.cached_tokens) * (view.requests + 1)
                    ),
                    {
                        "pending_prefill_tokens": view.pending_prefill_tokens,
                        "new_tokens": request.prompt_tokens - view.cached_tokens,
                        "requests": view.requests,
                    },
                )
                for view in fleet.instances
            ]
        )
        return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, scores)
