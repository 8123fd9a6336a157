"""Shared by the cache-aware policies of the vLLM and SGLang routers: shortest queue, and the imbalance rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from policies.routing.base import ColumnPolicy, Pick, least, longest_cached
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


def is_imbalanced(loads: Sequence[int], abs_threshold: int, rel_threshold: float) -> bool:
    """True if ``max - min > abs_threshold`` and ``max > rel_threshold x min``, in requests in flight."""
    most, fewest = max(loads), min(loads)
    return most - fewest > abs_threshold and most > rel_threshold * fewest


def queue_inputs(request: RequestView, columns: FleetColumns) -> list[dict[str, float]]:
    """Requests in flight, and share of the prompt that is cached (0 for an empty prompt), of every candidate."""
    prompt = request.prompt_tokens
    return [
        {"requests": requests, "match_rate": cached / prompt if prompt else 0.0}
        for requests, cached in zip(columns.requests, columns.cached_tokens, strict=True)
    ]


class ShortestQueue(ColumnPolicy):
    """Every candidate is scored by its requests in flight."""

    __slots__ = ()

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        return [float(requests) for requests in columns.requests]

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return queue_inputs(request, columns)


def matched_or_shortest(
    request: RequestView,
    fleet: FleetSnapshot,
    columns: FleetColumns,
    cache_threshold: float,
    then: Callable[[int], Any],
) -> Pick:
    """The longest match if its share of the prompt exceeds ``cache_threshold``, of equals the lowest ``then``.

    Else the fewest requests in flight.
    """
    cached, prompt = columns.cached_tokens, request.prompt_tokens
    if prompt and max(cached) / prompt > cache_threshold:
        return Pick(longest_cached(fleet, columns, then), Reason.AFFINITY)
    return Pick(least(fleet, columns.requests), Reason.LEAST_LOADED)
