"""State of other replicas in the decisions of this one: load, pins, contexts, working set."""

from __future__ import annotations

from policies.admission.base import AdmissionReason, Admit
from policies.admission.gate import AdmissionGate
from policies.admission.line import Held
from policies.admission.room import ONE_PART, Room
from policies.admission.working_set import WorkingSet
from policies.ledger import Account, Ledger
from policies.replicas.shared_sessions import Context, SharedSessions
from policies.state import FleetState
from policies.types import InstanceView, RequestView
from tests.policies.builders import ask_ids, ask_new, decision_for

IDLE = Room(10_000, 2, 0, (("inst-0", 5_000, 0), ("inst-1", 5_000, 0)))
BUSY = Room(10_000, 2, 2, (("inst-0", 5_000, 1), ("inst-1", 5_000, 1)))


def state_of(count: int = 2) -> FleetState:
    state = FleetState()
    state.share(SharedSessions(capacity=3))
    for number in range(count):
        state.add_instance(f"inst-{number}")
    return state


def view_of(state: FleetState, request: RequestView, name: str, now_s: float = 0.0) -> InstanceView:
    found = state.snapshot(request, now_s, state.instances).view(name)
    assert found is not None
    return found


def route(state: FleetState, request: RequestView, name: str, now_s: float = 0.0) -> None:
    fleet = state.snapshot(request, now_s, state.instances)
    state.commit(request, fleet, decision_for(request, name), now_s)


def of_session(request: RequestView, session_id: str) -> RequestView:
    return request._replace(session_id=session_id, model="m")


def key_of(session_id: str) -> str:
    return of_session(ask_new(1, 16), session_id).context_id or ""


# Load


def test_views_have_the_load_of_all_replicas() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    route(state, request, "inst-1")
    state.ledger.remote["inst-1"] = Account(2, 1, 300, 5_000, 5_400, recent_tokens=800.0, recent_at_s=0.0)
    state.ledger.remote["inst-0"] = Account(1, 1, 70, 0, 70)
    seen = view_of(state, request, "inst-1", 30.0)
    assert (seen.requests, seen.prefilling, seen.pending_prefill_tokens) == (3, 2, 1_900)
    assert (seen.decoding_tokens, seen.kv_promised_tokens) == (5_000, 7_000)
    assert seen.recent_tokens == (1_600 + 800) / 2, "both halved after one half-life"
    assert view_of(state, request, "inst-0").pending_prefill_tokens == 70
    assert state.room(["inst-0", "inst-1"], ONE_PART).prefilling == 3


def test_load_of_other_replicas_is_forgotten_with_an_instance_that_restarts_or_leaves() -> None:
    ledger = Ledger()
    for name in ("restarted", "removed", "kept"):
        ledger.remote[name] = Account(2, 1, 300, 0, 300)
    ledger.forget_recent("restarted")
    ledger.remove_instance("removed")
    assert [ledger.joint_requests(name) for name in ("restarted", "removed", "kept")] == [0, 0, 2]


def test_totals_and_own_requests_leave_other_replicas_out() -> None:
    ledger = Ledger()
    ledger.acquire("a", 10, 20, 0.0)
    ledger.remote["a"] = Account(4, 4, 40, 0, 80)
    assert (ledger.requests("a"), ledger.joint_requests("a"), ledger.promised_tokens("a")) == (1, 5, 100)
    assert ledger.totals()["requests"] == 1
    assert ledger.joint("unknown", 0.0) == Account()


def test_a_report_of_the_engine_covers_what_other_replicas_sent_before_it() -> None:
    state, request = state_of(), ask_new(1, 160)
    state.set_capacity("inst-0", 100_000, 16)
    state.ledger.remote["inst-0"] = Account(1, 0, 0, 9_000, 9_000)
    state.set_usage("inst-0", 9_000)
    seen = view_of(state, request, "inst-0")
    assert seen.kv_used_tokens + seen.kv_promised_tokens == 9_000
    assert state.expected_tokens("inst-0", 0.0) == 9_000


# Sessions


def test_a_session_that_is_unknown_here_is_pinned_where_another_replica_sent_it() -> None:
    state = state_of()
    request = of_session(ask_ids(list(range(320))), "s")
    state.pinned_elsewhere(key_of("s"), "inst-1", 160, 1.0)
    fleet = state.snapshot(request, 2.0, state.instances)
    assert fleet.pinned == "inst-1"
    assert [view.cached_tokens for view in fleet.instances] == [0, 160]
    assert [view.sessions for view in fleet.instances] == [0, 1]


