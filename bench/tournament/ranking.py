"""A policy over many cells: share of cells best or tied, mean and worst ratio to the best; times of its sessions.

The ranking does not take sessions into account.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from bench.tournament.judge import METRICS, CellFigures, CellStanding
from bench.tournament.results import GridCell, SessionTimes

TARGET_SHARE = 0.8
"""Target: share of cells in which the default policy is best or tied for best on both metrics."""
TARGET_RATIO = 1.05
"""Target: largest ratio of the default policy to the best in any cell."""

MIN_SESSIONS = 10
"""A cell counts if every policy completed this many whole sessions in every seed."""
_TIMES = ("mean_s", "p50_s", "p90_s")
_SLOWDOWNS = ("slowdown_mean", "slowdown_p50", "slowdown_p90")


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One policy over some cells."""

    label: str
    cells: int
    tied: float
    """Share of cells where it is best or tied for best on both metrics."""
    tied_on: dict[str, float]
    """The same share for each metric."""
    mean: dict[str, float]
    """Geometric mean of its ratio to the best, for each metric."""
    worst: float
    """Largest ratio to the best, of either metric."""
    worst_cell: GridCell
    behind: int
    """Cells where it is more than 5 % behind the best on either metric."""
    surely_behind: int
    """Cells where the whole interval lies beyond 5 %."""
    failed: int

    @property
    def overall(self) -> float:
        """Geometric mean over both metrics."""
        return math.exp(math.fsum(math.log(each) for each in self.mean.values()) / len(self.mean))


def rank(verdicts: Sequence[CellStanding]) -> Rank:
    """Rank of one policy from its verdicts, of which there is at least one."""
    worst = max(verdicts, key=lambda verdict: verdict.worst)
    count = len(verdicts)

    def share(test: Callable[[CellStanding], bool]) -> float:
        return sum(map(test, verdicts)) / count

    return Rank(
        label=verdicts[0].label,
        cells=count,
        tied=share(lambda verdict: verdict.tied),
        tied_on={metric: sum(verdict.metrics[metric].tied for verdict in verdicts) / count for metric in METRICS},
        mean={
            metric: math.exp(math.fsum(math.log(verdict.metrics[metric].ratio) for verdict in verdicts) / count)
            for metric in METRICS
        },
        worst=worst.worst,
        worst_cell=worst.cell,
        behind=sum(verdict.worst > TARGET_RATIO for verdict in verdicts),
        surely_behind=sum(any(each.low > TARGET_RATIO for each in verdict.metrics.values()) for verdict in verdicts),
        failed=sum(verdict.failed for verdict in verdicts),
    )


def ranking(verdicts: Iterable[CellStanding]) -> list[Rank]:
    """All policies, the best first: by share of cells best or tied on both metrics, by mean ratio, by name."""
    grouped: dict[str, list[CellStanding]] = {}
    for verdict in verdicts:
        grouped.setdefault(verdict.label, []).append(verdict)
    ranks = [rank(each) for each in grouped.values()]
    return sorted(ranks, key=lambda each: (-each.tied, each.overall, each.label))


def by_axis(verdicts: Iterable[CellStanding], axis: Callable[[GridCell], object]) -> dict[object, dict[str, Rank]]:
    """Ranks by a property of cells and by policy; values of the axis in order of their first cell."""
    grouped: dict[object, dict[str, list[CellStanding]]] = {}
    for verdict in sorted(verdicts, key=lambda each: (each.cell, each.label)):
        grouped.setdefault(axis(verdict.cell), {}).setdefault(verdict.label, []).append(verdict)
    return {value: {label: rank(each) for label, each in found.items()} for value, found in grouped.items()}


def family_share(verdicts: Iterable[CellStanding], families: Mapping[str, str]) -> dict[str, float]:
    """Share of cells best or tied on both metrics with equal weight for every family of traces, by policy."""
    found = by_axis(verdicts, lambda cell: families[cell.trace])
    labels = sorted({label for ranks in found.values() for label in ranks})
    return {
        label: math.fsum(ranks[label].tied for ranks in found.values() if label in ranks)
        / sum(label in ranks for ranks in found.values())
        for label in labels
    }


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's sessions. Each triple is of mean, p50 and p90."""

    label: str
    cells: int
    ratios: list[float]
    """Geometric means over cells of the completion time over the lowest of any policy in the cell."""
    slowdowns: list[float]
    """Geometric means over cells and seeds of the slowdown."""
    failed: int
    """Whole sessions with a failed turn, over all seeds of these cells."""


def session_rows(figures: Iterable[CellFigures], order: Sequence[str]) -> list[SessionRow]:
    """A row for each policy of ``order``, over the cells that have enough whole sessions; empty if none has."""
    counted = [found for each in figures if (found := _times(each, order)) is not None]
    if not counted:
        return []
    logs = [
        {label: [_mean_log(times, name) for name in (*_TIMES, *_SLOWDOWNS)] for label, times in found.items()}
        for found in counted
    ]
    lowest = [[min(values[place] for values in cell.values()) for place in range(len(_TIMES))] for cell in logs]
    rows = []
    for label in order:
        ratios = [
            math.exp(
                math.fsum(cell[label][place] - low[place] for cell, low in zip(logs, lowest, strict=True)) / len(logs)
            )
            for place in range(len(_TIMES))
        ]
        slowdowns = [
            math.exp(math.fsum(cell[label][place] for cell in logs) / len(logs))
            for place in range(len(_TIMES), len(_TIMES) + len(_SLOWDOWNS))
        ]
        failed = sum(times.sessions - times.completed for found in counted for times in found[label])
        rows.append(SessionRow(label=label, cells=len(counted), ratios=ratios, slowdowns=slowdowns, failed=failed))
    return rows


def _times(figures: CellFigures, order: Sequence[str]) -> dict[str, list[SessionTimes]] | None:
    """Every policy's figures by seed; None where one of them has too few sessions."""
    found: dict[str, list[SessionTimes]] = {}
    for label in order:
        times = [result.session_times for result in figures.results(label)]
        known = [each for each in times if each is not None and each.completed >= MIN_SESSIONS]
        if len(known) < len(times):
            return None
        found[label] = known
    return found


def _mean_log(times: Sequence[SessionTimes], name: str) -> float:
    return math.fsum(math.log(getattr(each, name)) for each in times) / len(times)
