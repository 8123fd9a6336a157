"""Numbers for readers."""

from __future__ import annotations

import pytest

from replayer.records.readable import format_points


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0"), (-0.031, "-3.1"), (0.123, "+12"), (999.9, "+99,990"), (1.6e6, "> 99,999"), (float("inf"), "–")],
)
def test_a_change_has_two_digits_and_an_end_that_is_left_open_is_no_figure(value: float, text: str) -> None:
    assert format_points(value) == text