def test_the_latest_decision_wins_whichever_replica_took_it() -> None:
    state = state_of()
    request = of_session(ask_ids(list(range(320))), "s")
    route(state, request, "inst-0", 5.0)
    state.pinned_elsewhere(key_of("s"), "inst-1", 160, 4.0)
    assert state.snapshot(request, 6.0, state.instances).pinned == "inst-0"
    state.pinned_elsewhere(key_of("s"), "inst-1", 160, 7.0)
    assert state.snapshot(request, 8.0, state.instances).pinned == "inst-1"


def test_a_pin_on_an_instance_that_is_not_in_this_fleet_is_ignored() -> None:
    state = state_of()
    state.pinned_elsewhere(key_of("s"), "inst-9", 160, 1.0)
    assert state.snapshot(of_session(ask_new(1, 160), "s"), 2.0, state.instances).pinned is None


def test_a_restarted_instance_has_no_context_of_another_replica_either() -> None:
    state = state_of()
    request = of_session(ask_ids(list(range(320))), "s")
    state.pinned_elsewhere(key_of("s"), "inst-1", 160, 1.0)
    state.restarted("inst-1")
    assert view_of(state, request, "inst-1", 2.0).cached_tokens == 0


def test_own_decisions_are_announced_once_and_all_of_them_on_demand() -> None:
    shared = SharedSessions(capacity=2)
    shared.ran("a", "x", 10, 1.0)
    shared.ran("b", "x", 20, 2.0)
    shared.ran_elsewhere("a", "y", 11, 3.0)
    assert shared.take_changes(10) == [("b", Context("x", 20, 2.0, own=True))]
    assert shared.take_changes(10) == []
    shared.announce_all()
    assert [session for session, _ in shared.take_changes(10)] == ["b"]
    shared.ran("c", "x", 30, 4.0)
    shared.ran("d", "x", 40, 5.0)
    assert len(shared) == 2
    assert [session for session, _ in shared.take_changes(1)] == ["c"]


# Working set


def ask_of(session_id: str, tokens: int) -> RequestView:
    return of_session(ask_new(1, tokens), session_id)


def test_contexts_of_other_replicas_take_room_in_the_working_set() -> None:
    state = state_of()
    gate = AdmissionGate(WorkingSet(), state.accounts)
    state.accounts.set_remote([{"inst-0": (2, 4_800, 0, 0)}, {"inst-1": (1, 4_700, 0, 0)}], {}, 0)
    assert isinstance(gate.offer(ask_of("new", 1_000), BUSY, 1.0), Held)
    state.accounts.set_remote([], {}, 0)
    assert isinstance(gate.offer(ask_of("other", 1_000), IDLE, 1.0), Admit)


def test_a_session_that_another_replica_keeps_returns_as_a_kept_one() -> None:
    state = state_of()
    gate = AdmissionGate(WorkingSet(), state.accounts)
    state.pinned_elsewhere(key_of("s"), "inst-1", 1_000, 1.0)
    state.accounts.set_remote([{"inst-1": (0, 0, 1, 1_000)}], {}, 0)
    answer = gate.offer(ask_of("s", 1_100), BUSY, 3.0)
    assert answer == Admit(AdmissionReason.RESIDENT)


def test_a_session_is_kept_by_the_replica_that_it_ran_through_last() -> None:
    state = state_of()
    request = ask_of("s", 1_000)
    fleet = state.snapshot(request, 0.0, state.instances)
    state.commit(request, fleet, decision_for(request, "inst-0"), 0.0).release(1.0)
    assert state.accounts.kept_tokens == 1_000
    state.pinned_elsewhere(key_of("s"), "inst-0", 1_100, 2.0)
    assert (state.accounts.kept_sessions, state.accounts.kept_tokens) == (0, 0)


def test_contexts_of_another_replica_leave_no_room_for_a_new_session() -> None:
    state = state_of()
    gate = AdmissionGate(WorkingSet(), state.accounts)
    assert isinstance(gate.offer(ask_of("a", 1_000), BUSY, 1.0), Admit)
    state.accounts.set_remote([{"inst-0": (1, 1_500, 2, 2_500), "inst-1": (1, 1_500, 2, 2_500)}], {}, 0)
    assert isinstance(gate.offer(ask_of("b", 1_000), BUSY, 1.0), Held)


def test_a_session_has_a_shared_context_with_each_model() -> None:
    state, large = state_of(), of_session(ask_ids(list(range(320))), "s")
    small = large._replace(model="small")
    state.pinned_elsewhere(key_of("s"), "inst-1", 160, 1.0)
    assert view_of(state, small, "inst-1", 2.0).cached_tokens == 0
    assert view_of(state, large, "inst-1", 2.0).cached_tokens == 160
    route(state, small, "inst-0", 3.0)
    assert state.shared is not None
    assert [name for name, _ in state.shared.take_changes(10)] == [small.context_id]
