"""The learned correction of a formula: converges, relaxes, and is robust against one stall."""

from __future__ import annotations

from math import exp, isfinite, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.costs.estimates import PRIOR_SIGMA, UNKNOWN, LearnedRatio

ratios = st.floats(0.03, 30.0)
seconds = st.floats(1e-3, 1e3)
weights = st.floats(0.05, 0.5)


def learned(observed: list[float], weight: float = 0.25, expected_s: float = 1.0) -> LearnedRatio:
    """The ratio after these observations, in order."""
    estimate = UNKNOWN
    for ratio in observed:
        estimate = estimate.learn(expected_s, expected_s * ratio, 0.0, weight)
    return estimate


@given(ratio=ratios, expected_s=seconds, weight=weights)
def test_it_converges_to_the_true_ratio_and_becomes_sure_of_it(ratio: float, expected_s: float, weight: float) -> None:
    estimate = learned([ratio] * 400, weight, expected_s)
    assert exp(estimate.log_ratio) == pytest.approx(ratio, rel=0.01)
    assert estimate.sigma < 0.05
    assert estimate.observations == 400


@given(ratio=st.floats(0.1, 10.0), spread=st.floats(1.0, 3.0))
def test_what_alternates_is_met_in_the_middle_with_its_spread_as_uncertainty(ratio: float, spread: float) -> None:
    estimate = learned([ratio * spread, ratio / spread] * 200, 0.05)
    assert estimate.log_ratio == pytest.approx(log(ratio), abs=0.06 * log(spread) + 1e-3)
    assert estimate.sigma == pytest.approx(log(spread), rel=0.1, abs=0.02)


def test_the_first_observations_count_as_a_plain_mean_with_the_prior_as_one_of_them() -> None:
    assert [learned([4.0] * n, 0.1).log_ratio / log(4.0) for n in range(1, 5)] == pytest.approx(
        [1 / 2, 2 / 3, 3 / 4, 4 / 5]
    )


@given(stall=st.floats(50.0, 1e9), before=st.lists(ratios, max_size=5))
def test_one_stall_counts_as_a_factor_of_fifty_at_most(stall: float, before: list[float]) -> None:
    assert learned([*before, stall]) == learned([*before, 50.0])
    assert learned([*before, 1 / stall]) == learned([*before, 1 / 50.0])


@given(st.lists(st.tuples(seconds, seconds, weights), max_size=50))
def test_the_variance_is_never_negative_and_everything_stays_finite(seen: list[tuple[float, float, float]]) -> None:
    estimate = UNKNOWN
    for expected_s, actual_s, weight in seen:
        estimate = estimate.learn(expected_s, actual_s, 0.0, weight)
        assert estimate.variance >= 0
        assert isfinite(estimate.log_ratio)
        assert isfinite(estimate.sigma)


@pytest.mark.parametrize(("expected_s", "actual_s"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, float("inf"))])
def test_times_that_make_no_sense_teach_nothing(expected_s: float, actual_s: float) -> None:
    known = learned([2.0])
    assert known.learn(expected_s, actual_s, 9.0, 0.25) == known
    assert known.learn(1.0, float("nan"), 9.0, 0.25) == known


@given(ratio=ratios, towards=ratios, half_lives=st.integers(0, 6), half_life_s=st.floats(1.0, 1e4))
def test_it_returns_by_half_every_half_life(ratio: float, towards: float, half_lives: int, half_life_s: float) -> None:
    known, target = learned([ratio] * 20), learned([towards] * 3)
    relaxed = known.relaxed(target, half_lives * half_life_s, half_life_s)
    kept = 0.5**half_lives
    assert relaxed.log_ratio - target.log_ratio == pytest.approx(kept * (known.log_ratio - target.log_ratio), abs=1e-9)
    assert relaxed.variance - target.variance == pytest.approx(kept * (known.variance - target.variance), abs=1e-9)


def test_uncertainty_grows_back_in_silence_and_never_beyond_the_prior() -> None:
    known = learned([3.0] * 50)
    sigmas = [known.relaxed(UNKNOWN, age_s, 120.0).sigma for age_s in (0.0, 60.0, 120.0, 600.0, 1e9)]
    assert sigmas == sorted(sigmas)
    assert [sigmas[0], sigmas[-1]] == pytest.approx([known.sigma, PRIOR_SIGMA], rel=1e-6)


def test_what_was_never_observed_is_what_it_would_relax_to_and_a_clock_that_steps_back_does_nothing() -> None:
    target = learned([5.0])
    assert UNKNOWN.relaxed(target, 0.0, 120.0) == target
    known = UNKNOWN.learn(1.0, 3.0, 100.0, 0.25)
    assert known.relaxed(UNKNOWN, 50.0, 120.0) == known
