"""Sessions whose context was evicted are not resident, however short a time ago their last request ended."""

from __future__ import annotations

from policies.admission.base import SessionView
from policies.state import FleetState
from policies.types import RequestView
from tests.policies.builders import decision_for

BLOCK = 16
POOL_BLOCKS = 100


def fleet() -> FleetState:
    state = FleetState()
    for name in ("a", "b"):
        state.add_instance(name)
        state.set_capacity(name, POOL_BLOCKS * BLOCK, BLOCK)
    return state


def turn(session: str, blocks: int, chain: int = 0, number: int = 0) -> RequestView:
    """A turn of ``blocks`` blocks; those of one session and chain begin with the same ones."""
    first = (ord(session) * 10 + chain) * 1_000
    name = f"{session}-{chain}-{number}"
    return RequestView(name, blocks * BLOCK, range(first, first + blocks), float(BLOCK), session_id=session, model="m")


def serve(state: FleetState, request: RequestView, instance: str = "a", now_s: float = 0.0) -> None:
    snapshot = state.snapshot(request, now_s, state.instances)
    commitment = state.commit(request, snapshot, decision_for(request, instance), now_s)
    commitment.release(now_s)


def see(state: FleetState, request: RequestView, now_s: float = 1.0) -> SessionView:
    return state.accounts.view_of(request, now_s)


def test_a_session_is_kept_while_its_instance_has_its_context() -> None:
    state = fleet()
    serve(state, turn("s", 40))
    serve(state, turn("t", 40))
    assert see(state, turn("s", 42)).kept
    assert state.accounts.kept_tokens == 80 * BLOCK


def test_a_session_whose_context_others_evicted_is_kept_no_longer_and_counts_no_room() -> None:
    state = fleet()
    serve(state, turn("s", 40))
    serve(state, turn("t", 90))
    assert state.accounts.kept_tokens == 130 * BLOCK
    view = see(state, turn("s", 42))
    assert (view.kept, view.resident, view.turns) == (False, False, 1)
    assert state.accounts.kept_tokens == 90 * BLOCK
    serve(state, turn("s", 42))
    assert state.accounts.gaps.return_share == 1.0


def test_half_of_the_context_is_enough() -> None:
    for evicting, kept in ((75, True), (85, False)):
        state = fleet()
        serve(state, turn("s", 40))
        serve(state, turn("t", evicting))
        assert see(state, turn("s", 42)).kept is kept


def test_a_copy_on_another_instance_does_not_make_the_session_resident() -> None:
    state = fleet()
    serve(state, turn("s", 40), "b")
    serve(state, turn("s", 41), "a")
    serve(state, turn("t", 95), "a")
    assert not see(state, turn("s", 42)).kept


def test_a_prompt_that_continues_none_of_the_session_is_no_evidence_of_eviction() -> None:
    state = fleet()
    serve(state, turn("s", 40))
    serve(state, turn("t", 90))
    assert see(state, turn("s", 10, chain=1)).kept


def test_an_instance_that_left_the_fleet_is_no_evidence_of_eviction() -> None:
    state = fleet()
    serve(state, turn("s", 40))
    state.remove_instance("a")
    assert see(state, turn("s", 42)).kept
    assert state.accounts.instances == 1
