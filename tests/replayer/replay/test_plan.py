"""The plan: which sessions, waits, and the load they offer."""

from __future__ import annotations

import pytest

from replayer.replay.plan import PlanOptions, choose_sessions, describe, make_plan
from tests.replayer.conftest import make_trace


def test_scales_are_apart_and_think_scale_follows_time_scale() -> None:
    trace = make_trace(sessions=2, turns=2, gap_s=100.0, think_s=30.0)
    both = make_plan(trace, PlanOptions(time_scale=10.0))
    apart = make_plan(trace, PlanOptions(time_scale=10.0, think_scale=2.0))
    assert [plan.arrival_s for plan in both.sessions] == [0.0, 10.0]
    assert both.sessions[0].steps[1].wait_s == 3.0
    assert apart.sessions[0].steps[1].wait_s == 15.0
    assert apart.sessions[0].steps[1].after_end


def test_recorded_call_times_are_taken_off_the_gap() -> None:
    trace = make_trace(sessions=1, turns=2, think_s=None)
    trace.requests[0].api_time_s = 985.0
    step = make_plan(trace, PlanOptions()).sessions[0].steps[1]
    assert (step.wait_s, step.after_end) == (15.0, True)


def test_gaps_are_capped_before_scaling() -> None:
    trace = make_trace(sessions=1, turns=2, think_s=None)
    assert make_plan(trace, PlanOptions(time_scale=2.0, idle_gap_cap_s=50.0)).sessions[0].steps[1].wait_s == 25.0
    assert make_plan(trace, PlanOptions(idle_gap_cap_s=None)).sessions[0].steps[1].wait_s == 1000.0


@pytest.mark.parametrize(("limit", "sizes", "cut"), [(None, [3, 3, 3], 0), (6, [3, 3], 0), (4, [3, 1], 1), (1, [1], 1)])
def test_a_limit_takes_whole_sessions_by_arrival(limit: int | None, sizes: list[int], cut: int) -> None:
    chosen, cuts = choose_sessions(make_trace(sessions=3, turns=3), limit)
    assert [len(turns) for turns in chosen] == sizes
    assert cuts == cut


def test_offered_load_adds_up() -> None:
    trace = make_trace(sessions=2, turns=2, gap_s=10.0, think_s=90.0)
    offered = make_plan(trace, PlanOptions(idle_gap_cap_s=None)).offered
    prompt = sum(request.input_length for request in trace.requests)
    assert offered.span_s == 100.0
    assert offered.requests_per_s == pytest.approx(0.04)
    assert offered.prompt_tokens_per_s == pytest.approx(prompt / 100)
    assert offered.new_tokens_per_s == pytest.approx((prompt - 2 * 32) / 100)
    assert offered.ideal_apc == pytest.approx(64 / prompt)
    assert dict(describe(offered))["requests"] == "4 in 2 sessions"


def test_request_ids_name_trace_and_request_and_do_not_change() -> None:
    trace = make_trace(2, 2)
    one, two = make_plan(trace, PlanOptions()), make_plan(trace, PlanOptions(time_scale=7.0, request_limit=3))
    ids = [step.request_id for plan in one.sessions for step in plan.steps]
    assert len(set(ids)) == 4
    assert [step.request_id for plan in two.sessions for step in plan.steps] == ids[:3]
