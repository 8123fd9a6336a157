"""For how long sessions are kept: learned from the gaps between turns."""

from __future__ import annotations

import random

import pytest

from policies.admission.return_gaps import BUCKETS, LEAST_RETURNS, ReturnGaps


def test_the_longest_time_holds_until_enough_have_returned() -> None:
    gaps = ReturnGaps(32.0)
    for _ in range(LEAST_RETURNS - 1):
        gaps.add(1.5, 25)
    assert gaps.keep_s == 32.0
    gaps.add(1.5, 25)
    assert gaps.keep_s == 3.0


@pytest.mark.parametrize("seed", range(5))
def test_nearly_all_returns_come_while_a_session_is_kept(seed: int) -> None:
    chance, gaps = random.Random(seed), ReturnGaps(30.0)
    seen = [chance.expovariate(0.3) for _ in range(2_000)]
    for each in seen:
        gaps.add(each, 2_000)
    within = [each for each in seen if each < 30.0]
    covered = sum(each < gaps.keep_s for each in within) / len(within)
    assert 0.95 <= covered < 0.99


def test_gaps_beyond_the_longest_and_clocks_that_step_back_count_nothing() -> None:
    gaps = ReturnGaps(10.0)
    for _ in range(100):
        gaps.add(1.0, 25)
    learned = gaps.keep_s
    for gap_s in [10.0, 1e9, -1.0] * 100:
        gaps.add(gap_s, 25)
    assert gaps.keep_s == learned
    nothing = ReturnGaps(0.0)
    nothing.add(0.0, 25)
    assert nothing.keep_s == 0.0


def test_weights_stay_finite_over_millions_of_returns() -> None:
    gaps = ReturnGaps(float(BUCKETS))
    for number in range(5_000):
        gaps.add(20.5 if number < 2_500 else 2.5, 1)
    assert gaps.keep_s == 4.0
