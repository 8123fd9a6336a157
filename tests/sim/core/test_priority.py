"""Priority scheduling: the order of waiting requests, and which running one is preempted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.engine import Engine
from sim.core.sequence import Sequence
from sim.core.waiting import PriorityQueue
from tests.sim.core.test_scheduler import plan_of
from tests.sim.sim_engines import accounted, drain, make_engine, make_request


def engine_of(**config: Any) -> Engine:
    return make_engine(**{"priority_scheduling": True, **config})


def sequence_of(name: str, priority: int, arrival: int) -> Sequence:
    sequence = Sequence(make_request(name, range(4))._replace(priority=priority), 4, 64)
    sequence.arrival = arrival
    return sequence


def submit(engine: Engine, name: str, priority: int, tokens: int, output: int = 1, at_s: float = 0.0) -> None:
    """A prompt that shares no block with one of another name."""
    engine.submit(make_request(name, [ord(name)] * tokens, output)._replace(priority=priority), at_s)


def ended(engine: Engine, now_s: float = 0.0) -> list[str]:
    return [event.request_id for event in drain(engine, now_s)[0] if event.finish_reason]


def test_the_queue_is_by_priority_then_by_arrival_wherever_a_request_is_put() -> None:
    queue = PriorityQueue()
    late, urgent, early, last = (
        sequence_of(*each) for each in (("late", 1, 3), ("urgent", -7, 4), ("early", 1, 1), ("last", 2, 2))
    )
    for put, each in (
        (queue.append, late),
        (queue.appendleft, last),
        (queue.append, urgent),
        (queue.appendleft, early),
    ):
        put(each)
    assert list(queue) == [urgent, early, late, last]
    assert (queue[0], len(queue), queue.popleft()) == (urgent, 4, urgent)
    queue.remove(late)
    assert [queue.popleft(), queue.popleft()] == [early, last]
    assert not queue


@pytest.mark.parametrize(("by_priority", "order"), [(True, "aecdb"), (False, "abcde")])
def test_waiting_requests_are_admitted_in_order(by_priority: bool, order: str) -> None:
    engine = engine_of(priority_scheduling=by_priority, max_num_seqs=1)
    submit(engine, "a", 9, 5, 3)
    engine.begin_step(0.0)  # runs, so it is not overtaken
    for name, priority in zip("bcde", (5, 1, 1, -3), strict=True):
        submit(engine, name, priority, 5)
    assert ended(engine) == list(order)


def test_one_that_arrives_later_overtakes_one_that_waits_for_blocks() -> None:
    """Running: 4 of 6 blocks. The long one needs 5; the short one needs 1, and waits for it unless it goes first."""
    finished = {}
    for by_priority in (True, False):
        engine = engine_of(priority_scheduling=by_priority, num_blocks=6, max_model_len=24)
        submit(engine, "a", 0, 13, 3)
        submit(engine, "l", 9, 17)
        submit(engine, "s", 1, 3, at_s=0.005)
        finished[by_priority] = ended(engine)
        assert not engine.counters.preemptions
    assert finished == {True: ["s", "a", "l"], False: ["a", "l", "s"]}


def preempting(**requests: tuple[int, int]) -> Engine:
    """An engine of 4 blocks whose two requests have (priority, prompt tokens), in the step in which blocks are short.

    Both have two blocks. One of 8 tokens needs a third one then, one of 5 does not.
    """
    engine = engine_of(num_blocks=4, max_model_len=16)
    for name, (priority, tokens) in requests.items():
        submit(engine, name, priority, tokens, 4)
    end_s = engine.begin_step(0.0)
    assert end_s is not None
    engine.end_step()
    assert (engine.state().running, engine.counters.preemptions) == (2, 0)
    assert engine.begin_step(end_s) is not None
    assert engine.counters.preemptions == 1
    assert engine.state().running == 1
    return engine


@pytest.mark.parametrize(
    ("requests", "victim", "left"),
    [
        ({"a": (5, 5), "b": (0, 8)}, "a", "b"),  # already planned in this step when b needs a block
        ({"a": (0, 5), "b": (5, 8)}, "b", "a"),  # needs the block itself, after a was planned
        ({"a": (5, 8), "b": (0, 5)}, "a", "b"),  # needs the block itself, and is the first: b goes on
        ({"a": (0, 8), "b": (5, 5)}, "b", "a"),  # not planned yet
        ({"a": (3, 8), "b": (3, 5)}, "b", "a"),  # of equals, the one that arrived last
        ({"a": (3, 5), "b": (3, 8)}, "b", "a"),
    ],
)
def test_the_last_in_order_is_preempted_wherever_it_runs(
    requests: dict[str, tuple[int, int]], victim: str, left: str
) -> None:
    engine = preempting(**requests)
    assert plan_of(engine) == ([left], [])
    (waiting,) = engine.scheduler.waiting
    assert waiting.request.request_id == victim
    assert waiting.computed == 0
    assert ended(engine) == [left, victim]
    assert engine.counters.generation_tokens == 8
    assert engine.state().free_blocks == 4


def test_without_priority_scheduling_the_newest_is_preempted_whatever_its_priority() -> None:
    engine = engine_of(priority_scheduling=False, num_blocks=4, max_model_len=16)
    submit(engine, "a", 5, 8, 4)
    submit(engine, "b", 0, 5, 4)
    assert ended(engine) == ["a", "b"]
    assert engine.counters.preemptions == 1


def test_what_a_victim_was_to_compute_is_left_for_the_others_of_the_step() -> None:
    """Budget 8: the token of a, which is preempted for b, goes to b's chunk."""
    engine = engine_of(num_blocks=5, max_model_len=20, max_num_batched_tokens=8)
    submit(engine, "a", 5, 7, 6)
    end_s = engine.begin_step(0.0)
    assert end_s is not None
    engine.end_step()
    submit(engine, "b", 0, 15, 1, at_s=end_s)
    end_s = engine.begin_step(end_s)
    assert plan_of(engine) == (["a"], [("b", 7, 0)])
    assert end_s is not None
    engine.end_step()
    assert engine.begin_step(end_s) is not None
    # a, planned first, takes the only free block; b needs two more.
    assert plan_of(engine) == ([], [("b", 8, 7)])
    assert ended(engine) == ["b", "a"]


