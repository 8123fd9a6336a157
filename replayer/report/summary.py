"""An arm in figures: latencies with intervals of the medians, classes, where its requests went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from replayer.compare.pairing import silence_as_zero
from replayer.compare.statistics.bootstrap import SessionBootstrap
from replayer.compare.statistics.tests import ALPHA, FloatArray
from replayer.records.runs import RequestRecord, Run
from replayer.records.sessions import SessionTally
from replayer.records.summary import Summary, summarise

_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % interval by bootstrap over sessions, seconds; None where there is no value."""

    low_s: float | None = None
    high_s: float | None = None


@dataclass(frozen=True)
class ClassShare:
    """Share of one class in an arm's work."""

    requests: float
    """Of all requests."""
    new_tokens: float | None
    """Of all tokens computed."""


@dataclass(frozen=True)
class ArmSummary:
    """An arm in figures: the run's own summary, and where its requests went."""

    label: str
    summary: Summary
    """Over all requests of all runs; unknown cached tokens count as in `replayer.compare.runs`."""
    requests_by_instance: dict[str, int]
    new_tokens_by_instance: dict[str, int]
    shares: dict[str, ClassShare]
    """By class."""
    ttft_p50_s: Interval = Interval()
    e2e_p50_s: Interval = Interval()
    runs: int = 1

    def imbalance(self, loads: dict[str, int], instances: int) -> float:
        """Largest instance's load over the mean over ``instances``; 1 is even."""
        total = sum(loads.values())
        return max(loads.values()) * instances / total if total else float("nan")


def values_of(records: Iterable[RequestRecord], attribute: str) -> FloatArray:
    """The known values of one attribute among the successful requests, as floats."""
    found = [getattr(record, attribute) for record in records if record.ok]
    return np.array([value for value in found if value is not None], dtype=np.float64)


def summarise_arm(
    label: str, run: Run, *, runs: int = 1, intervals: bool = False, sessions: SessionTally | None = None
) -> ArmSummary:
    """An arm's figures over all of its requests (the paired figures are the comparison's).

    Args:
        label: name of the arm.
        run: its requests; of several runs pooled, ``runs`` is their number.
        runs: number of runs.
        intervals: whether to compute intervals of the medians.
        sessions: of the pooled runs, each for itself; None: of ``run``, a single one.
    """
    run = run._replace(records=silence_as_zero(run.records))
    by_instance: Counter[str] = Counter()
    new_tokens: Counter[str] = Counter()
    for record in run.records:
        if record.ok and record.instance is not None:
            by_instance[record.instance] += 1
            new_tokens[record.prefill_instance or record.instance] += record.new_tokens or 0
    summary = summarise(run, sessions=sessions)
    return ArmSummary(
        label=label,
        summary=summary,
        requests_by_instance=dict(by_instance),
        new_tokens_by_instance=dict(new_tokens),
        shares=_shares(summary),
        ttft_p50_s=median_interval(run.records, "ttft_s") if intervals else Interval(),
        e2e_p50_s=median_interval(run.records, "e2e_s") if intervals else Interval(),
        runs=runs,
    )


def median_interval(records: Sequence[RequestRecord], attribute: str, seed: int = 0) -> Interval:
    """95 % percentile interval of a median, bootstrapped over sessions; repeats of a session belong to it."""
    found = [
        (record.session_id, value)
        for record in records
        if record.ok and (value := getattr(record, attribute)) is not None
    ]
    if not found:
        return Interval()
    names, session_of = np.unique([session for session, _ in found], return_inverse=True)
    values = np.array([value for _, value in found], dtype=np.float64)
    bootstrap = SessionBootstrap(session_of.astype(np.int64), len(names), resamples=_RESAMPLES, seed=seed)
    medians = bootstrap.quantiles(values, np.ones(len(values), dtype=np.bool_), np.array([0.5]))[:, 0]
    low, high = np.nanquantile(medians, [ALPHA / 2, 1 - ALPHA / 2])
    return Interval(float(low), float(high))


def _shares(summary: Summary) -> dict[str, ClassShare]:
    tokens = {row.name: (row.new_tokens.mean or 0.0) * row.new_tokens.n for row in summary.classes}
    computed = sum(tokens.values())
    return {
        row.name: ClassShare(
            row.requests / summary.requests if summary.requests else 0.0,
            tokens[row.name] / computed if computed and row.new_tokens.n else None,
        )
        for row in summary.classes
    }
