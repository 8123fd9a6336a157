"""The smallest effect a design could have seen, from its own standard error and its correction."""

from __future__ import annotations

import numpy as np
from scipy.special import nctdtr, nctdtrinc, stdtr

from replayer.compare.statistics.tests import ALPHA, t_quantile

POWER = 0.8
"""Probability of finding the effect that `smallest_detectable` gives."""
_NORMAL_FROM = 500
"""From so many degrees of freedom on, Student's t is the normal distribution for this purpose."""


def smallest_detectable(
    standard_error: float, degrees_of_freedom: float, *, tests: int, floor: float = 0.0, power: float = POWER
) -> float:
    """The difference that is found with the given probability, on the scale of the standard error.

    The larger of two: ``SE x delta``, where delta is the non-centrality of Student's t that exceeds the critical value
    t(1 - alpha / 2m) with that probability, and ``floor + SE x t(power)``. For many degrees of freedom the first is the
    usual (z(1 - alpha / 2m) + z(power)) SE (Bloom, "Minimum detectable effects", Evaluation Review 1995). Alpha is
    divided by the m tests of the family, which is Holm's first step and his hardest: where several metrics change,
    the later ones are found somewhat more often than this says.

    Args:
        standard_error: of the difference.
        degrees_of_freedom: of the standard error.
        tests: m, how many tests the correction is over.
        floor: differences below it are never called one.
        power: probability of finding it.
    """
    if not np.isfinite(standard_error) or tests < 1:
        return float("nan")
    critical = t_quantile(1 - ALPHA / (2 * tests), degrees_of_freedom)
    if degrees_of_freedom < _NORMAL_FROM:
        delta = float(nctdtrinc(degrees_of_freedom, 1 - power, critical))
    else:
        delta = critical + t_quantile(power, degrees_of_freedom)
    return max(delta * standard_error, floor + t_quantile(power, degrees_of_freedom) * standard_error)


def probability_found(
    difference: float, standard_error: float, degrees_of_freedom: float, *, tests: int, floor: float = 0.0
) -> float:
    """The probability that a true difference is called one, with its sign; the inverse of `smallest_detectable`.

    Args:
        difference: the true one, on the scale of the standard error.
        standard_error: above 0.
        degrees_of_freedom: of the standard error.
        tests: how many tests the correction is over.
        floor: differences below it are never called one.
    """
    critical = t_quantile(1 - ALPHA / (2 * tests), degrees_of_freedom)
    size = abs(difference) / standard_error
    freedom = min(degrees_of_freedom, float(_NORMAL_FROM))
    passes = 1 - float(nctdtr(freedom, size, critical))
    above = float(stdtr(freedom, size - floor / standard_error)) if floor > 0 else 1.0
    return min(passes, above)
