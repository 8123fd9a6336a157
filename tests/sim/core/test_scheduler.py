"""Scheduling: budgets, order, chunked prefill, preemption, prefix hits, ends of requests, fused decode steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.content import chain_keys, output_bytes
from sim.core.engine import Engine
from sim.core.sequence import Request
from sim.core.types import EngineConfig
from tests.sim.sim_engines import BLOCK, TIMING, accounted, drain, keys_of, make_engine, make_request, transfer_seconds


def plan_of(engine: Engine) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Work of the step in flight: names of decodes; (name, new tokens, context) of chunks."""
    step = engine._step
    assert step is not None
    chunks = [(sequence.request.request_id, count, before) for sequence, count, before in step.plan.chunks]
    together = [sequence for sequence in engine.scheduler.running if sequence.decoding] if step.plan.decoders else []
    return [sequence.request.request_id for sequence in (*together, *step.plan.streams)], chunks


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = make_engine(max_num_batched_tokens=10)
    engine.submit(make_request("a", range(25)), 0.0)
    seen = []
    while engine.begin_step(0.0, 0.0) is not None:
        seen += plan_of(engine)[1]
        events = engine.end_step()
    assert seen == [("a", 10, 0), ("a", 10, 10), ("a", 5, 20)]
    assert [event.finish_reason for event in events] == ["length"]


def test_running_requests_come_first_and_the_rest_of_the_budget_goes_to_the_queue_in_order() -> None:
    engine = make_engine(max_num_batched_tokens=10)
    engine.submit(make_request("old", range(3), 50), 0.0)
    engine.begin_step(0.0)
    engine.end_step()
    engine.submit(make_request("b", range(100, 107)), 0.1)
    engine.submit(make_request("c", range(200, 207)), 0.1)
    engine.begin_step(0.1)
    assert plan_of(engine) == (["old"], [("b", 7, 0), ("c", 2, 0)])


def test_a_step_takes_what_its_parts_cost() -> None:
    engine = make_engine(max_num_batched_tokens=10)
    engine.submit(make_request("old", range(3), 50), 0.0)
    engine.begin_step(0.0)
    engine.end_step()
    engine.submit(make_request("b", range(100, 108)), 1.0)
    end_s = engine.begin_step(1.0)
    chunk_s = 8 * (TIMING.prefill_token_s + TIMING.prefill_context_s * 4)
    assert end_s == pytest.approx(1.0 + max(0.010, 0.001 + chunk_s) + TIMING.decode_context_s * 4)


def test_the_front_end_delays_a_request_but_not_the_decodes() -> None:
    engine = make_engine(TIMING._replace(frontend_s=1.0, frontend_token_s=0.5))
    engine.submit(make_request("a", range(4)), 10.0)
    assert engine.begin_step(10.0) is None
    assert engine.next_event_s() == pytest.approx(13.0)
    assert engine.waiting == 1
    assert engine.begin_step(13.0) is not None


def test_no_more_than_max_num_seqs_run() -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.submit(make_request(name, [ord(name)] * 5, 3), 0.0)
    engine.begin_step(0.0)
    assert (engine.state().running, engine.state().waiting) == (2, 1)
    events, _ = drain(engine)
    assert {event.request_id for event in events if event.finish_reason} == set("abc")


def test_a_request_waits_while_the_pool_is_full() -> None:
    engine = make_engine(num_blocks=6, max_model_len=24)
    engine.submit(make_request("a", range(16), 4), 0.0)
    engine.submit(make_request("b", range(100, 112), 2), 0.0)
    engine.begin_step(0.0)
    assert (engine.state().running, engine.state().waiting) == (1, 1)
    events, _ = drain(engine)
    assert [event.request_id for event in events if event.finish_reason] == ["a", "b"]


def test_the_newest_request_is_preempted_and_computed_again() -> None:
    engine = make_engine(num_blocks=6, max_model_len=24)
    engine.submit(make_request("old", range(8), 12), 0.0)
    engine.submit(make_request("new", range(100, 108), 12), 0.0)
    finished: list[str] = []
    tokens = {"old": 0, "new": 0}
    now_s = 0.0
    preempted_when_old_ran = False
    while (end_s := engine.begin_step(now_s)) is not None:
        now_s = end_s
        if engine.counters.preemptions and not finished:
            preempted_when_old_ran = plan_of(engine)[0] == ["old"]
        for event in engine.end_step():
            tokens[event.request_id] += event.tokens
            if event.finish_reason:
                finished.append(event.request_id)
    assert engine.counters.preemptions >= 1
    assert preempted_when_old_ran
    assert finished == ["old", "new"]
    assert tokens == {"old": 12, "new": 12}
    assert engine.state().free_blocks == 6


