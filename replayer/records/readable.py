"""Numbers for reading, units included."""

from __future__ import annotations

import numpy as np

DASH = "–"
"""What cannot be told."""


def format_seconds(value: float | None) -> str:
    """Seconds for reading: milliseconds below a tenth, a dash when unknown."""
    if value is None or not np.isfinite(value):
        return DASH
    return f"{value * 1000:.1f} ms" if abs(value) < 0.1 else f"{value:.3f} s"


def format_percent(value: float | None, digits: int = 1) -> str:
    """A ratio as a percentage, a dash when unknown."""
    return DASH if value is None or not np.isfinite(value) else f"{value * 100:.{digits}f} %"


def format_change(value: float | None, digits: int = 1) -> str:
    """A relative change as a percentage with its sign, a dash when unknown."""
    return DASH if value is None or not np.isfinite(value) else f"{value * 100:+.{digits}f} %"


def format_number(value: float | None, digits: int = 0) -> str:
    """A number with separators, a dash when unknown."""
    return DASH if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"
