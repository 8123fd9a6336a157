"""Completion time and slowdown of sessions: figures by hand, failed and cut sessions, bounded memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replayer.records.idle import IdleCosts
from replayer.records.runs import RequestRecord, Run, RunEnd, RunHeader
from replayer.records.sessions import SessionTally, session_clocks, session_tally
from replayer.records.summary import summarise
from replayer.records.tables import summary_lines
from sim.hardware import load_profile
from sim.offline.records import idle_costs

SECOND = IdleCosts(
    request_s=1.0,
    prompt_token_s=0.0,
    prefill_step_s=0.0,
    prefill_floor_s=0.0,
    new_token_s=0.0,
    attention_s=0.0,
    decode_s=0.0,
    decode_context_s=0.0,
)
"""Every turn takes a second on an idle fleet."""


def turn(number: int, due_s: float, ended_s: float, session: str = "s", **changes: object) -> RequestRecord:
    """A turn that waits 4 s after the end of the one before."""
    values: dict[str, object] = {
        "request_id": f"{session}-{number}",
        "session_id": session,
        "turn": number,
        "chat_id": number,
        "trace_timestamp_s": 0.0,
        "scheduled_s": due_s,
        "sent_s": due_s + 0.25,
        "finished_s": ended_s,
        "input_length": 100,
        "output_length": 1,
        "wait_s": 0.0 if number == 1 else 4.0,
        "wait_after_end": number > 1,
        "own_prefix_tokens": 0,
        "ok": True,
    }
    return RequestRecord(**(values | changes))  # type: ignore[arg-type]


def run_of(records: list[RequestRecord], *, ended: bool = True, **header: object) -> Run:
    head = RunHeader(**({"idle_costs": SECOND} | header))  # type: ignore[arg-type]
    return Run(head, records, RunEnd(finished_unix_s=0.0, requests=len(records), ok=len(records)) if ended else None)


def test_a_session_lasts_from_when_its_first_turn_was_due_to_the_end_of_its_last() -> None:
    [clock] = session_clocks(run_of([turn(1, 10.0, 13.0), turn(2, 17.0, 19.0)])).values()
    assert clock.completion_s == 9.0, "waiting to be sent and the think time count"
    assert clock.slowdown == pytest.approx(9.0 / (1 + 4 + 1))


def test_the_order_of_the_records_does_not_matter() -> None:
    [clock] = session_clocks(run_of([turn(2, 17.0, 19.0), turn(1, 10.0, 13.0)])).values()
    assert (clock.completion_s, clock.turns) == (9.0, 2)


@pytest.mark.parametrize(("first_took_s", "second_due_s"), [(1.0, 4.0), (9.0, 9.0)])
def test_a_gap_that_a_slow_turn_fills_still_counts_for_the_idle_fleet(first_took_s: float, second_due_s: float) -> None:
    """The gap runs from one due time to the next: an idle fleet waits 3 of the 4 s, however long this fleet took."""
    records = [turn(1, 0.0, first_took_s), turn(2, second_due_s, second_due_s + 1, wait_after_end=False)]
    [clock] = session_clocks(run_of(records)).values()
    assert clock.slowdown == pytest.approx((second_due_s + 1) / 5.0)


def test_a_gap_shorter_than_an_idle_turn_does_not_shorten_it() -> None:
    records = [turn(1, 0.0, 2.0), turn(2, 2.0, 4.0, wait_s=0.25, wait_after_end=False)]
    [clock] = session_clocks(run_of(records)).values()
    assert clock.slowdown == pytest.approx(4.0 / 2.0)


def test_a_session_with_a_failed_turn_is_counted_and_has_no_time() -> None:
    failed = [turn(1, 0.0, 1.0, "f"), turn(2, 5.0, 5.0, "f", ok=False, error="http 503: busy")]
    run = run_of([turn(1, 0.0, 2.0), *failed])
    found = summarise(run).sessions
    assert (found.sessions, found.completed, found.failed, found.cut) == (2, 1, 1, 0)
    assert (found.completion_s.n, found.completion_s.mean, found.completion_s.p90) == (1, 2.0, 2.0)
    assert "1 of 2 sessions completed (1 with a failed turn)" in "\n".join(summary_lines(summarise(run)))


def test_the_session_that_the_limit_cut_has_no_time() -> None:
    records = [turn(1, 0.0, 2.0), turn(1, 1.0, 2.0, "cut")]
    header: dict[str, Any] = {"request_limit": 2, "offered": {"cut_sessions": 1}}
    named = session_tally([run_of(records, cut_session="cut", **header)]).figures()
    assert (named.completed, named.cut, named.completion_s.mean) == (1, 1, 2.0)
    unnamed = session_tally([run_of(records, **header)]).figures()
    assert (unnamed.completed, unnamed.cut) == (0, 2), "any of them may be the one"


@pytest.mark.parametrize(
    ("header", "ended", "completed"),
    [
        ({}, True, 1),
        ({}, False, 0),
        ({"request_limit": 1, "offered": {"cut_sessions": 0}}, True, 1),
        ({"request_limit": 1}, True, 0),
        ({"request_limit": 2}, True, 1),
    ],
    ids=["whole", "interrupted", "the limit cut none", "a stream at its limit", "a stream below its limit"],
)
def test_sessions_have_times_only_where_they_are_known_to_be_whole(
    header: dict[str, Any], ended: bool, completed: int
) -> None:
    assert session_tally([run_of([turn(1, 0.0, 1.0)], ended=ended, **header)]).figures().completed == completed


def test_files_without_the_plans_waits_give_completion_and_no_slowdown() -> None:
    records = [turn(1, 0.0, 1.0, wait_s=None, own_prefix_tokens=None), turn(2, 5.0, 6.0)]
    found = summarise(run_of(records)).sessions
    assert (found.completion_s.mean, found.slowdown.n, found.slowdown.mean) == (6.0, 0, None)


def test_repeats_of_one_session_are_sessions_of_their_own() -> None:
    runs = [run_of([turn(1, 0.0, took)]) for took in (1.0, 3.0)]
    pooled = runs[0]._replace(records=[*runs[0].records, *runs[1].records])
    found = summarise(pooled, sessions=session_tally(runs)).sessions
    assert (found.sessions, found.completion_s.mean) == (2, 2.0)


def test_memory_holds_the_sessions_in_progress_only() -> None:
    tally = SessionTally(SECOND)
    for number in range(1000):
        for step in range(3):
            tally.add(turn(step + 1, number + step, number + step + 0.5, f"s{number}"))
        assert tally.in_progress == 1
        tally.over(f"s{number}")
    assert tally.in_progress == 0
    assert tally.figures().completed == 1000


def test_an_unknown_session_that_is_over_is_not_counted() -> None:
    tally = SessionTally(SECOND)
    tally.over("never sent")
    assert tally.figures().sessions == 0


def test_the_reference_costs_are_those_of_the_h200_profile() -> None:
    profile = load_profile("h200")
    measured = idle_costs(profile, profile.max_num_batched_tokens)
    reference = msgspec.structs.asdict(IdleCosts())
    for name, value in msgspec.structs.asdict(measured).items():
        if name != "source":
            assert reference[name] == pytest.approx(value), name
    assert profile.name in IdleCosts().source


def test_cached_tokens_and_steps_count_in_the_idle_time() -> None:
    costs = IdleCosts()
    cold, warm = costs.turn_s(50_000, 0, 100), costs.turn_s(50_000, 49_000, 100)
    assert cold > 2 * warm
    further = costs.turn_s(50_000, 0, 101) - cold
    assert further == pytest.approx(costs.decode_s + costs.decode_context_s * 50_100)
    assert costs.turn_s(10, 0, 0) == costs.turn_s(10, 0, 1)
