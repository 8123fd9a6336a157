"""Sums over a sliding window, and states that are entered and left with a delay."""

from __future__ import annotations

import pytest

from policies.meters.latch import Latch
from policies.meters.window import SlidingSums


def test_sums_are_of_the_window_only() -> None:
    sums = SlidingSums(2, window_s=10.0)
    assert sums.totals(0.0) == (0.0, 0.0)
    sums.add((1, 10), 0.5)
    sums.add((2, 20), 0.9)
    sums.add((4, 40), 5.0)
    assert sums.totals(9.9) == (7, 70)
    assert sums.totals(10.0) == (4, 40)
    assert sums.totals(14.9) == (4, 40)
    assert sums.totals(15.0) == (0.0, 0.0)
    assert sums.since_start() == (7, 70)
    sums.add((8, 80), 15.0)
    assert sums.totals(15.5) == (8, 80)
    assert sums.since_start() == (15, 150)


def test_cleared_sums_are_zero() -> None:
    sums = SlidingSums(1, window_s=1.0)
    sums.add((3,), 0.0)
    sums.clear()
    assert sums.totals(0.0) == (0.0,)


def test_a_window_without_length_is_refused() -> None:
    with pytest.raises(ValueError, match="window_s must be positive"):
        SlidingSums(1, 0.0)


def states(observed: dict[float, bool]) -> list[float]:
    """Times at which the state is on; 2 s to raise it, 3 s to clear it."""
    latch = Latch()
    return [now_s for now_s, bad in observed.items() if latch.update(bad, now_s, 2.0, 3.0)]


def test_a_fault_must_last_to_be_raised_and_be_gone_for_some_time_to_be_cleared() -> None:
    lasting = {float(second): 2 <= second < 6 for second in range(12)}
    assert states(lasting) == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_interruptions_begin_the_delay_again() -> None:
    flapping = {float(second): second % 2 == 0 for second in range(12)}
    assert states(flapping) == []
    dips = {float(second): second != 4 for second in range(8)}
    assert states(dips) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
