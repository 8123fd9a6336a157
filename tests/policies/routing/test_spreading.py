"""Placement when nothing is in flight: two decisions of one tick, and fleets that are idle between requests."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from policies.classes import ClassThresholds
from policies.decide import decide
from policies.offload.never import Never
from policies.registry import make_routing, routing_policies
from policies.state import FleetState
from policies.types import RequestView
from tests.policies.builders import ask_new

POLICIES = {name: make_routing(name) for name in routing_policies()}
LOAD_AWARE = sorted(set(POLICIES) - {"round_robin", "random"})


def fleet_state(n: int) -> FleetState:
    state = FleetState()
    for i in range(n):
        state.add_instance(f"inst-{i}")
    return state


@functools.cache
def request(number: int, prompt_tokens: int) -> RequestView:
    """Requests are the same for all policies; hashing their blocks takes longer than placing them."""
    return ask_new(number, prompt_tokens, session_id=f"s{number}")


def place(state: FleetState, policy: str, number: int, now_s: float, hold: bool, prompt_tokens: int = 3_200) -> str:
    asked = request(number, prompt_tokens)
    fleet = state.snapshot(asked, now_s, state.instances)
    decision = decide(asked, fleet, POLICIES[policy], Never(), ClassThresholds())
    commitment = state.commit(asked, fleet, decision, now_s)
    if not hold:
        commitment.decode.first_token()
        commitment.release()
    return decision.decode_on


@pytest.mark.parametrize("policy", LOAD_AWARE)
def test_two_decisions_in_one_tick_see_each_other(policy: str) -> None:
    state = fleet_state(2)
    assert {place(state, policy, number, 0.0, hold=True) for number in range(2)} == {"inst-0", "inst-1"}


@pytest.mark.parametrize("policy", LOAD_AWARE)
def test_a_burst_of_one_tick_is_spread_evenly(policy: str) -> None:
    state = fleet_state(8)
    placed = Counter(place(state, policy, number, 0.0, hold=True) for number in range(64))
    assert set(placed.values()) == {8}


@pytest.mark.parametrize("gap_s", [0.0, 2.0, 3_600.0])
@pytest.mark.parametrize("policy", LOAD_AWARE)
def test_sequential_requests_do_not_pile_onto_one_of_two_idle_instances(policy: str, gap_s: float) -> None:
    state = fleet_state(2)
    placed = Counter(
        place(state, policy, number, number * gap_s, hold=False, prompt_tokens=320 + 16 * (number * 37 % 50))
        for number in range(448)
    )
    assert placed.total() == 448
    assert min(placed["inst-0"], placed["inst-1"]) >= 0.45 * 448


def test_without_the_recent_term_length_would_decide_nothing_and_with_it_tokens_are_balanced() -> None:
    """One long prompt, then short ones: the instance of the long one is avoided while its work is recent."""
    state = fleet_state(2)
    first = place(state, "least_loaded", 0, 0.0, hold=False, prompt_tokens=32_000)
    after = {place(state, "least_loaded", number, 1.0, hold=False, prompt_tokens=1_600) for number in range(1, 11)}
    assert first not in after
    much_later = {place(state, "least_loaded", number, 600.0, hold=False) for number in range(11, 17)}
    assert first in much_later
