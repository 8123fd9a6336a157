"""Offline simulation: each request sent once, the closed loop, equal bytes for equal seeds, a consistent router
state."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.types import Role
from replayer.records.summary import summarise
from replayer.replay.plan import PlanOptions, make_plan
from replayer.traces.loading import load_trace
from sim.offline.options import HandOffBounds
from sim.offline.simulate import Noise, SimOptions, SimulationError
from tests.sim.offline.offline_runs import ROOMY_TOKENS, agents, by_session, conversation, lines, run, trace_of

AGENTS = agents()


@pytest.mark.parametrize("policy", ["round_robin", "lmetric", "session_sticky", "unified", "random"])
def test_every_request_is_recorded_once_and_the_books_close(policy: str) -> None:
    result = run(AGENTS, policy, pool_tokens=400_000)
    records = result.run.records
    assert sorted(record.chat_id for record in records) == sorted(each.chat_id for each in AGENTS.requests)
    assert len({record.request_id for record in records}) == len(records)
    assert result.run.end is not None
    assert (result.run.end.requests, result.run.end.ok) == (len(records), len(records))
    assert set(result.ledger.values()) == {0}
    requests = {request.chat_id: request for request in AGENTS.requests}
    for record in records:
        request = requests[record.chat_id]
        assert (record.prompt_tokens, record.completion_tokens) == (request.input_length, max(request.output_length, 1))
        assert record.first_token_s is not None
        assert record.finished_s is not None
        assert record.scheduled_s <= (record.sent_s or 0.0) < record.first_token_s <= record.finished_s
    assert sum(row.requests for row in result.instances) == len(records)
    assert sum(row.prompt_tokens for row in result.instances) == sum(each.input_length for each in AGENTS.requests)


@pytest.mark.parametrize(("policy", "planner"), [("lmetric", "never"), ("random", "never"), ("unified", "threshold")])
def test_equal_seeds_give_equal_bytes_and_others_do_not(policy: str, planner: str) -> None:
    noise = Noise(arrival_jitter_s=2.0, speed_sigma=0.1)
    role = Role.NONE if planner == "never" else Role.KV_BOTH
    options = {"noise": noise, "role": role, "pool_tokens": 300_000, "decisions": True}
    first, again, other = (lines(run(AGENTS, policy, planner, seed=seed, **options)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_policy_that_fails_ends_the_simulation() -> None:
    """The proxy would let another policy decide; a result must be that of the one named."""
    from policies.registry import make_planner
    from policies.types import PolicyFailedError
    from sim.offline.simulate import simulate

    class Failing:
        name = "failing"

        def choose(self, *_: Any) -> Any:
            raise KeyError("lost")

    with pytest.raises(PolicyFailedError, match=r"policy 'failing' failed at request '.*': KeyError: 'lost'"):
        simulate(AGENTS, SimOptions(), Failing(), make_planner("never"))  # type: ignore[arg-type]


def test_the_plan_may_be_made_beforehand() -> None:
    from policies.registry import make_routing
    from sim.offline.simulate import simulate

    options = SimOptions(plan=PlanOptions(time_scale=2.0))
    plan = make_plan(AGENTS, options.plan)
    policy = make_routing("lmetric")
    assert lines(simulate(AGENTS, options, policy, plan=plan)) == lines(simulate(AGENTS, options, policy))


def test_turns_follow_one_another_as_a_replay_sends_them() -> None:
    """Every due time can be recomputed from the records."""
    options = PlanOptions(time_scale=3.0, think_scale=2.0, idle_gap_cap_s=5.0)
    plan = make_plan(AGENTS, options)
    sessions = by_session(run(AGENTS, plan=options).run.records)
    follow_ups = 0
    for session in plan.sessions:
        ended_s = -math.inf
        due_s = session.arrival_s
        for step, record in zip(session.steps, sessions[session.session_id], strict=True):
            if ended_s > -math.inf:
                due_s = ended_s + step.wait_s if step.after_end else max(due_s + step.wait_s, ended_s)
                follow_ups += 1
            assert record.scheduled_s == record.sent_s == pytest.approx(due_s)
            assert record.finished_s is not None
            ended_s = record.finished_s
    assert follow_ups > 50


def test_think_time_counts_from_the_end_of_the_turn_before() -> None:
    turns = conversation((0.0, 100, 500), (1.0, 120, 5), think_s=(None, 2.5))
    first, second = by_session(run(trace_of(turns)).run.records)["s"]
    assert first.finished_s is not None
    assert first.finished_s > 1.0
    assert second.scheduled_s == pytest.approx(first.finished_s + 2.5)


def test_sessions_wait_for_slots_in_order_of_arrival() -> None:
    whole = run(AGENTS, plan=PlanOptions(time_scale=50.0))
    slots = run(AGENTS, plan=PlanOptions(time_scale=50.0), max_inflight_sessions=3)
    for result, at_most in ((whole, math.inf), (slots, 3)):
        spans = [
            (min(each.sent_s or 0.0 for each in turns), max(each.finished_s or 0.0 for each in turns))
            for turns in by_session(result.run.records).values()
        ]
        most = max(sum(start <= at < end for start, end in spans) for at, _ in spans)
        assert most <= at_most
        if at_most == math.inf:
            assert most > 3
    firsts = [turns[0] for turns in by_session(slots.run.records).values()]
    begun = sorted(firsts, key=lambda record: (record.sent_s, record.scheduled_s))
    assert [record.scheduled_s for record in begun] == sorted(record.scheduled_s for record in firsts)
    assert sum((record.ttft_scheduled_s or 0.0) > (record.ttft_s or 0.0) for record in firsts) > 10


def test_without_eviction_the_router_predicts_cached_tokens_exactly() -> None:
    """Without eviction the shadow index is wrong only if two requests compute one prefix concurrently."""
    records = run(AGENTS, "session_sticky", pool_tokens=ROOMY_TOKENS).run.records
    wrong = [record for record in records if record.predicted_cached_tokens != record.cached_tokens]
    assert sum(record.cached_tokens or 0 for record in records) > 0
    assert not wrong


def test_in_a_small_pool_the_shadow_index_errs_as_it_does_live() -> None:
    """Engines keep generated tokens and hold blocks of what runs; the shadow counts neither."""
    result = run(AGENTS, pool_tokens=60_000, plan=PlanOptions(time_scale=20.0))
    errors = [(each.predicted_cached_tokens or 0) - (each.cached_tokens or 0) for each in result.run.records if each.ok]
    assert max(errors) > 0 > min(errors)
    assert sum(row.evictions for row in result.instances) > 0
    assert all(result.index_blocks[row.instance] <= row.total_blocks for row in result.instances)


def test_a_prompt_that_fits_no_instance_is_refused_and_its_session_continues() -> None:
    turns = conversation((0.0, 10, 5), (5.0, 100, 5), (10.0, 12, 5))
    result = run(trace_of(turns), pool_tokens=50 * 64)
    first, second, third = by_session(result.run.records)["s"]
    assert (first.ok, second.ok, third.ok) == (True, False, True)
    assert second.http_status == 400
    assert second.error is not None
    assert "the prompt has 6407" in second.error
    assert third.sent_s == pytest.approx(10.0)
    assert set(result.ledger.values()) == {0}
    assert summarise(result.run).ok == 2


def test_a_slower_fleet_is_slower_by_as_much() -> None:
    turns = trace_of(conversation((0.0, 200, 100)))
    (plain,), (slow,) = (run(turns, slowdown=factor).run.records for factor in (1.0, 1.5))
    assert plain.e2e_s is not None
    assert slow.e2e_s == pytest.approx(1.5 * plain.e2e_s)


def test_noise_shifts_sessions_and_spreads_speeds_within_bounds() -> None:
    noisy = run(AGENTS, noise=Noise(arrival_jitter_s=3.0, speed_sigma=0.2), instances=16, seed=5)
    slowness = [row.slowness for row in noisy.instances]
    assert len(set(slowness)) == 16
    assert all(math.exp(-0.8) <= each <= math.exp(0.8) for each in slowness)
    plan = {session.session_id: session.arrival_s for session in make_plan(AGENTS, PlanOptions()).sessions}
    shifts = [
        turns[0].scheduled_s - plan[session]
        for session, turns in by_session(noisy.run.records).items()
        if plan[session] > 12
    ]
    assert all(abs(shift) <= 12.0 for shift in shifts)
    assert 1.5 < (sum(shift * shift for shift in shifts) / len(shifts)) ** 0.5 < 4.5
    for turns in by_session(noisy.run.records).values():
        assert all((after.sent_s or 0.0) >= (before.finished_s or 0.0) for before, after in itertools.pairwise(turns))


def test_rows_have_the_fields_of_the_proxys_breakdown() -> None:
    from policies.row import Row

    result = run(AGENTS, decisions=True)
    live = Row("id", "/v1/completions", 0.0).as_dict()
    assert len(result.decisions) == len(AGENTS.requests)
    for row, record in zip(result.decisions, result.run.records, strict=True):
        assert row.keys() == live.keys()
        assert (row["instance"], row["request_id"], row["outcome"]) == (record.instance, record.request_id, "ok")
        assert len(row["scores"]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instances": 0}, "--instances"),
        ({"instances": 2, "prefill_instances": 2}, "--prefill-instances"),
        ({"prefill_instances": 1, "role": Role.KV_CONSUMER}, "leave --role out"),
        ({"profile": "gh9000"}, "h20, h200"),
        ({"pool_tokens": 10}, "holds no block"),
        ({"pool_tokens": -1}, "--pool-tokens"),
        ({"slowdown": 0.0}, "slowdown"),
        ({"max_inflight_sessions": 0}, "--max-inflight-sessions"),
        ({"noise": Noise(arrival_jitter_s=-1.0)}, "--arrival-jitter-s"),
        ({"transport": "pigeon"}, "transport"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        run(AGENTS, **options)


def test_scales_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SimulationError, match="--arrival-speed"):
        run(AGENTS, plan=PlanOptions(time_scale=0.0))


def test_the_bounds_are_the_proxys_defaults() -> None:
    from proxy.settings import OffloadSettings
    from proxy.settings.prediction import LedgerSettings
    from proxy.settings.routing import ClassSettings
    from proxy.settings.serving import HealthSettings

    bounds, live = HandOffBounds(), OffloadSettings()
    for name in ("prefill_timeout_s", "first_token_timeout_s", "abandoned_s", "hold_s"):
        assert getattr(bounds, name) == getattr(live, name)
    options = SimOptions()
    assert options.recent_half_life_s == LedgerSettings().recent_half_life_s
    assert options.probe_interval_s == HealthSettings().interval_s
    assert options.thresholds == ClassSettings().thresholds()


@pytest.mark.traces
@pytest.mark.parametrize(
    ("policy", "published_apc", "within"), [("session_sticky", 0.622, 0.02), ("round_robin", 0.199, 0.03)]
)
def test_a_public_trace_hits_as_published(policy: str, published_apc: float, within: float) -> None:
    """Without eviction: the hit rate of eight unlimited caches under this routing (round robin's depends on the order
    of turns of different sessions, which differs slightly from the trace's)."""
    folder = Path(os.environ.get("WARMROUTE_TRACES") or Path(__file__).parents[4] / "shared" / "traces")
    path = folder / "agentic" / "derived_glm_like_sample1k.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    result = run(load_trace(path), policy, instances=8, pool_tokens=ROOMY_TOKENS)
    summary = summarise(result.run)
    assert (summary.ok, summary.requests) == (1007, 1007)
    assert summary.apc == pytest.approx(published_apc, abs=within)
    exact = sum(record.predicted_cached_tokens == record.cached_tokens for record in result.run.records)
    assert exact >= 0.99 * len(result.run.records)


@settings(max_examples=15, deadline=None)
@given(
    sessions=st.lists(
        st.lists(st.tuples(st.floats(0, 5), st.integers(1, 60), st.integers(0, 80)), min_size=1, max_size=4),
        min_size=1,
        max_size=6,
    ),
    pool_blocks=st.integers(8, 120),
    max_num_seqs=st.integers(1, 4),
    policy=st.sampled_from(["lmetric", "session_sticky", "round_robin"]),
)
def test_whatever_the_load_all_is_recorded_and_released(
    sessions: list[list[tuple[float, int, int]]], pool_blocks: int, max_num_seqs: int, policy: str
) -> None:
    """With pools too small for a prompt, preemption and queues, every request has a record and no lease remains."""
    made = []
    for number, turns in enumerate(sessions):
        at_s, placed = 0.0, []
        for gap_s, blocks, output in turns:
            at_s += gap_s
            placed.append((at_s, blocks, output))
        made.append(conversation(*placed, session=f"s{number}", first_id=number * 10))
    trace = trace_of(*made)
    result = run(trace, policy, instances=2, pool_tokens=pool_blocks * 64, max_num_seqs=max_num_seqs)
    assert len(result.run.records) == len(trace.requests)
    assert set(result.ledger.values()) == {0}
    for record in result.run.records:
        assert record.ok is (record.input_length + 1 <= pool_blocks * 64)
