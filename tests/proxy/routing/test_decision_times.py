"""Slow decisions within five minutes: a finding by their number and their share."""

from __future__ import annotations

import pytest

from proxy.routing.policy_watch import MIN_SLOW, RECENT_S, DecisionTimes


def times(decided: int, slow: int) -> DecisionTimes:
    made = DecisionTimes()
    made.decided.add(0.0, decided)
    made.slow.add(0.0, slow)
    return made


@pytest.mark.parametrize(
    ("decided", "slow", "found"),
    [(1, 1, False), (4, 4, False), (5, 5, True), (500, 5, True), (501, 5, False), (10_000, 99, False), (0, 0, False)],
)
def test_slow_decisions_are_a_finding_by_number_and_share(decided: int, slow: int, found: bool) -> None:
    assert times(decided, slow).too_slow(1.0) is found


def test_slow_decisions_are_forgotten_after_the_window() -> None:
    made = times(MIN_SLOW, MIN_SLOW)
    assert made.lately(1.0) == (MIN_SLOW, MIN_SLOW)
    assert made.lately(RECENT_S + 1.0) == (0, 0)
