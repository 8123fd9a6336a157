"""Bootstrap over sessions and Holm's correction against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.statistics import SessionBootstrap, Verdict, effect_of, holm


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
        drawn = np.repeat(values[keep], bootstrap.counts[row][session_of[keep]])
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


@pytest.mark.parametrize(
    ("points", "sessions", "reason"),
    [((1.0, 2.0), 9, "only 9 sessions"), ((0.0, 2.0), 50, "zero or unknown"), ((float("nan"), 1.0), 50, "unknown")],
)
def test_too_little_is_not_judged(points: tuple[float, float], sessions: int, reason: str) -> None:
    flat = np.ones(100)
    effect = effect_of("x", points, (flat, flat * 2), requests=100, sessions=sessions)
    assert effect.verdict is Verdict.NOT_JUDGED
    assert reason in effect.note
    assert np.isnan(effect.p_value)


def test_interval_counts_sessions_not_requests() -> None:
    """Fifty equal requests in each of 12 sessions say no more than one: the interval must not shrink with them."""
    generator = np.random.default_rng(5)
    before, after = generator.exponential(size=12), generator.exponential(size=12)

    def width(copies: int) -> float:
        session_of = np.repeat(np.arange(12), copies)
        bootstrap = SessionBootstrap(session_of, 12, resamples=500, seed=0)
        keep = np.ones(len(session_of), dtype=bool)
        sides = (np.repeat(before, copies), np.repeat(after, copies))
        resampled = [bootstrap.sums(side, keep) for side in sides]
        effect = effect_of(
            "x", (before.sum(), after.sum()), (resampled[0], resampled[1]), requests=len(keep), sessions=12
        )
        return effect.high - effect.low

    assert width(50) == pytest.approx(width(1))
