"""Shared beginning of a session's prompts, found from a few marks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replayer.replay.own_prefix import PromptMarks
from replayer.replay.plan import PlanOptions, Step, make_plan
from replayer.traces.trace import Trace, TraceRequest


def shared_after(before: list[int], ids: list[int]) -> int:
    marks = PromptMarks()
    assert marks.next(before) == 0
    return marks.next(ids)


@given(size=st.integers(0, 300), more=st.integers(0, 300), dropped=st.integers(0, 2))
def test_a_prompt_that_continues_the_one_before_is_found_exactly(size: int, more: int, dropped: int) -> None:
    kept = max(size - dropped, 0)
    ids = [*range(kept), *range(10_000, 10_000 + more)]
    assert shared_after(list(range(size)), ids) == kept


@given(size=st.integers(1, 300), data=st.data())
def test_a_prompt_that_leaves_the_one_before_is_found_to_half(size: int, data: st.DataObject) -> None:
    true = data.draw(st.integers(0, size))
    found = shared_after(list(range(size)), [*range(true), *range(10_000, 10_000 + size)])
    assert true / 2 <= found <= true


def test_marks_are_few() -> None:
    marks = PromptMarks()
    marks.next(range(100_000))
    assert len(marks._ids) <= 36


def request(turn: int, blocks: int, length: int) -> TraceRequest:
    return TraceRequest(
        chat_id=turn,
        session_id="s",
        turn=turn,
        timestamp_s=float(turn),
        input_length=length,
        output_length=5,
        hash_ids=tuple(range(blocks)),
    )


def test_a_plan_knows_what_each_turn_repeats() -> None:
    trace = Trace(requests=[request(1, 3, 200), request(2, 3, 192), request(3, 9, 600)], block_tokens=64)
    [session] = make_plan(trace, PlanOptions()).sessions
    assert [step.own_blocks for step in session.steps] == [0, 3, 3]
    # The last token of a prompt is always computed, so its block is, too.
    assert [step.own_prefix_tokens(64) for step in session.steps] == [0, 128, 192]


def test_a_step_without_a_prompt_repeats_nothing() -> None:
    assert Step(TraceRequest(chat_id=1), "r", 0.0, False, 4).own_prefix_tokens(64) == 0


def test_the_plan_names_the_session_that_the_limit_cut() -> None:
    trace = Trace(requests=[request(1, 3, 200), request(2, 3, 192)], block_tokens=64)
    assert make_plan(trace, PlanOptions(request_limit=1)).cut_session == "s"
    assert make_plan(trace, PlanOptions(request_limit=2)).cut_session is None