def test_hits_stop_short_of_the_last_prompt_token() -> None:
    engine = make_engine()
    for name in "ab":
        engine.submit(make_request(name, range(8)), 0.0)
        events, _ = drain(engine)
    assert events[0].cached_tokens == 4  # 8 tokens are two full blocks, of which 7 tokens count


def test_requests_of_one_step_share_what_the_first_of_them_computes() -> None:
    engine = make_engine()
    engine.submit(make_request("a", range(16)), 0.0)
    engine.submit(make_request("b", [*range(12), 99, 98]), 0.0)
    engine.begin_step(0.0)
    assert plan_of(engine)[1] == [("a", 16, 0), ("b", 2, 12)]
    assert {event.request_id: event.cached_tokens for event in engine.end_step()} == {"a": 0, "b": 12}


def test_generated_blocks_are_cached_too() -> None:
    engine = make_engine()
    first = make_request("a", range(6), 10)
    engine.submit(first, 0.0)
    drain(engine)
    text = output_bytes(first.output_offset, 0, 10)
    prompt = make_request("x", range(6)).tail  # tokens 4 and 5
    full = b"".join(index.to_bytes(4, "little") for index in range(4)) + prompt + text
    engine.submit(Request.from_tokens("b", full + b"next", BLOCK), 5.0)
    events, _ = drain(engine, 5.0)
    # 6 + 10 tokens; the KV of the last generated token was never computed: 15 tokens, 3 full blocks.
    assert events[0].cached_tokens == 12


