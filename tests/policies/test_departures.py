"""Totals and records of an instance that was removed while its requests continue."""

from __future__ import annotations

import pytest

from policies.holds import Holds
from policies.ledger import Ledger, Load
from policies.pairs import PairBreaker
from policies.sessions import SessionTable
from policies.state import FleetState
from policies.types import Role
from tests.policies.builders import ask_ids, decision_for

NAMES = ("p", "d")


def test_leases_of_one_that_left_stay_in_the_totals_and_out_of_the_next_ones_load() -> None:
    ledger = Ledger()
    old = ledger.acquire("a", 300, 1_000, 0.0)
    left = ledger.remove_instance("a")
    assert (ledger.load("a", 0.0), left(), ledger.totals()["requests"]) == (Load(), 1, 1)
    new = ledger.acquire("a", 7, 8, 0.0)
    assert (ledger.load("a", 0.0).requests, ledger.totals()["requests"]) == (1, 2)
    old.release()
    assert (left(), ledger.load("a", 0.0).requests, ledger.totals()["pending_prefill_tokens"]) == (0, 1, 7)
    new.release()
    assert not any(ledger.totals().values())


def test_departed_accounts_do_not_pile_up() -> None:
    ledger = Ledger()
    for number in range(100):
        lease = ledger.acquire(f"i{number}", 1, 1, 0.0)
        ledger.remove_instance(f"i{number}")
        lease.release()
    assert len(ledger._departed) <= 1
    assert not ledger._accounts


@pytest.fixture
def state() -> FleetState:
    state = FleetState()
    for name in NAMES:
        state.add_instance(name, Role.KV_BOTH)
    return state


@pytest.mark.parametrize("leaver", NAMES)
@pytest.mark.parametrize("replaced", [False, True])
def test_a_hand_off_whose_end_has_gone_leaves_no_hold_and_teaches_nothing(
    state: FleetState, leaver: str, replaced: bool
) -> None:
    request = ask_ids([1] * 64)
    commitment = state.commit(request, state.snapshot(request, 0.0, NAMES), decision_for(request, "d", "p"), 0.0)
    assert commitment.pair_known
    state.remove_instance(leaver)
    if replaced:
        state.add_instance(leaver, Role.KV_BOTH)
    assert not commitment.pair_known
    assert (commitment.prefill_known, commitment.decode_known) == (leaver != "p", leaver != "d")
    commitment.end_prefill()
    assert state.holds.tokens("p", 0.0) == (0 if leaver == "p" else 64)
    hold = commitment.hold_on_decode()
    assert state.holds.tokens("d", 0.0) == (0 if leaver == "d" else 64)
    hold.release()
    commitment.release(500.0)
    assert (state.holds.total(), state.offloads_in_flight) == (0, 0)
    assert state.holds.tokens(leaver, 1.0) == 0
    assert not any(state.ledger.totals().values())


def test_a_restart_is_no_departure(state: FleetState) -> None:
    request = ask_ids([1] * 64)
    commitment = state.commit(request, state.snapshot(request, 0.0, NAMES), decision_for(request, "d", "p"), 0.0)
    state.restarted("p")
    state.add_instance("d", Role.KV_CONSUMER)
    assert commitment.pair_known
    commitment.release()


def test_what_is_to_be_pulled_is_known_of_one_life_of_an_instance() -> None:
    holds = Holds()
    hold = holds.take("p", 5)
    old = holds.held_tokens_reader("p")
    holds.forget("p")
    holds.take("p", 7)
    assert (old(), holds.held_tokens("p"), holds.held_tokens("nobody"), holds.held_tokens_reader("nobody")()) == (
        5,
        7,
        0,
        0,
    )
    hold.orphan(9.0)
    assert (old(), holds.held_tokens("p")) == (0, 7)
    holds.untracked(3).release()
    assert holds.total() == 7


def test_a_pair_is_forgotten_with_either_end_and_no_other_is() -> None:
    breaker = PairBreaker(failures=1)
    for pair in (("p", "d"), ("d", "p"), ("p", "x")):
        breaker.record(pair, False, 0.0)
    breaker.forget("d")
    assert breaker.broken(1.0) == {("p", "x")}


def test_bounds_of_sessions_and_the_half_life_may_change() -> None:
    table, ledger = SessionTable(10, 100.0), Ledger(10.0)
    for number in range(5):
        table.pin(f"s{number}", "a", 0.0)
    table.set_bounds(2, 5.0)
    table.pin("s5", "a", 1.0)
    assert (len(table), table.instance_of("s4", 1.0), table.instance_of("s4", 5.0)) == (2, "a", None)
    ledger.acquire("a", 100, 100, 0.0)
    ledger.set_half_life(1.0)
    assert ledger.load("a", 1.0).recent_tokens == pytest.approx(50.0)
    with pytest.raises(ValueError, match="must be positive"):
        table.set_bounds(0, 1.0)
    with pytest.raises(ValueError, match="must be positive"):
        ledger.set_half_life(0.0)
