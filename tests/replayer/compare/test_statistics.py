"""Bootstrap over sessions and Holm's correction against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.compare.statistics.bootstrap import SessionBootstrap
from replayer.compare.statistics.tests import holm


@given(
    sessions=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    seed=st.integers(0, 1000),
    level=st.floats(0, 1),
)
def test_quantiles_equal_numpys_on_the_drawn_requests(sessions: list[int], seed: int, level: float) -> None:
    session_of = np.array(sessions)
    generator = np.random.default_rng(seed)
    values = generator.exponential(size=len(sessions)).round(1)
    keep = generator.random(len(sessions)) < 0.8
    bootstrap = SessionBootstrap(session_of, 6, resamples=7, seed=seed)
    found = bootstrap.quantiles(values, keep, np.array([level]))
    totals = bootstrap.sums(values, keep)
    for row in range(7):
        drawn = np.repeat(values[keep], bootstrap.counts[row][session_of[keep]].astype(int))
        assert totals[row] == pytest.approx(drawn.sum())
        if drawn.size:
            assert found[row, 0] == pytest.approx(np.quantile(drawn, level))
        else:
            assert np.isnan(found[row, 0])


def test_every_resample_draws_as_many_sessions_as_there_are() -> None:
    bootstrap = SessionBootstrap(np.arange(9), 9, resamples=50, seed=3)
    assert (bootstrap.counts.sum(axis=1) == 9).all()
    assert len(np.unique(bootstrap.counts, axis=0)) > 40
    again = SessionBootstrap(np.arange(9), 9, resamples=50, seed=3)
    assert (again.counts == bootstrap.counts).all()


def test_holm_by_hand() -> None:
    adjusted = holm(np.array([0.01, 0.04, 0.03, np.nan, 0.005]))
    assert adjusted[[0, 1, 2, 4]] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert np.isnan(adjusted[3])


def test_holm_never_lowers_a_p_value_and_stays_below_one() -> None:
    p_values = np.random.default_rng(0).random(20)
    adjusted = holm(p_values)
    assert (adjusted >= p_values).all()
    assert (adjusted <= 1).all()
