"""The metrics of a comparison, computed per run, on the requests themselves and on every resample of sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from replayer.compare.goodput import Slo, SloTokens, meets_fixed, meets_scaled
from replayer.compare.pairing import Columns, Requests
from replayer.compare.statistics.bootstrap import BoolArray, FloatArray, SessionBootstrap
from replayer.records.counted import counted

QUANTILES = (0.5, 0.9, 0.99)
TIMES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
SESSION_QUANTILES = (0.5, 0.9)
SESSION_TIMES = (("session time", "session_s"), ("session slowdown", "session_slowdown"))
"""Completion time and slowdown of whole sessions (`replayer.records.sessions`): one value for each session."""
_OF_SESSIONS = frozenset(column for _, column in SESSION_TIMES)
MIN_TAIL_REQUESTS = 10
"""A quantile is judged only when at least this many requests (or sessions) lie beyond it, in every run."""
MIN_TAIL_SESSIONS = 6
"""And when these come from at least this many sessions."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a run."""

    name: str
    column: str
    """The time it is a quantile or the mean of, or the name of a ratio."""
    level: float | None = None
    """0..1 for a quantile, else None."""
    mean: bool = False

    @property
    def logarithmic(self) -> bool:
        """True for times and slowdowns, whose working scale is that of logarithms; False for ratios."""
        return self.level is not None or self.mean

    @property
    def unit(self) -> str:
        """ "s", "factor" (a slowdown) or "ratio"."""
        if not self.logarithmic:
            return "ratio"
        return "factor" if self.column == "session_slowdown" else "s"

    @property
    def lower_is_better(self) -> bool:
        """True for times and slowdowns; a higher ratio is better."""
        return self.logarithmic

    @property
    def counted(self) -> str:
        """Things that have one value each: "requests" or "sessions"."""
        return "sessions" if self.column in _OF_SESSIONS else "requests"


@dataclass(frozen=True, eq=False)
class Values:
    """One metric of several runs on the same requests.

    Times are on the working scale of logarithms, where a change of x % is the same distance up and down; ratios are
    as they are.
    """

    points: FloatArray
    """Shape (R,), on the working scale."""
    resampled: FloatArray
    """Shape (R, B), likewise."""
    requests: int
    """Values in each run: of requests, or of sessions for a metric of sessions."""
    sessions: int
    effective_sessions: float
    note: str
    """Reason why the metric is not judged; empty otherwise."""

    def part(self, start: int, end: int) -> Values:
        """Some of the runs."""
        return replace(self, points=self.points[start:end], resampled=self.resampled[start:end])


def metrics_of(slo: Slo, *, sessions: bool = True) -> list[Metric]:
    """All metrics in the order of the tables; goodput where an objective is set.

    Args:
        slo: the objectives.
        sessions: with those of whole sessions.
    """
    found = [Metric(f"{name} p{level * 100:g}", column, level) for name, column in TIMES for level in QUANTILES]
    found += [Metric("APC", "apc"), Metric("success rate", "success")]
    if slo.fixed:
        found.append(Metric("goodput", "goodput"))
    if slo.scaled:
        found.append(Metric("goodput, scaled SLO", "goodput_scaled"))
    for name, column in SESSION_TIMES if sessions else ():
        found.append(Metric(f"{name} mean", column, mean=True))
        found += [Metric(f"{name} p{level * 100:g}", column, level) for level in SESSION_QUANTILES]
    return found


