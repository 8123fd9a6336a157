"""Shared by the cache-aware policies of the vLLM and SGLang routers: shortest queue, and the imbalance rule."""

from __future__ import annotations

from policies.routing.base import lowest
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, Reason, RequestView


def is_imbalanced(fleet: FleetSnapshot, abs_threshold: int, rel_threshold: float) -> bool:
    """True if ``max - min > abs_threshold`` and ``max > rel_threshold x min``, in requests in flight."""
    loads = [view.requests for view in fleet.instances]
    most, least = max(loads), min(loads)
    return most - least > abs_threshold and most > rel_threshold * least


def match_rate(view: InstanceView, request: RequestView) -> float:
    """Share of the prompt that is cached on an instance, 0..1; 0 for an empty prompt."""
    return view.cached_tokens / request.prompt_tokens if request.prompt_tokens else 0.0


def queue_scores(request: RequestView, fleet: FleetSnapshot) -> tuple[CandidateScore, ...]:
    """Every candidate scored by its requests in flight."""
    return tuple(
        [
            CandidateScore(
                view.instance,
                float(view.requests),
                {"requests": view.requests, "match_rate": match_rate(view, request)},
            )
            for view in fleet.instances
        ]
    )


def shortest_queue(fleet: FleetSnapshot, scores: tuple[CandidateScore, ...]) -> Choice:
    """The candidate with the fewest requests in flight."""
    return Choice(lowest(fleet, scores).instance, Reason.LEAST_LOADED, scores)
