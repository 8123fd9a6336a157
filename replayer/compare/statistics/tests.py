"""Tests of one metric: Student's t on a bootstrap standard error, Holm's correction, the possible verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from replayer.compare.statistics.bootstrap import FloatArray

__all__ = ["ALPHA", "Effect", "FloatArray", "Verdict", "holm", "satterthwaite", "t_quantile", "two_sided_p"]

ALPHA = 0.05
"""Family-wise error rate of a verdict, and one minus the level of every interval."""
_LARGE_DF = 1e6


class Verdict(StrEnum):
    """Verdict on one metric."""

    BETTER = "better"
    WORSE = "worse"
    NOT_DISTINGUISHABLE = "not distinguishable"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Effect:
    """Change of one metric from the baseline to the candidate, on the same requests.

    Relative figures (``change``, ``low``, ``high``, ``noise_floor``, ``smallest_detectable``) are fractions of the
    baseline's value.
    """

    metric: str
    baseline: float
    candidate: float
    change: float
    """(candidate - baseline) / baseline."""
    low: float
    high: float
    """95 % interval of ``change``, not corrected for the number of tests."""
    p_value: float
    p_adjusted: float
    verdict: Verdict
    requests: int
    """Values behind the metric in each run: requests, or sessions for a metric of sessions."""
    sessions: int
    lower_is_better: bool = True
    unit: str = "s"
    """"s", "factor" or "ratio"."""
    note: str = ""
    """Reason why the metric is not judged; empty otherwise."""
    standard_error: float = np.nan
    """Of the difference of logarithms for times, of the plain difference for ratios."""
    degrees_of_freedom: float = np.nan
    noise_floor: float = np.nan
    """Smaller changes are never called a difference; NaN where nothing is known or assumed of run-to-run noise."""
    below_floor: bool = False
    """The change passes the test but is smaller than the noise floor."""
    smallest_detectable: float = np.nan
    """The change that this design finds with 80 % probability (`replayer.compare.statistics.power`)."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON; what cannot be computed is null."""
        return {
            name: (None if isinstance(value, float) and not np.isfinite(value) else value)
            for name, value in ((name, getattr(self, name)) for name in self.__slots__)
        }


def two_sided_p(difference: float, standard_error: float, degrees_of_freedom: float) -> float:
    """p-value of a difference under Student's t; a difference without any scatter is certain, no difference never is.

    Args:
        difference: the estimate.
        standard_error: of the estimate, at least 0.
        degrees_of_freedom: above 0.
    """
    if abs(difference) < 1e-12:
        return 1.0
    if standard_error <= 0:
        return 0.0
    return float(min(1.0, 2 * stdtr(min(degrees_of_freedom, _LARGE_DF), -abs(difference) / standard_error)))


def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Quantile of Student's t."""
    return float(stdtrit(min(degrees_of_freedom, _LARGE_DF), probability))


def satterthwaite(parts: list[tuple[float, float]]) -> float:
    """Degrees of freedom of a sum of independent variance estimates (Satterthwaite 1946).

    Args:
        parts: (variance, its degrees of freedom) of each; at least one variance above 0, else the smallest is taken.
    """
    total = sum(variance for variance, _ in parts)
    spread = sum(variance**2 / freedom for variance, freedom in parts if variance > 0)
    return total**2 / spread if spread > 0 else min(freedom for _, freedom in parts)


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
