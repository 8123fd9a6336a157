"""FleetState: resources that a decision reserves, enters and returns."""

from __future__ import annotations

import pytest

from policies.hotspots import HotspotTracker
from policies.ledger import Ledger
from policies.predict.predictor import cacheable_tokens
from policies.predict.prefix_index import PrefixIndex
from policies.replicas.shared_sessions import SharedSessions
from policies.sessions import SessionTable
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.state import Commitment, FleetState
from policies.types import Connector, InstanceView, RequestView, Role, Transport
from tests.policies.builders import ask, ask_ids, ask_new, decision_for


def state_of(n: int = 3) -> FleetState:
    state = FleetState()
    for i in range(n):
        state.add_instance(f"inst-{i}", Role.KV_BOTH)
    return state


def look(state: FleetState, request: RequestView, now_s: float = 0.0) -> FleetSnapshot:
    return state.snapshot(request, now_s, state.instances)


def view_of(state: FleetState, request: RequestView, name: str, now_s: float = 0.0) -> InstanceView:
    return next(view for view in look(state, request, now_s).instances if view.instance == name)


def commit(
    state: FleetState, request: RequestView, decode_on: str, prefill_on: str | None = None, now_s: float = 0.0
) -> Commitment:
    fleet = look(state, request, now_s)
    cached = next(view.cached_tokens for view in fleet.instances if view.instance == decode_on)
    return state.commit(request, fleet, decision_for(request, decode_on, prefill_on, cached), now_s)


def test_a_state_uses_the_parts_it_is_given_even_empty_ones() -> None:
    parts = (PrefixIndex(5), Ledger(1.0), SessionTable(7), HotspotTracker(2, 3))
    state = FleetState(*parts)
    assert (state.index, state.ledger, state.sessions, state.hotspots) == parts


def test_a_commit_is_seen_by_the_next_snapshot_of_the_same_instant() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    commit(state, request, "inst-1")
    seen = view_of(state, request, "inst-1")
    assert (seen.requests, seen.pending_prefill_tokens, seen.recent_tokens) == (1, 1_600, 1_600)
    assert (seen.kv_promised_tokens, seen.cached_tokens) == (1_600, 1_584)
    assert look(state, request).sequence == 1


def test_the_last_prompt_token_is_never_counted_as_cached() -> None:
    exact = ask_ids(list(range(64)))
    assert [cacheable_tokens(exact, n) for n in range(5)] == [0, 16, 32, 48, 48]
    assert cacheable_tokens(ask_ids(list(range(65))), 4) == 64
    text = ask(100, block_tokens=33.4, exact=False)
    assert [cacheable_tokens(text, n) for n in range(4)] == [0, 33, 66, 99]
    assert cacheable_tokens(text._replace(prompt_tokens=90), 3) == 89


def test_an_offload_counts_the_prefill_on_p_and_the_kv_on_both() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    commitment = commit(state, request, "inst-0", "inst-2")
    d, p = (view_of(state, request, name) for name in ("inst-0", "inst-2"))
    assert (d.requests, d.pending_prefill_tokens, d.kv_promised_tokens, d.recent_tokens) == (1, 0, 1_600, 0)
    assert (p.requests, p.pending_prefill_tokens, p.kv_promised_tokens, p.recent_tokens) == (1, 1_600, 1_600, 1_600)
    assert d.cached_tokens == p.cached_tokens == 1_584
    assert look(state, request).offloads_in_flight == 1
    commitment.release()
    assert not any(state.ledger.totals().values())


def test_an_offload_is_in_flight_and_its_kv_held_on_p_until_d_has_its_first_token() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    commitment = commit(state, request, "inst-0", "inst-2")
    commitment.end_prefill()
    commitment.end_prefill()
    p = view_of(state, request, "inst-2")
    assert (p.requests, p.prefilling, p.kv_promised_tokens) == (0, 0, 1_600)
    assert (look(state, request).offloads_in_flight, state.holds.total()) == (1, 1_600)
    assert state.expected_tokens("inst-2", 0.0) == 1_600
    commitment.handed_over()
    commitment.handed_over()
    assert (look(state, request).offloads_in_flight, state.holds.total()) == (0, 0)
    assert view_of(state, request, "inst-2").kv_promised_tokens == 0
    commitment.fall_back(99.0)
    commitment.release(99.0)
    assert state.expected_tokens("inst-2", 1.0) == 0


