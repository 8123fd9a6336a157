"""TTFT by turn of the session, with an interval that needs no assumption about its distribution."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr

from replayer.compare.statistics.tests import FloatArray
from replayer.records.runs import RequestRecord

MIN_REQUESTS = 6
"""The median of fewer has no 95 % interval between order statistics."""
MAX_TURNS = 60


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """One turn over all sessions that reached it."""

    turn: int
    sessions: int
    p50_s: float
    low_s: float
    """95 % interval of the median: order statistics (distribution-free; David & Nagaraja, "Order Statistics", 7.1)."""
    high_s: float
    p90_s: float


def by_turn(runs: Iterable[Iterable[RequestRecord]]) -> list[TurnTimes]:
    """TTFT of successful requests by turn; turns that fewer than `MIN_REQUESTS` sessions reached are left out.

    Args:
        runs: the records of an arm's repeats. A session counts once for each turn, with its median over the repeats,
            so that the values behind an interval are independent as far as sessions are.
    """
    seen: dict[int, dict[str, list[float]]] = {}
    for records in runs:
        for record in records:
            if record.ok and record.ttft_s is not None:
                seen.setdefault(record.turn, {}).setdefault(record.session_id, []).append(record.ttft_s)
    turns = [
        (turn, np.sort([float(np.median(values)) if len(values) > 1 else values[0] for values in sessions.values()]))
        for turn, sessions in sorted(seen.items())
        if len(sessions) >= MIN_REQUESTS
    ]
    return [_times(turn, ordered) for turn, ordered in turns[:MAX_TURNS]]


def _times(turn: int, ordered: FloatArray) -> TurnTimes:
    low, high = median_interval(len(ordered))
    return TurnTimes(
        turn=turn,
        sessions=len(ordered),
        p50_s=float(np.median(ordered)),
        low_s=float(ordered[low]),
        high_s=float(ordered[high]),
        p90_s=float(np.quantile(ordered, 0.9)),
    )


def median_interval(size: int, level: float = 0.95) -> tuple[int, int]:
    """Places (from 0) of the two order statistics that enclose the median with at least ``level``.

    P(x_(j) < median) = P(Binomial(n, 1/2) >= j), so j is the largest number with P(Binomial <= j - 1) <= (1 - level)/2.
    """
    # scipy.stats, which has the quantile, takes most of a second to import.
    place = max(int(np.count_nonzero(bdtr(np.arange(size), size, 0.5) <= (1 - level) / 2)) - 1, 0)
    return place, size - 1 - place
