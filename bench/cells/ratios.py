"""Ratios with their intervals: rounded, judged and shown in one way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replayer.compare.statistics.bootstrap import FloatArray

RESAMPLES = 1000
BEYOND = 1.03
"""Lower end of an interval from which a figure counts as worse."""

Interval = tuple[float, float, float]
"""A ratio, and the ends of its 95 % interval."""


def interval(ratio: float, resampled: FloatArray) -> Interval:
    """A ratio with the ends of its 95 % interval, from its value in every resample: shape (B,); NaN are left out."""
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return four_digits(ratio), four_digits(low), four_digits(high)


def four_digits(value: float | np.floating) -> float:
    """A kept figure, to four significant digits."""
    return float(f"{float(value):.4g}")


def with_interval(found: Interval) -> str:
    """A ratio with its interval, for a table."""
    return "{:.2f} ({:.2f}–{:.2f})".format(*found)


def geometric_mean(ratios: Sequence[float]) -> str:
    """Geometric mean of ratios, for a table."""
    return f"{float(np.exp(np.mean(np.log(ratios)))):.2f}"