@pytest.mark.parametrize("ends_by", ["fall_back", "release"])
def test_kv_that_is_never_pulled_stays_on_p_until_the_engine_frees_it(ends_by: str) -> None:
    state, request = state_of(), ask_new(1, 1_600)
    commitment = commit(state, request, "inst-0", "inst-2")
    commitment.end_prefill()
    getattr(commitment, ends_by)(480.0)
    assert (state.offloads_in_flight, state.holds.total()) == (0, 0)
    assert [state.expected_tokens("inst-2", now_s) for now_s in (0.0, 479.9, 480.0)] == [1_600, 1_600, 0]
    commitment.release(900.0)
    assert state.expected_tokens("inst-2", 500.0) == 0


def test_a_p_leg_that_failed_leaves_nothing_held() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    commitment = commit(state, request, "inst-0", "inst-2")
    commitment.fall_back(480.0)
    assert state.expected_tokens("inst-2", 0.0) == 0
    assert state.expected_tokens("inst-0", 0.0) == 1_600


def test_prefill_streams_and_decode_streams_are_distinguished() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    first = commit(state, request, "inst-0")
    commit(state, request, "inst-0")
    first.decode.first_token()
    seen = view_of(state, request, "inst-0")
    assert (seen.requests, seen.prefilling, seen.decode_streams) == (2, 1, 1)


def test_what_is_known_of_an_instance_is_shown_and_can_be_corrected() -> None:
    state = FleetState()
    state.add_instance("a", Role.KV_BOTH, "host-1", Transport.NVLINK, Connector.NIXL)
    seen = view_of(state, ask(), "a")
    assert (seen.host, seen.transport, seen.connector) == ("host-1", Transport.NVLINK, Connector.NIXL)
    state.add_instance("a", Role.KV_BOTH, "host-2")
    seen = view_of(state, ask(), "a")
    assert (seen.host, seen.transport, seen.connector) == ("host-2", None, Connector.MOONCAKE)


def test_the_cap_slot_of_a_released_offload_is_given_back_once() -> None:
    state, request = state_of(), ask_new(1)
    first, second = commit(state, request, "inst-0", "inst-1"), commit(state, request, "inst-1", "inst-0")
    for _ in range(3):
        first.release()
    assert state.offloads_in_flight == 1
    second.release()
    assert state.offloads_in_flight == 0


def test_a_failed_offload_counts_its_prefill_on_d_once() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    commitment = commit(state, request, "inst-0", "inst-2")
    commitment.fall_back()
    commitment.fall_back()
    assert view_of(state, request, "inst-0").pending_prefill_tokens == 1_600
    assert (view_of(state, request, "inst-2").requests, state.offloads_in_flight) == (0, 0)
    commitment.release()
    assert not any(state.ledger.totals().values())


def test_falling_back_without_an_offload_counts_nothing_twice() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    commit(state, request, "inst-0").fall_back()
    assert view_of(state, request, "inst-0").pending_prefill_tokens == 1_600


def test_retracting_takes_back_only_the_blocks_this_request_entered() -> None:
    state = state_of()
    first, longer = ask_ids(list(range(320))), ask_ids(list(range(640)))
    commit(state, first, "inst-0").release()
    commitment = commit(state, longer, "inst-0")
    assert state.index.match_one("inst-0", longer.block_hashes) == 40
    commitment.retract("inst-0")
    commitment.retract("inst-0")
    assert state.index.match_one("inst-0", longer.block_hashes) == 20


def test_retracting_p_leaves_d_alone() -> None:
    state, request = state_of(), ask_new(1)
    commit(state, request, "inst-0", "inst-1").retract("inst-1")
    assert state.index.match(request.block_hashes) == {"inst-0": 100, "inst-1": 0, "inst-2": 0}


def test_retracting_after_the_instance_left_does_nothing() -> None:
    state, request = state_of(), ask_new(1)
    commitment = commit(state, request, "inst-0")
    state.remove_instance("inst-0")
    commitment.retract("inst-0")
    commitment.release()
    assert not any(state.ledger.totals().values())


