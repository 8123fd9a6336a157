"""Bootstrap over sessions, Holm's correction, and one metric's effect between two arms.

Requests of one session share their history and their instance, so they are not independent; whole sessions are drawn
with replacement instead (cluster bootstrap: Davison & Hinkley, "Bootstrap Methods and their Application", 1997, ch. 3).
Both arms are evaluated on the *same* drawn sessions, which makes the comparison paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

ALPHA = 0.05
"""Family-wise error rate of a verdict, and one minus the level of every interval."""
MIN_SESSIONS = 10
"""Below this many sessions a cluster bootstrap's intervals are far too narrow; nothing is judged."""
MIN_TAIL_REQUESTS = 5
"""A quantile is judged only when at least this many paired requests lie beyond it."""
_CHUNK_CELLS = 4_000_000


class SessionBootstrap:
    """Seeded resamples of sessions, shared by every metric of a comparison.

    Args:
        session_of: shape (N,), session number 0..sessions-1 of each paired request.
        sessions: number of distinct sessions.
        resamples: number of resamples B.
        seed: seed of the draws; the same seed gives the same resamples.
    """

    def __init__(self, session_of: IntArray, sessions: int, *, resamples: int = 2000, seed: int = 0) -> None:
        if sessions < 1 or resamples < 1:
            raise ValueError("a bootstrap needs at least one session and one resample")
        self.session_of = session_of
        self.sessions = sessions
        self.resamples = resamples
        generator = np.random.default_rng(seed)
        self.counts: NDArray[np.int32] = np.empty((resamples, sessions), dtype=np.int32)
        step = max(1, _CHUNK_CELLS // sessions)
        for start in range(0, resamples, step):
            rows = min(step, resamples - start)
            drawn = generator.integers(sessions, size=(rows, sessions)) + np.arange(rows)[:, None] * sessions
            flat = np.bincount(drawn.ravel(), minlength=rows * sessions)
            self.counts[start : start + rows] = flat.reshape(rows, sessions)

    def quantiles(self, values: FloatArray, keep: NDArray[np.bool_], quantiles: FloatArray) -> FloatArray:
        """Quantiles of the kept values in every resample, equal to ``numpy.quantile`` (linear) of the drawn requests.

        Args:
            values: shape (N,).
            keep: shape (N,), which requests count.
            quantiles: shape (Q,), each 0..1.

        Returns:
            Shape (B, Q); NaN where a resample drew no kept request.
        """
        kept_values, kept_sessions = values[keep], self.session_of[keep]
        result = np.full((self.resamples, len(quantiles)), np.nan)
        if kept_values.size == 0:
            return result
        order = np.argsort(kept_values, kind="stable")
        ordered, sessions = kept_values[order], kept_sessions[order]
        step = max(1, _CHUNK_CELLS // ordered.size)
        for start in range(0, self.resamples, step):
            cumulative = np.cumsum(self.counts[start : start + step][:, sessions], axis=1, dtype=np.int64)
            result[start : start + step] = _weighted_quantiles(ordered, cumulative, quantiles)
        return result

    def sums(self, values: FloatArray, keep: NDArray[np.bool_]) -> FloatArray:
        """Sum of the kept values in every resample: shape (B,)."""
        per_session = np.bincount(self.session_of[keep], weights=values[keep], minlength=self.sessions)
        return np.asarray(self.counts @ per_session, dtype=np.float64)


def _weighted_quantiles(ordered: FloatArray, cumulative: IntArray, quantiles: FloatArray) -> FloatArray:
    """Quantiles of sorted values (N,) whose multiplicities have the cumulative sums (rows, N): shape (rows, Q)."""
    rows, size = cumulative.shape
    totals = cumulative[:, -1]
    # One sorted array for all rows: each row is lifted above the one before it, so a single search serves them all.
    lift = np.arange(rows, dtype=np.int64) * (int(totals.max()) + 1)
    flat = (cumulative + lift[:, None]).ravel()
    base = np.arange(rows, dtype=np.int64) * size
    result = np.full((rows, len(quantiles)), np.nan)
    drawn = totals > 0
    for column, quantile in enumerate(quantiles):
        position = np.maximum(totals - 1, 0) * quantile
        lower = np.floor(position).astype(np.int64)
        upper = np.minimum(lower + 1, np.maximum(totals - 1, 0))
        at_lower = ordered[np.minimum(np.searchsorted(flat, lower + lift, side="right") - base, size - 1)]
        at_upper = ordered[np.minimum(np.searchsorted(flat, upper + lift, side="right") - base, size - 1)]
        mixed = at_lower + (position - lower) * (at_upper - at_lower)
        result[drawn, column] = mixed[drawn]
    return result


def holm(p_values: FloatArray) -> FloatArray:
    """Holm's step-down adjusted p-values (Holm 1979), NaN left out and kept: shape (M,) in, shape (M,) out."""
    adjusted = np.full(p_values.shape, np.nan)
    known = np.flatnonzero(np.isfinite(p_values))
    order = known[np.argsort(p_values[known], kind="stable")]
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * float(p_values[index])))
        adjusted[index] = running
    return adjusted