@given(
    requests=st.lists(
        st.tuples(st.integers(-3, 3), st.integers(1, 30), st.integers(1, 20), st.floats(0, 0.4)),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(13, 20),
    budget=st.sampled_from([4, 9, 64]),
)
@settings(max_examples=150, deadline=None)
def test_every_request_ends_and_frees_its_blocks(
    requests: list[tuple[int, int, int, float]], blocks: int, budget: int
) -> None:
    engine = engine_of(num_blocks=blocks, max_model_len=52, max_num_batched_tokens=budget)
    now_s, events = 0.0, []
    for number, (priority, tokens, output, at_s) in enumerate(sorted(requests, key=lambda each: each[3])):
        while engine.step_end_s is not None and engine.step_end_s <= at_s:
            now_s = engine.step_end_s
            events += engine.end_step()
            assert accounted(engine)
            engine.begin_step(now_s)
        engine.submit(make_request(f"r{number}", [number] * tokens, output)._replace(priority=priority), at_s)
        if engine.step_end_s is None:
            now_s = at_s
            engine.begin_step(now_s)
    events += drain(engine, now_s)[0]
    assert sorted(each.request_id for each in events if each.finish_reason) == sorted(
        f"r{number}" for number in range(len(requests))
    )
    state = engine.state()
    assert (state.free_blocks, state.running, state.waiting) == (blocks, 0, 0)
    assert engine.counters.generation_tokens == sum(output for _, _, output, _ in requests)
