"""Completion times and slowdowns of whole sessions, by policy over many cells; no part of the ranking."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from bench.tournament.judge import CellFigures
from bench.tournament.results import SessionTimes

MIN_SESSIONS = 10
"""A cell counts if every policy completed this many whole sessions in every seed."""
_TIMES = ("mean_s", "p50_s", "p90_s")
_SLOWDOWNS = ("slowdown_mean", "slowdown_p50", "slowdown_p90")


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
