"""Slices of a run with and without hostile clients, and what polite clients see in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from bench.soak.plan import SoakPlan

_ENOUGH = 200
"""First events in each phase for a 99th percentile that two of them do not decide."""


class SliceKind(StrEnum):
    """Presence of hostile clients."""

    WITHOUT = "without"
    WITH = "with"


@dataclass
class SliceTally:
    """Counts of one phase."""

    requests: int = 0
    refused: int = 0
    """Requests answered with a status other than 200."""
    ttft_s: list[float] = field(default_factory=list)
    """Seconds from sending a request to the first event of its stream."""


class SliceFigures(msgspec.Struct, frozen=True):
    """Figures of one phase."""

    requests: int
    refused: int
    ttft_p50_ms: float
    ttft_p99_ms: float


class SliceComparison(msgspec.Struct, frozen=True):
    """Both phases."""

    without: SliceFigures
    with_hostile: SliceFigures
    ttft_p50_ratio: float
    ttft_p99_ratio: float


def kind_at(plan: SoakPlan, at_s: float) -> SliceKind | None:
    """Kind of the slice ``at_s`` seconds after the start; None near its beginning, and without hostile clients."""
    number, within_s = divmod(at_s, plan.slice_s)
    if not plan.hostile_share or within_s < plan.settle_share * plan.slice_s or at_s >= plan.duration_s:
        return None
    return SliceKind.WITH if number % 2 else SliceKind.WITHOUT


def compare(phases: dict[SliceKind, SliceTally]) -> SliceComparison | None:
    """Ratios of TTFT with hostile clients to that without; None for too few requests."""
    if any(len(tally.ttft_s) < _ENOUGH for tally in phases.values()):
        return None
    without, with_hostile = (_figures(phases[phase]) for phase in (SliceKind.WITHOUT, SliceKind.WITH))
    return SliceComparison(
        without,
        with_hostile,
        round(with_hostile.ttft_p50_ms / without.ttft_p50_ms, 3),
        round(with_hostile.ttft_p99_ms / without.ttft_p99_ms, 3),
    )


def _figures(tally: SliceTally) -> SliceFigures:
    p50, p99 = np.percentile(tally.ttft_s, (50, 99))
    return SliceFigures(tally.requests, tally.refused, round(1e3 * float(p50), 2), round(1e3 * float(p99), 2))