def test_an_instance_that_leaves_takes_blocks_pins_and_recent_load_along() -> None:
    state, request = state_of(), ask_new(1, session_id="s")
    commit(state, request, "inst-0").release()
    state.remove_instance("inst-0")
    assert state.instances == ["inst-1", "inst-2"]
    assert look(state, request).pinned is None
    state.add_instance("inst-0", Role.KV_BOTH)
    assert view_of(state, request, "inst-0") == InstanceView("inst-0", role=Role.KV_BOTH)


def test_leases_of_an_instance_that_left_are_still_counted_until_released() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    commitment = commit(state, request, "inst-0")
    state.remove_instance("inst-0")
    assert state.ledger.totals()["pending_prefill_tokens"] == 1_600
    commitment.release()
    assert not any(state.ledger.totals().values())


def test_a_restart_empties_cache_pins_and_recent_load_and_keeps_the_leases() -> None:
    state, request = state_of(), ask_new(1, 1_600, session_id="s")
    commit(state, request, "inst-0")
    state.restarted("inst-0")
    seen = view_of(state, request, "inst-0")
    assert (seen.cached_tokens, seen.sessions, seen.recent_tokens, seen.requests) == (0, 0, 0, 1)
    assert look(state, request).pinned is None


def test_only_eligible_instances_are_shown_in_the_order_they_were_added() -> None:
    state = state_of(4)
    fleet = state.snapshot(ask(), 0.0, {"inst-3", "inst-1", "unknown"})
    assert [view.instance for view in fleet.instances] == ["inst-1", "inst-3"]
    assert fleet.prefill_instances == ()
    fleet = state.snapshot(ask(), 0.0, {"inst-1"}, prefill_only={"inst-2"})
    assert [view.instance for view in fleet.prefill_instances] == ["inst-1", "inst-2"]


def test_a_prefill_only_instance_can_be_p() -> None:
    state, request = state_of(), ask_new(1, 1_600)
    fleet = state.snapshot(request, 0.0, ["inst-0"], prefill_only=["inst-2"])
    state.commit(request, fleet, decision_for(request, "inst-0", "inst-2"), 0.0)
    assert view_of(state, request, "inst-2").pending_prefill_tokens == 1_600


def test_the_engine_pool_bounds_the_shadow_index() -> None:
    state = state_of(1)
    state.set_capacity("inst-0", 738_432, 64.0)
    assert state.index.capacity("inst-0") == 11_538
    assert view_of(state, ask(), "inst-0").kv_capacity_tokens == 738_432
    state.set_capacity("inst-0", 0, 64.0)
    assert state.index.capacity("inst-0") == 11_538
    assert view_of(state, ask(), "inst-0").kv_capacity_tokens == 0


def test_a_block_of_text_fills_the_pool_by_its_tokens() -> None:
    """Also where the request decodes elsewhere than it is prefilled, and after a turn through another replica."""
    state = state_of(2)
    state.share(SharedSessions())
    for name in state.instances:
        state.set_capacity(name, 16_000, 16.0)
    text = RequestView("r", 1_024, (1, 2, 3, 4), block_tokens=256.0, exact=False, session_id="s")
    fleet = state.snapshot(text, 0.0, state.instances)
    state.commit(text, fleet, decision_for(text, "inst-0", "inst-1"), 0.0)
    assert [state.index.blocks(name) for name in ("inst-0", "inst-1")] == [64, 64]
    state.pinned_elsewhere("t", "inst-0", 512, 1.0)
    other = text._replace(block_hashes=(5, 6, 7, 8), session_id="t")
    state.snapshot(other, 2.0, state.instances)
    assert state.index.blocks("inst-0") == 96


