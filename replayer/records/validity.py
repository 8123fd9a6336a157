"""Warnings of an experiment that call a run's figures invalid."""

from __future__ import annotations

INVALID_FIGURES = "these figures are invalid"
"""Part of every such warning: written by the launcher, found by comparisons, in records of any age."""


def calls_invalid(warning: str) -> bool:
    """True for a warning that calls the figures of its run invalid."""
    return INVALID_FIGURES in warning
