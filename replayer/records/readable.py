"""Numbers formatted for readers, with units."""

from __future__ import annotations

import numpy as np

DASH = "–"
"""Stands for an unknown value."""
MOST_POINTS = 99_999
"""Changes above it, in percent, are printed alike: the end of an interval that two runs far apart leave open."""


def format_seconds(value: float | None) -> str:
    """Seconds as text: milliseconds below a tenth, a dash when unknown."""
    if value is None or not np.isfinite(value):
        return DASH
    return f"{value * 1000:.1f} ms" if abs(value) < 0.1 else f"{value:.3f} s"


def format_percent(value: float | None, digits: int = 1) -> str:
    """A ratio as a percentage, a dash when unknown."""
    return DASH if value is None or not np.isfinite(value) else f"{value * 100:.{digits}f} %"


def format_factor(value: float | None) -> str:
    """A factor with two digits, a dash when unknown."""
    return DASH if value is None or not np.isfinite(value) else f"{value:,.2f}×"


def format_change(value: float | None, digits: int = 1) -> str:
    """A relative change as a percentage with its sign, a dash when unknown."""
    return DASH if value is None or not np.isfinite(value) else f"{value * 100:+.{digits}f} %"


def format_points(value: float | None, *, signed: bool = True) -> str:
    """A relative change in percent without the unit, in two digits below 10 and whole numbers above; a dash if unknown.

    Args:
        value: a fraction, 0.123 for 12 %.
        signed: print the sign of a rise too.
    """
    if value is None or not np.isfinite(value):
        return DASH
    if value * 100 > MOST_POINTS:
        return f"> {MOST_POINTS:,}"
    points = round(value * 100, 1) + 0.0  # no "-0.0"
    digits = 1 if abs(points) < 9.95 else 0
    return f"{points:{'+' if signed and points else ''},.{digits}f}"


def format_number(value: float | None, digits: int = 0) -> str:
    """A number with separators, a dash when unknown."""
    return DASH if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"
