"""The ledger: leases are counted, advanced and released exactly once."""

from __future__ import annotations

import pytest

from policies.ledger import Ledger, Load

ZERO = {"requests": 0, "prefilling": 0, "pending_prefill_tokens": 0, "decoding_tokens": 0, "promised_tokens": 0}


def test_a_lease_counts_new_tokens_until_first_token_and_context_after_it() -> None:
    ledger = Ledger()
    lease = ledger.acquire("a", new_tokens=300, context_tokens=1_000, now_s=0.0)
    assert ledger.load("a", 0.0) == Load(1, 300, 0, 1_000, 300.0, prefilling=1)
    lease.first_token()
    assert ledger.load("a", 0.0) == Load(1, 0, 1_000, 1_000, 300.0, prefilling=0)
    assert lease.release()
    assert ledger.load("a", 0.0) == Load(0, 0, 0, 0, 300.0)


def test_every_step_happens_once_however_often_it_is_called() -> None:
    ledger = Ledger()
    lease = ledger.acquire("a", 300, 1_000, 0.0)
    lease.first_token()
    lease.first_token()
    assert ledger.totals() == ZERO | {"requests": 1, "decoding_tokens": 1_000, "promised_tokens": 1_000}
    assert [lease.release(), lease.release()] == [True, False]
    lease.first_token()
    lease.add_prefill(50)
    assert ledger.totals() == ZERO


def test_prefill_added_later_is_released_with_the_lease() -> None:
    ledger = Ledger()
    lease = ledger.acquire("a", 0, 1_000, 0.0)
    lease.add_prefill(700)
    assert ledger.load("a", 0.0).pending_prefill_tokens == 700
    lease.release()
    assert ledger.totals() == ZERO


def test_prefill_added_after_the_first_token_is_too_late_to_count() -> None:
    ledger = Ledger()
    lease = ledger.acquire("a", 10, 10, 0.0)
    lease.first_token()
    lease.add_prefill(700)
    assert ledger.load("a", 0.0).pending_prefill_tokens == 0


def test_two_decisions_at_one_instant_see_each_other() -> None:
    ledger = Ledger()
    ledger.acquire("a", 100, 100, 5.0)
    assert ledger.load("a", 5.0).pending_prefill_tokens == 100
    ledger.acquire("a", 100, 100, 5.0)
    assert ledger.load("a", 5.0) == Load(2, 200, 0, 200, 200.0, prefilling=2)


def test_recent_tokens_halve_every_half_life_and_outlive_the_lease() -> None:
    ledger = Ledger(recent_half_life_s=30.0)
    ledger.acquire("a", 800, 800, 100.0).release()
    assert [ledger.load("a", 100.0 + age).recent_tokens for age in (0, 30, 60, 90)] == [800, 400, 200, 100]
    ledger.acquire("a", 100, 100, 130.0).release()
    assert ledger.load("a", 130.0).recent_tokens == 500
    assert ledger.load("a", 160.0).recent_tokens == 250


def test_reading_does_not_change_what_the_next_reading_says() -> None:
    ledger = Ledger()
    ledger.acquire("a", 800, 800, 0.0)
    assert [ledger.load("a", t).recent_tokens for t in (60, 30, 60, 0)] == [200, 400, 200, 800]


def test_recent_tokens_vanish_after_years_without_an_error() -> None:
    ledger = Ledger(1.0)
    ledger.acquire("a", 800, 800, 0.0)
    assert ledger.load("a", 1e9).recent_tokens == 0.0


def test_a_clock_that_steps_back_does_not_inflate_the_recent_term() -> None:
    ledger = Ledger()
    ledger.acquire("a", 800, 800, 100.0)
    assert ledger.load("a", 0.0).recent_tokens == 800


def test_an_instance_never_seen_is_idle() -> None:
    assert Ledger().load("x", 0.0) == Load()
    assert Ledger().promised_tokens("x") == 0


def test_forgetting_clears_the_recent_term_and_keeps_the_leases() -> None:
    ledger = Ledger()
    lease = ledger.acquire("a", 300, 1_000, 0.0)
    ledger.forget_recent("a")
    assert ledger.load("a", 0.0) == Load(1, 300, 0, 1_000, 0.0, prefilling=1)
    lease.release()
    assert ledger.totals() == ZERO
    ledger.forget_recent("never seen")


def test_names_of_departed_instances_do_not_pile_up() -> None:
    ledger = Ledger()
    for number in range(100):
        ledger.acquire(f"i{number}", 1, 1, 0.0).release()
        ledger.forget_recent(f"i{number}")
    assert not ledger._accounts


@pytest.mark.parametrize("half_life_s", [0.0, -1.0])
def test_a_half_life_that_is_not_positive_is_refused(half_life_s: float) -> None:
    with pytest.raises(ValueError, match=f"recent_half_life_s must be positive, got {half_life_s}"):
        Ledger(half_life_s)


@pytest.mark.parametrize(("new", "context"), [(-1, 0), (0, -1)])
def test_negative_token_counts_are_refused_and_leave_nothing_behind(new: int, context: int) -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="token counts must not be negative"):
        ledger.acquire("a", new, context, 0.0)
    assert ledger.totals() == ZERO
