"""FleetState and RoutingSession: which leases have a due time, and which one."""

from __future__ import annotations

import pytest

from policies.classes import ClassThresholds
from policies.costs.order import SLOWDOWN, wait_s
from policies.offload.never import Never
from policies.routing.base import RoutingPolicy
from policies.routing.lmetric import LMetric
from policies.routing.warm import Warm
from policies.session import RoutingSession
from policies.snapshot import FleetSnapshot
from policies.state import Commitment, FleetState
from policies.types import QueuedPrefill, RequestView, Role
from tests.policies.builders import ask_new, decision_for

NOW_S = 100.0


def state_of(**ordered: bool) -> FleetState:
    state = FleetState()
    for name, each in ordered.items():
        state.add_instance(name, Role.KV_BOTH, ordered=each)
    return state


def look(state: FleetState, request: RequestView) -> FleetSnapshot:
    return state.snapshot(request, NOW_S, state.instances)


def commit(
    state: FleetState, request: RequestView, decode_on: str, prefill_on: str | None = None, slowdown: float = SLOWDOWN
) -> Commitment:
    fleet = look(state, request)
    view = fleet.view(decode_on)
    assert view is not None
    decision = decision_for(request, decode_on, prefill_on, view.cached_tokens)
    return state.commit(request, fleet, decision, NOW_S, slowdown)


def queue_of(state: FleetState, name: str) -> tuple[QueuedPrefill, ...]:
    view = look(state, ask_new(9)).view(name)
    assert view is not None
    return view.queue


def test_a_prefill_has_its_due_time_from_the_learned_model() -> None:
    state, request = state_of(a=True), ask_new(1, 1_600)
    seconds = state.costs.prefill.seconds(1_600, 0)
    lease = commit(state, request, "a").decode
    assert lease.due_s == NOW_S + wait_s(seconds, SLOWDOWN)
    assert queue_of(state, "a") == (QueuedPrefill(lease.due_s, seconds),)
    again = commit(state, request, "a").decode  # its prompt is predicted to be cached but for the last block
    assert again.due_s is not None
    assert again.due_s == NOW_S + wait_s(state.costs.prefill.seconds(16, 1_584), SLOWDOWN) < lease.due_s
    assert [each.due_s for each in queue_of(state, "a")] == [lease.due_s, again.due_s]


@pytest.mark.parametrize(("ordered", "slowdown"), [(False, SLOWDOWN), (True, 0.0)])
def test_without_an_ordering_engine_or_a_slowdown_there_is_no_due_time(ordered: bool, slowdown: float) -> None:
    state = state_of(a=ordered)
    assert commit(state, ask_new(1), "a", slowdown=slowdown).decode.due_s is None
    assert queue_of(state, "a") == ()


@pytest.mark.parametrize(
    ("policy", "ordered", "due"),
    [(Warm(), True, True), (Warm(), False, False), (Warm(slowdown=0.0), True, False), (LMetric(), True, False)],
)
def test_only_a_policy_with_a_slowdown_orders_and_only_engines_that_do(
    policy: RoutingPolicy, ordered: bool, due: bool
) -> None:
    state = state_of(a=ordered)
    routing = RoutingSession(state, policy, Never(), ClassThresholds())
    routed = routing.route(ask_new(1), ["a"], (), NOW_S)
    assert (routed.commitment.decode.due_s is not None) is due
    assert bool(queue_of(state, "a")) is due


def test_an_instance_may_begin_or_cease_to_order() -> None:
    state = state_of(a=False)
    state.add_instance("a", Role.KV_BOTH, ordered=True)
    assert commit(state, ask_new(1), "a").decode.due_s is not None
    state.add_instance("a", Role.KV_BOTH)
    assert commit(state, ask_new(2), "a").decode.due_s is None


def test_both_ends_of_a_hand_off_have_their_own() -> None:
    state = state_of(p=True, d=True)
    commitment = commit(state, ask_new(1, 1_600), "d", "p")
    seconds = state.costs.prefill.seconds(1_600, 0)
    assert commitment.prefill is not None
    assert commitment.prefill.due_s == NOW_S + wait_s(seconds, SLOWDOWN)
    assert commitment.decode.due_s == NOW_S  # nothing to prefill there
    assert queue_of(state, "p") == (QueuedPrefill(commitment.prefill.due_s, seconds),)
    assert queue_of(state, "d") == (QueuedPrefill(NOW_S, 0.0),)
    commitment.end_prefill()
    assert (queue_of(state, "p"), len(queue_of(state, "d"))) == ((), 1)
    commitment.decode.first_token()
    assert queue_of(state, "d") == ()


@pytest.mark.parametrize("ordered", ["p", "d"])
def test_one_end_alone_may_order(ordered: str) -> None:
    state = state_of(p=ordered == "p", d=ordered == "d")
    commitment = commit(state, ask_new(1, 1_600), "d", "p")
    assert commitment.prefill is not None
    has = {"p": commitment.prefill.due_s is not None, "d": commitment.decode.due_s is not None}
    assert [name for name, each in has.items() if each] == [ordered]


def test_a_failed_hand_off_keeps_the_place_on_d_with_the_seconds_of_the_whole_prefill() -> None:
    state = state_of(p=True, d=True)
    waiting = commit(state, ask_new(2, 3_200), "d")
    commitment = commit(state, ask_new(1, 1_600), "d", "p")
    seconds = state.costs.prefill.seconds(1_600, 0)
    for _ in range(2):
        commitment.fall_back()
        assert commitment.decode.due_s == NOW_S
        assert queue_of(state, "d")[1:] == (QueuedPrefill(NOW_S, seconds),)
        assert queue_of(state, "p") == ()
    waiting.release()
    assert queue_of(state, "d") == (QueuedPrefill(NOW_S, seconds),)
    commitment.release()
    assert queue_of(state, "d") == ()


def test_falling_back_to_an_engine_without_an_order_queues_nothing() -> None:
    state = state_of(p=True, d=False)
    commitment = commit(state, ask_new(1, 1_600), "d", "p")
    commitment.fall_back()
    assert (commitment.decode.due_s, queue_of(state, "d"), queue_of(state, "p")) == (None, (), ())