class Evaluator:
    """Computes metrics of runs, and remembers them: several comparisons use the same runs on the same requests."""

    def __init__(self, requests: Requests, columns: Sequence[Columns], bootstrap: SessionBootstrap, slo: Slo) -> None:
        self._requests = requests
        self._columns = columns
        self._bootstrap = bootstrap
        self._slo = slo
        self._quantiles: dict[tuple[int, str, bytes], tuple[FloatArray, FloatArray]] = {}
        self._means: dict[tuple[int, str, bytes], tuple[float, FloatArray]] = {}
        self._shares: dict[tuple[int, str, bytes], tuple[float, FloatArray]] = {}
        self._met: dict[tuple[int, str], FloatArray] = {}

    def values(self, metric: Metric, runs: Sequence[int], kept: BoolArray) -> Values:
        """One metric of some runs.

        Args:
            metric: which.
            runs: positions of the runs.
            kept: shape (N,), the requests to look at; of these, times and APC take those that succeeded in all runs.
                Sessions are looked at if their first turn is, and taken if they completed in all runs.
        """
        if metric.logarithmic:
            return self._time(metric, runs, kept)
        return self._ratio(metric, runs, kept)

    def met(self, run: int, column: str) -> FloatArray:
        """1 where a request of the run met the objectives of a goodput metric, else 0: shape (N,)."""
        key = (run, column)
        if key not in self._met:
            found, slo = self._columns[run], self._slo
            times = (found.ok, found.ttft_s, found.tpot_s, found.e2e_s)
            if column == "goodput":
                good = meets_fixed(slo, *times)
            else:
                new = slo.tokens is SloTokens.NEW
                tokens = self._requests.added_tokens if new else self._requests.input_tokens
                good = meets_scaled(slo, *times, tokens)
            self._met[key] = good.astype(np.float64)
        return self._met[key]

    def _time(self, metric: Metric, runs: Sequence[int], kept: BoolArray) -> Values:
        keep = self._ok_in_all(runs, kept)
        for run in runs:
            keep = keep & np.isfinite(getattr(self._columns[run], metric.column))
        packed = np.packbits(keep).tobytes()
        points, resampled = [], []
        for run in runs:
            if metric.level is None:
                point, drawn = self._mean_of(run, metric.column, keep, packed)
            else:
                which = QUANTILES.index(metric.level)
                found, every = self._quantiles_of(run, metric.column, keep, packed)
                point, drawn = float(found[which]), every[:, which]
            points.append(point)
            resampled.append(drawn)
        note = self._value_note(metric, runs, keep, points)
        with np.errstate(divide="ignore", invalid="ignore"):
            return self._collect(np.log(np.array(points)), np.log(np.array(resampled)), keep, note)

    def _mean_of(self, run: int, column: str, keep: BoolArray, packed: bytes) -> tuple[float, FloatArray]:
        key = (run, column, packed)
        if key not in self._means:
            values = getattr(self._columns[run], column)
            point = float(np.mean(values[keep])) if keep.any() else np.nan
            with np.errstate(divide="ignore", invalid="ignore"):
                drawn = self._bootstrap.sums(values, keep) / self._bootstrap.sums(np.ones(keep.shape), keep)
            self._means[key] = (point, drawn)
        return self._means[key]

    def _quantiles_of(self, run: int, column: str, keep: BoolArray, packed: bytes) -> tuple[FloatArray, FloatArray]:
        key = (run, column, packed)
        if key not in self._quantiles:
            values, levels = getattr(self._columns[run], column), np.array(QUANTILES)
            points = np.quantile(values[keep], levels) if keep.any() else np.full(len(levels), np.nan)
            self._quantiles[key] = (points, self._bootstrap.quantiles(values, keep, levels))
        return self._quantiles[key]

    def _value_note(self, metric: Metric, runs: Sequence[int], keep: BoolArray, points: Sequence[float]) -> str:
        """The reason why there is no value or, of a quantile, too little beyond it; else empty."""
        count = int(keep.sum())
        if not count:
            return f"no {metric.counted.removesuffix('s')} has a value in every run"
        if metric.level is None:
            return ""
        beyond = round(count * (1 - metric.level), 6)
        if beyond < MIN_TAIL_REQUESTS:
            return f"only {beyond:g} of {count} {metric.counted} lie beyond it"
        sessions = min(
            self._bootstrap.sessions_in(keep & (getattr(self._columns[run], metric.column) > point))
            for run, point in zip(runs, points, strict=True)
        )
        # Equal values at the quantile leave nothing beyond it, and nothing to be unsure of.
        if 0 < sessions < MIN_TAIL_SESSIONS:
            return f"the requests beyond it come from only {counted(sessions, 'session')}"
        return ""

    def _ratio(self, metric: Metric, runs: Sequence[int], kept: BoolArray) -> Values:
        keep, note = kept, ""
        if metric.column == "apc":
            succeeded = keep = self._ok_in_all(runs, kept)
            for run in runs:
                found = self._columns[run]
                keep = keep & np.isfinite(found.cached_tokens) & np.isfinite(found.prompt_tokens)
            if not keep.any():
                note = (
                    "an engine did not report cached tokens" if succeeded.any() else "no request succeeded in every run"
                )
        packed = np.packbits(keep).tobytes()
        shares = [self._share_of(run, metric.column, keep, packed) for run in runs]
        points, resampled = np.array([point for point, _ in shares]), np.array([drawn for _, drawn in shares])
        return self._collect(points, resampled, keep, note)

    def _share_of(self, run: int, column: str, keep: BoolArray, packed: bytes) -> tuple[float, FloatArray]:
        key = (run, column, packed)
        if key not in self._shares:
            found = self._columns[run]
            if column == "apc":
                top, bottom = found.cached_tokens, found.prompt_tokens
            else:
                top = found.ok.astype(np.float64) if column == "success" else self.met(run, column)
                bottom = np.ones(keep.shape)
            with np.errstate(divide="ignore", invalid="ignore"):
                point = float(np.divide(top[keep].sum(), bottom[keep].sum()))
                drawn = self._bootstrap.sums(top, keep) / self._bootstrap.sums(bottom, keep)
            self._shares[key] = (point, drawn)
        return self._shares[key]

    def _ok_in_all(self, runs: Sequence[int], kept: BoolArray) -> BoolArray:
        return np.asarray(np.logical_and.reduce([kept, *(self._columns[run].ok for run in runs)]))

    def _collect(self, points: FloatArray, resampled: FloatArray, keep: BoolArray, note: str) -> Values:
        return Values(
            points=points,
            resampled=resampled,
            requests=int(keep.sum()),
            sessions=self._bootstrap.sessions_in(keep),
            effective_sessions=self._bootstrap.effective_sessions(keep),
            note=note,
        )
