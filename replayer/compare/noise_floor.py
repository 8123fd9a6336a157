"""Noise between replicates: the variance between repeats, and the noise floor that follows from it.

The bootstrap over sessions shows how a result would vary with other sessions. It does not show how it varies when the
same configuration is run again: the clocks of the GPUs, other processes on the host, the order in which requests
happen to arrive move *all* sessions of a run together. That part is estimated from replicates: the repeats of each
arm, arms of equal configuration, and A/A runs given for this purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.special import ndtri

from replayer.compare.metrics import Metric, Values
from replayer.compare.statistics.bootstrap import FloatArray
from replayer.compare.statistics.tests import ALPHA, t_quantile

_NORMAL_SCORES = 200
_MANY = 1_000_000
MIN_BLOCK_FREEDOM = 4
"""Repeats are compared within themselves (as blocks) only when that leaves this many degrees of freedom."""


@dataclass(frozen=True, eq=False)
class RunNoise:
    """One metric's variance between replicates, on its working scale (`replayer.compare.metrics.Values`)."""

    variance: float
    """Of one run's value about the value of its arm; unbiased."""
    session_part: float
    """The part of it that the bootstrap over sessions covers already."""
    degrees_of_freedom: int
    residuals: FloatArray
    """Shape (runs,): each run's value less its arm's mean (and less its block's, where blocks are used)."""
    blocked: bool = False
    assumed: bool = False

    @property
    def excess(self) -> float:
        """Variance between runs that resampling sessions does not show; at least 0."""
        return max(0.0, self.variance - self.session_part)


@dataclass(frozen=True, slots=True)
class FloorRow:
    """One metric's noise floor, for the table. Relative figures are fractions of the metric's value."""

    metric: str
    runs: int
    groups: int
    degrees_of_freedom: int
    scatter: float
    """Standard deviation between replicates, relative."""
    largest: float
    """Largest difference seen between two replicates, relative."""
    two_runs: float
    """Two replicates differ by less than this in 95 of 100 cases: t(0.975) sqrt(2) x scatter."""


def between_runs(groups: Sequence[Values], *, blocks: bool) -> RunNoise | None:
    """The variance between runs, pooled over groups of replicates.

    Args:
        groups: one metric's values for each group, on the group's own requests.
        blocks: the groups are arms whose runs correspond one to one (the same repeat): what a whole repeat has in
            common is taken out (randomised block design).

    Returns:
        None when no group has two runs with a value.
    """
    known = [group for group in groups if len(group.points) > 1 and np.isfinite(group.points).all()]
    if not known:
        return None
    if blocks and len(known) == len(groups) and (freedom := block_freedom([len(g.points) for g in known])):
        points = _without_blocks(np.array([group.points for group in known]))
        drawn = _without_blocks(np.array([_finite(group.resampled) for group in known]))
    else:
        blocks, freedom = False, sum(len(group.points) - 1 for group in known)
        points = np.concatenate([group.points - group.points.mean() for group in known])
        drawn = np.concatenate([each - each.mean(axis=0) for each in (_finite(group.resampled) for group in known)])
    points, drawn = points.reshape(-1), drawn.reshape(-1, drawn.shape[-1])
    return RunNoise(
        variance=float(np.sum(points**2)) / freedom,
        session_part=float(np.sum(np.nanvar(drawn, axis=1))) / freedom,
        degrees_of_freedom=freedom,
        residuals=points,
        blocked=blocks,
    )


def assumed_noise(floor: float) -> RunNoise:
    """Normal noise with which two runs differ by less than ``floor`` (a fraction) in 95 of 100 cases."""
    sigma = np.log1p(floor) / (np.sqrt(2) * ndtri(1 - ALPHA / 2))
    scores = ndtri((np.arange(_NORMAL_SCORES) + 0.5) / _NORMAL_SCORES)
    return RunNoise(
        variance=float(sigma**2), session_part=0.0, degrees_of_freedom=_MANY, residuals=scores * sigma, assumed=True
    )


def block_freedom(repeats: Sequence[int]) -> int:
    """Degrees of freedom left to arms with these numbers of repeats when repeats are blocks; 0: too few or unequal."""
    if len(repeats) < 2 or len(set(repeats)) > 1:
        return 0
    freedom = (len(repeats) - 1) * (repeats[0] - 1)
    return freedom if freedom >= MIN_BLOCK_FREEDOM else 0


def _finite(resampled: FloatArray) -> FloatArray:
    """Values with infinite ones as NaN, which is left out: a quantile at a failed request has no variance."""
    return np.where(np.isfinite(resampled), resampled, np.nan)


def _without_blocks(values: FloatArray) -> FloatArray:
    """Residuals of arms x repeats (A, R, ...) after the means of both are taken out."""
    arms = values.mean(axis=1, keepdims=True)
    repeats = values.mean(axis=0, keepdims=True)
    return np.asarray(values - arms - repeats + values.mean(axis=(0, 1), keepdims=True))


def floor_row(metric: Metric, groups: Sequence[Values]) -> FloorRow | None:
    """One metric's row in the table of the noise floor; None when no group has two runs with a value."""
    noise = between_runs(groups, blocks=False)
    if noise is None:
        return None
    known = [group.points for group in groups if len(group.points) > 1 and np.isfinite(group.points).all()]
    middle = float(np.mean(np.concatenate(known)))
    scatter = float(np.sqrt(noise.variance))
    apart = max(abs(a - b) for points in known for a, b in combinations(points, 2))
    reach = t_quantile(1 - ALPHA / 2, noise.degrees_of_freedom) * np.sqrt(2) * scatter
    as_share = np.expm1 if metric.logarithmic else (lambda value: value / middle if middle else np.nan)
    return FloorRow(
        metric=metric.name,
        runs=sum(len(points) for points in known),
        groups=len(known),
        degrees_of_freedom=noise.degrees_of_freedom,
        scatter=float(as_share(scatter)),
        largest=float(as_share(apart)),
        two_runs=float(as_share(reach)),
    )


def design_floor(noise: RunNoise, baseline_runs: int, candidate_runs: int) -> float:
    """Arms of these many replicates differ by less than this in 95 of 100 cases (working scale)."""
    spread = np.sqrt(noise.variance * (1 / baseline_runs + 1 / candidate_runs))
    return t_quantile(1 - ALPHA / 2, noise.degrees_of_freedom) * float(spread)
