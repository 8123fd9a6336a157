"""Cost of watching: the observed stacks to the same proxy without observers, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median, quantiles
from typing import NamedTuple

from rich.table import Table

from bench.data_plane.launches import OBSERVED, TRACED, UNOBSERVED
from bench.data_plane.measure import DataPlaneRecord
from bench.data_plane.report.ratios import by_round
from bench.data_plane.report.table import quantities, title

LIMIT = 1.10
"""Most that the observers may cost (docs/performance.md)."""
_MEASURED = ("cpu_ms_", "added_p50_ms_")
_SHARE = 0.95


class RatioSpread(NamedTuple):
    """Median of the rounds' ratios, their quartiles, and an interval of the median."""

    median: float
    first_quartile: float
    third_quartile: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return (
            f"{self.median:.2f} [{self.first_quartile:.2f}, {self.third_quartile:.2f}] "
            f"({self.low:.2f} to {self.high:.2f})"
        )


def spread(ratios: Sequence[float]) -> RatioSpread:
    """Summary of at least two ratios.

    The interval has the ranks at which it covers the median with 95 % at least, whatever the distribution (the sign
    test's); with fewer than six ratios it is their range.
    """
    ordered, count = sorted(ratios), len(ratios)
    outside, below = 0.0, 0  # values that may be left out at each end
    while below < (count - 1) // 2:
        outside += 2 * comb(count, below) / 2**count
        if outside > 1 - _SHARE:
            break
        below += 1
    cut = max(0, below - 1)
    first, _, third = quantiles(ordered, n=4, method="inclusive")
    return RatioSpread(median(ordered), first, third, ordered[cut], ordered[-1 - cut], count)


def watching(record: DataPlaneRecord) -> Table | None:
    """Ratios of the observed stacks; None if the run has not both kinds, or one round only."""
    observed = [stack for stack in (OBSERVED, TRACED) if stack in record.stacks]
    if UNOBSERVED not in record.stacks or not observed or record.rounds < 2:
        return None
    table = Table(
        title=f"to {UNOBSERVED}: median of the rounds' ratios, quartiles in brackets, 95 % interval of the "
        f"median in parentheses; limit {LIMIT:.2f}, {record.rounds} rounds"
    )
    table.add_column("quantity")
    for stack in observed:
        table.add_column(stack, justify="right")
    for quantity in quantities(record):
        if quantity.startswith(_MEASURED):
            base = by_round(record.samples, quantity, UNOBSERVED)
            cells = [_cell(base, by_round(record.samples, quantity, stack)) for stack in observed]
            table.add_row(title(quantity), *cells)
    return table


def _cell(base: dict[int, float], found: dict[int, float]) -> str:
    ratios = [found[number] / base[number] for number in sorted(base.keys() & found.keys()) if base[number] > 0]
    return str(spread(ratios)) if len(ratios) > 1 else "-"
