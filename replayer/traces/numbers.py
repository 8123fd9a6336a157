"""Checks of numbers that users give. They compare with what is valid, since NaN passes a test for what is not."""

from __future__ import annotations

import math


def is_positive(*values: float) -> bool:
    """True if all values are finite and above 0."""
    return all(0 < value < math.inf for value in values)


def is_not_negative(*values: float) -> bool:
    """True if all values are finite and at least 0."""
    return all(0 <= value < math.inf for value in values)


def finite(value: float | None) -> float | None:
    """Callback of an option: a finite number, or none.

    Raises:
        BadParameter: NaN or infinity, which the option's own range lets through.
    """
    import typer

    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value