def test_promised_kv_is_what_the_engine_has_not_reported_yet() -> None:
    state = state_of(1)

    def room() -> tuple[int, int]:
        seen = view_of(state, ask(), "inst-0")
        return seen.kv_used_tokens, seen.kv_promised_tokens

    first = commit(state, ask_new(1, 1_600), "inst-0")
    assert room() == (0, 1_600)
    state.set_usage("inst-0", 5_000)  # 3,400 that none of our requests accounts for, and the 1,600
    assert room() == (5_000, 0)
    second = commit(state, ask_new(2, 800), "inst-0")
    assert room() == (5_000, 800)
    first.release()
    second.release()
    assert room() == (5_000, -1_600)  # tokens of requests that ended since the report are free again
    state.set_usage("inst-0", 3_400)
    assert room() == (3_400, 0)


def test_what_ends_after_a_report_gives_back_no_more_than_was_reported() -> None:
    state = state_of(1)
    leases = [commit(state, ask_new(turn, 1_600), "inst-0") for turn in (1, 2)]
    state.set_usage("inst-0", 1_700)  # the two share most of their blocks
    for lease in leases:
        lease.release()
    seen = view_of(state, ask(), "inst-0")
    assert seen.kv_used_tokens + seen.kv_promised_tokens == 0


def test_promised_kv_that_the_engine_has_not_got_round_to_stays_promised_after_a_report() -> None:
    state = state_of(1)
    commit(state, ask_new(1, 1_600), "inst-0")
    state.set_usage("inst-0", 100)
    seen = view_of(state, ask(), "inst-0")
    assert seen.kv_used_tokens + seen.kv_promised_tokens == 1_600


def test_adding_an_instance_again_takes_the_role_and_keeps_its_blocks() -> None:
    state, request = state_of(1), ask_new(1)
    commit(state, request, "inst-0")
    state.add_instance("inst-0", Role.KV_PRODUCER)
    seen = view_of(state, request, "inst-0")
    assert (seen.role, seen.cached_tokens) == (Role.KV_PRODUCER, 1_584)
    assert state.producers == {"inst-0"}
    state.add_instance("inst-0", Role.NONE)
    assert not state.producers


def test_an_instance_that_was_removed_is_no_producer() -> None:
    state = state_of(1)
    state.add_instance("inst-0", Role.KV_PRODUCER)
    state.remove_instance("inst-0")
    assert not state.producers


@pytest.mark.parametrize("session_id", [None, "s"])
def test_a_session_is_pinned_to_where_it_decodes(session_id: str | None) -> None:
    state, request = state_of(), ask_new(1, session_id=session_id)
    commit(state, request, "inst-1", "inst-2")
    assert look(state, request).pinned == ("inst-1" if session_id else None)


def test_a_session_has_a_pin_and_a_context_with_each_model() -> None:
    """Claude Code sends short requests of a session to a small model between those to a large one."""
    state = state_of()
    large, small = ask_new(1, session_id="s", model="large"), ask_new(2, 160, session_id="s", model="small")
    commit(state, large, "inst-1").release(1.0)
    commit(state, small, "inst-2", now_s=1.0).release(2.0)
    assert (look(state, large, 2.0).pinned, look(state, small, 2.0).pinned) == ("inst-1", "inst-2")
    views = [state.accounts.view(request.context_id, 2.0) for request in (large, small)]
    assert [(view.kept, view.context_tokens) for view in views] == [(True, 1_600), (True, 160)]
    assert ask(1, session_id="ab", model="c").context_id != ask(1, session_id="a", model="bc").context_id
    assert [ask(1, session_id=session, model="m").context_id for session in (None, "")] == [None, ""]


def test_a_short_prompt_holds_its_class_when_all_its_blocks_are_held() -> None:
    state = state_of(2)
    commit(state, ask_ids(list(range(33))), "inst-0")
    assert [view.holds_class for view in look(state, ask_ids(list(range(33)))).instances] == [True, False]
    assert not any(view.holds_class for view in look(state, ask_ids(list(range(160)))).instances)
    assert not any(view.holds_class for view in look(state, ask()).instances)


def test_columns_are_the_first_fields_of_the_views() -> None:
    assert InstanceView._fields[: len(FleetColumns._fields)] == FleetColumns._fields
    views = (InstanceView("a", cached_tokens=1, transport=Transport.RDMA), InstanceView("b", requests=2, host="h"))
    columns = FleetColumns.of(views)
    assert [tuple(column[place] for column in columns) for place in (0, 1)] == [
        view[: len(FleetColumns._fields)] for view in views
    ]
