"""Ratios of one stack to another, round by round, and their summary over rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from bench.data_plane.quantities import QuantitySample


class Ratio(NamedTuple):
    """Median and range over the rounds in which both stacks were measured."""

    median: float
    low: float
    high: float
    rounds: int


def by_round(samples: Sequence[QuantitySample], quantity: str, stack: str) -> dict[int, float]:
    """Round -> value of one quantity of one stack."""
    return {s.round: s.values[quantity] for s in samples if s.stack == stack and quantity in s.values}


def ratios(samples: Sequence[QuantitySample], quantity: str, ours: str, theirs: str) -> Ratio | None:
    """Ours divided by theirs within each round, so that other load on the machine affects both.

    None without a round in which both were measured. A round in which theirs is zero is left out.
    """
    mine, peer = by_round(samples, quantity, ours), by_round(samples, quantity, theirs)
    found = [mine[number] / peer[number] for number in sorted(mine.keys() & peer.keys()) if peer[number] > 0]
    return Ratio(median(found), min(found), max(found), len(found)) if found else None


def medians(samples: Sequence[QuantitySample]) -> dict[tuple[str, str], float]:
    """(quantity, stack) -> median over the rounds."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        for quantity, value in sample.values.items():
            values[quantity, sample.stack].append(value)
    return {key: median(found) for key, found in values.items()}
