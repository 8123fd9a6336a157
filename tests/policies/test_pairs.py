"""The breaker of (P, D) pairs: opens after consecutive failures, closes by time, opens again on a single failure."""

from __future__ import annotations

import pytest

from policies.pairs import PairBreaker
from policies.state import FleetState
from policies.types import Role
from tests.policies.builders import ask

PAIR = ("p", "d")


def test_it_opens_after_consecutive_failures_and_a_success_resets_the_count() -> None:
    breaker = PairBreaker(failures=3, cooldown_s=30.0)
    for ok in (False, False, True, False, False):
        breaker.record(PAIR, ok, 0.0)
    assert breaker.broken(0.0) == frozenset()
    breaker.record(PAIR, False, 0.0)
    assert breaker.broken(29.9) == {PAIR}


def test_it_closes_by_itself_and_one_more_failure_opens_it_again() -> None:
    breaker = PairBreaker(failures=2, cooldown_s=30.0)
    breaker.record(PAIR, False, 0.0)
    breaker.record(PAIR, False, 0.0)
    assert breaker.broken(30.0) == frozenset()
    breaker.record(PAIR, False, 40.0)
    assert breaker.broken(41.0) == {PAIR}


def test_a_snapshot_shows_a_pair_again_though_nothing_was_handed_off_in_the_meantime() -> None:
    state = FleetState()
    for name in PAIR:
        state.add_instance(name, Role.KV_BOTH)
    for _ in range(3):
        state.pairs.record(PAIR, False, 100.0)
    assert state.snapshot(ask(), 101.0, PAIR).broken_pairs == {PAIR}
    assert state.snapshot(ask(), 131.0, PAIR).broken_pairs == frozenset()


@pytest.mark.parametrize(("failures", "cooldown_s"), [(0, 1.0), (1, 0.0)])
def test_bad_bounds_are_refused(failures: int, cooldown_s: float) -> None:
    with pytest.raises(ValueError, match="failures must be at least 1 and cooldown_s positive"):
        PairBreaker(failures, cooldown_s)
