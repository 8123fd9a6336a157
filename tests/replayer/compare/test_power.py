"""Smallest detectable effect and probability of finding one, against simulation and each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.compare.statistics.power import POWER, probability_found, smallest_detectable
from replayer.compare.statistics.tests import ALPHA, satterthwaite, t_quantile, two_sided_p


@pytest.mark.parametrize("freedom", [3, 8, 60, 10_000])
def test_a_t_test_finds_the_smallest_detectable_difference_in_four_of_five(freedom: int) -> None:
    tests, draws = 9, 40_000
    delta = smallest_detectable(1.0, freedom, tests=tests)
    draw = np.random.default_rng(freedom)
    estimates = draw.normal(delta, 1.0, draws)
    errors = np.sqrt(draw.chisquare(freedom, draws) / freedom)
    found = np.mean(estimates / errors > t_quantile(1 - ALPHA / (2 * tests), freedom))
    assert found == pytest.approx(POWER, abs=0.012)


@given(
    error=st.floats(0.001, 10),
    freedom=st.floats(2, 1e5),
    tests=st.integers(1, 60),
)
def test_the_two_are_inverse_without_a_floor(error: float, freedom: float, tests: int) -> None:
    delta = smallest_detectable(error, freedom, tests=tests)
    assert probability_found(delta, error, freedom, tests=tests) == pytest.approx(POWER, abs=0.02)
    assert probability_found(-delta, error, freedom, tests=tests) == pytest.approx(POWER, abs=0.02)


def test_a_floor_and_more_tests_ask_for_larger_effects() -> None:
    alone = smallest_detectable(0.01, 30, tests=1)
    assert smallest_detectable(0.01, 30, tests=10) > alone
    assert smallest_detectable(0.01, 30, tests=1, floor=0.2) > 0.2 > alone
    assert smallest_detectable(0.01, 30, tests=1, floor=0.001) == alone
    assert probability_found(0.2, 0.01, 30, tests=1, floor=0.2) == pytest.approx(0.5)
    assert np.isnan(smallest_detectable(float("nan"), 3, tests=4))
    assert np.isnan(smallest_detectable(1.0, 3, tests=0))


def test_a_difference_without_scatter_is_certain_and_none_never_is() -> None:
    assert two_sided_p(0.0, 0.0, 5) == 1.0
    assert two_sided_p(0.1, 0.0, 5) == 0.0
    assert two_sided_p(-2.0, 1.0, 1e9) == pytest.approx(0.0455, abs=1e-4)


def test_satterthwaite_by_hand() -> None:
    assert satterthwaite([(1.0, 4.0), (1.0, 4.0)]) == pytest.approx(8.0)
    assert satterthwaite([(3.0, 7.0), (0.0, 2.0)]) == pytest.approx(7.0)
    assert satterthwaite([(0.0, 9.0), (0.0, 2.0)]) == 2.0