class Verdict(StrEnum):
    """What may be said of one metric."""

    BETTER = "better"
    WORSE = "worse"
    NOT_DISTINGUISHABLE = "not distinguishable"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Effect:
    """Change of one metric from the baseline to the candidate, on the same requests."""

    metric: str
    baseline: float
    candidate: float
    change: float
    """(candidate - baseline) / baseline."""
    low: float
    high: float
    """95 % interval of ``change`` (percentile bootstrap over sessions, not corrected for the number of metrics)."""
    p_value: float
    p_adjusted: float
    verdict: Verdict
    requests: int
    sessions: int
    lower_is_better: bool = True
    unit: str = "s"
    note: str = ""
    """Why the metric is not judged; empty otherwise."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON; what cannot be computed is null."""
        return {
            name: (None if isinstance(value, float) and not np.isfinite(value) else value)
            for name, value in ((name, getattr(self, name)) for name in self.__slots__)
        }


def effect_of(
    metric: str,
    points: tuple[float, float],
    resampled: tuple[FloatArray, FloatArray],
    *,
    requests: int,
    sessions: int,
    lower_is_better: bool = True,
    unit: str = "s",
    note: str = "",
) -> Effect:
    """Interval and two-sided bootstrap p-value of a relative change, before correction.

    Args:
        metric: its name.
        points: (baseline, candidate) computed on the requests themselves.
        resampled: the same two statistics in each resample, shape (B,) each.
        requests: paired requests behind the figure.
        sessions: sessions behind the figure.
        lower_is_better: True for times.
        unit: of the two values: "s" or "ratio".
        note: a reason not to judge the metric although its values are shown.
    """
    before, after = points
    change = (after - before) / before if before > 0 else np.nan
    low = high = p_value = np.nan
    if not note and sessions < MIN_SESSIONS:
        note = f"only {sessions} sessions; at least {MIN_SESSIONS} are needed"
    if not note and not np.isfinite(change):
        note = "the baseline's value is zero or unknown"
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = (resampled[1] - resampled[0]) / resampled[0]
    changes = changes[np.isfinite(changes)]
    if not note and changes.size < 0.9 * resampled[0].size:
        note = "too few requests: many resamples hold none"
    if not note:
        low, high = (float(bound) for bound in np.quantile(changes, [ALPHA / 2, 1 - ALPHA / 2]))
        tail = min(int(np.count_nonzero(changes <= 0)), int(np.count_nonzero(changes >= 0)))
        p_value = min(1.0, 2 * (tail + 1) / (changes.size + 1))
    return Effect(
        metric=metric,
        baseline=before,
        candidate=after,
        change=float(change),
        low=low,
        high=high,
        p_value=p_value,
        p_adjusted=np.nan,
        verdict=Verdict.NOT_JUDGED if note else Verdict.NOT_DISTINGUISHABLE,
        requests=requests,
        sessions=sessions,
        lower_is_better=lower_is_better,
        unit=unit,
        note=note,
    )