@given(
    st.lists(
        st.lists(st.integers(0, 1), min_size=1, max_size=12).map(lambda bits: [bit for bit in bits for _ in range(2)]),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_hits_equal_a_brute_force_search_when_nothing_is_evicted(prompts: list[list[int]]) -> None:
    engine = make_engine(num_blocks=2000, max_model_len=100)
    seen: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        engine.submit(make_request(str(number), prompt), float(number))
        events, _ = drain(engine, float(number))
        expected = 0
        for before in seen:
            same = 0
            while same < min(len(before), len(prompt)) and before[same] == prompt[same]:
                same += 1
            # Only blocks that the earlier prompt filled count, and never the prompt's last token.
            expected = max(expected, min(same, len(prompt) - 1) // BLOCK * BLOCK)
        assert events[0].cached_tokens == expected
        seen.append(prompt)


def test_precomputed_keys_and_token_ids_are_the_same_request() -> None:
    engine = make_engine()
    engine.submit(make_request("ids", range(15)), 0.0)
    drain(engine)
    engine.submit(Request("keys", 15, keys_of(range(15))), 1.0)
    events, _ = drain(engine, 1.0)
    assert events[0].cached_tokens == 12


@pytest.mark.parametrize(
    ("options", "tokens", "reason"),
    [
        ({"max_tokens": 5}, 5, "length"),
        ({"max_tokens": 5, "stop_after": 3}, 3, "stop"),
        ({"max_tokens": 5, "stop_after": 1, "min_tokens": 3}, 4, "stop"),
        ({"max_tokens": 3, "stop_after": 1, "min_tokens": 3}, 3, "length"),
        ({"max_tokens": 3, "stop_after": 3}, 3, "stop"),
        ({"max_tokens": 1, "stop_after": 1, "min_tokens": 1}, 1, "length"),
        ({"max_tokens": 9999}, 24, "length"),
    ],
)
def test_where_and_why_a_request_ends(options: dict[str, int], tokens: int, reason: str) -> None:
    engine = make_engine(num_blocks=8)
    engine.submit(make_request("a", range(8), **options), 0.0)
    events, _ = drain(engine)
    assert sum(event.tokens for event in events) == tokens
    assert [event.finish_reason for event in events if event.finish_reason] == [reason]
    assert engine.counters.finished == {reason: 1}


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_an_abort_frees_everything_at_any_moment(steps_before: int) -> None:
    engine = make_engine(max_num_batched_tokens=10)
    engine.submit(make_request("a", range(25), 100), 0.0)
    for _ in range(steps_before):
        engine.begin_step(0.0, 0.0)
        engine.end_step()
    engine.begin_step(0.0, 0.0)
    assert engine.abort("a")
    assert engine.end_step() == []
    assert not engine.abort("a")
    assert engine.state().free_blocks == 64
    assert engine.live_requests == 0
    assert engine.counters.finished == {"abort": 1}


def test_what_can_never_be_served_is_refused() -> None:
    engine = make_engine(num_blocks=4)
    with pytest.raises(ValueError, match="no room"):
        engine.submit(make_request("long", range(16)), 0.0)
    with pytest.raises(ValueError, match="at least 1 prompt token"):
        engine.submit(Request("empty", 0, []), 0.0)
    with pytest.raises(ValueError, match="full blocks but 1 keys"):
        engine.submit(Request("keys", 8, [1]), 0.0)
    engine.submit(make_request("a", range(4)), 0.0)
    with pytest.raises(ValueError, match="in use"):
        engine.submit(make_request("a", range(4)), 0.0)
    with pytest.raises(ValueError, match="does not fit the KV pool"):
        EngineConfig(num_blocks=1, block_tokens=4, max_model_len=5)


def test_decode_steps_are_fused_until_something_can_happen() -> None:
    engine = make_engine()
    engine.submit(make_request("a", range(8), 40), 0.0)
    engine.begin_step(0.0)
    engine.end_step()
    end_s = engine.begin_step(1.0)
    assert end_s is not None
    (event,) = engine.end_step()
    assert (event.tokens, event.finish_reason) == (39, "length")
    steps_s = sum(TIMING.decode(1, 9 + step) for step in range(39))
    assert end_s == pytest.approx(1.0 + steps_s)


def test_an_arrival_ends_a_run_at_the_next_step_boundary() -> None:
    engine = make_engine()
    engine.submit(make_request("a", range(8), 40), 0.0)
    engine.begin_step(0.0)
    engine.end_step()
    engine.begin_step(0.0)
    engine.submit(make_request("b", range(50, 58)), 0.095)
    assert engine.step_end_s == pytest.approx(sum(TIMING.decode(1, 9 + step) for step in range(10)))
    (event,) = engine.end_step()
    assert event.tokens == 10


def replay(
    requests: list[tuple[float, Request]], blocks: int, horizon: float, cuts: list[float]
) -> tuple[dict[str, tuple[float, float, int, int]], Engine]:
    """(first token at, finished at, tokens, cached) of each request; ``horizon`` 0 takes decode steps one by one."""
    engine = make_engine(num_blocks=blocks, max_num_batched_tokens=16, max_num_seqs=4)
    times: dict[str, tuple[float, float, int, int]] = {}
    for at_s, request in requests:
        engine.submit(request, at_s)
    now_s = 0.0
    cuts = sorted(cuts, reverse=True)
    while True:
        end_s = engine.begin_step(now_s, now_s + horizon)
        if end_s is None:
            next_s = engine.next_event_s()
            if math.isinf(next_s) or next_s <= now_s:
                return times, engine
            now_s = next_s
            continue
        while cuts and cuts[-1] < end_s:
            if cuts[-1] > now_s:
                engine.interrupt(cuts[-1])
                end_s = engine.step_end_s or end_s
            cuts.pop()
        now_s = end_s
        for event in engine.end_step():
            first, _, tokens, cached = times.get(event.request_id, (event.time_s, 0.0, 0, event.cached_tokens))
            times[event.request_id] = (first, event.time_s, tokens + event.tokens, cached)
        assert accounted(engine)


@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 30), st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=10
    ),
    st.lists(st.floats(0, 5), max_size=10),
    st.sampled_from([16, 24, 100]),
)
@settings(max_examples=40, deadline=None)
def test_fused_and_single_decode_steps_are_the_same_engine(
    specs: list[tuple[float, int, int, int]], cuts: list[float], blocks: int
) -> None:
    requests = [
        (at_s, make_request(str(number), [family] * length, output))
        for number, (at_s, length, family, output) in enumerate(specs)
    ]
    single, one = replay(requests, blocks, 0.0, [])
    fused, many = replay(requests, blocks, math.inf, cuts)
    assert single.keys() == fused.keys() == {request.request_id for _, request in requests}
    for name, (first_s, end_s, tokens, cached) in single.items():
        assert fused[name] == (pytest.approx(first_s), pytest.approx(end_s), tokens, cached)
    assert one.state() == many.state()
    assert one.counters == many.counters
    assert one.scheduler.pool.reuse_order() == many.scheduler.pool.reuse_order()
    assert one.scheduler.pool.cached_keys() == many.scheduler.pool.cached_keys()


def test_equal_prompts_give_equal_output_everywhere_and_seeds_change_it() -> None:
    one = Request.from_tokens("a", b"same prompt!" * 30, BLOCK)
    two = Request.from_tokens("b", b"same prompt!" * 30, BLOCK)
    other = Request.from_tokens("c", b"same prompt!" * 30, BLOCK, seed=1)
    assert one.output_offset == two.output_offset != other.output_offset
    assert Engine(EngineConfig(num_blocks=9, max_model_len=9), TIMING, transfer_seconds).live_requests == 0
    keys = chain_keys(b"same prompt!" * 30, BLOCK)
    assert list(one.block_keys) == keys
    assert len(set(keys)) == len(keys)
