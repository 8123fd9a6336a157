"""Streamed traces: the same run as from memory, with a bounded part of the trace in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.registry import make_routing
from replayer.records.runs import RequestRecord
from replayer.replay.plan import PlanOptions, make_plan
from replayer.traces.formats import bailian
from replayer.traces.loading import LoadOptions, load_trace, stream
from replayer.traces.trace import Trace, TraceError, TraceRequest
from sim.offline.options import Noise, SimOptions, SimulationError
from sim.offline.reading import read_apart
from sim.offline.records import TraceSource
from sim.offline.simulate import OfflineRun, simulate
from sim.offline.streaming import StreamedLoop
from tests.sim.offline.offline_runs import agents, conversation, trace_of

AGENTS = agents(200)


def streamed(
    trace: Trace, requests: Iterator[TraceRequest], options: SimOptions, look_ahead_s: float = 600.0
) -> tuple[list[RequestRecord], StreamedLoop]:
    loop = StreamedLoop(requests, trace.sha256, options, look_ahead_s)
    source = TraceSource(trace.name, trace.sha256, trace.block_tokens, [])
    records: list[RequestRecord] = []
    OfflineRun(source, loop, None, options, make_routing("lmetric")).run(records.append)
    return records, loop


@pytest.mark.parametrize(
    "options",
    [
        SimOptions(instances=4),
        SimOptions(instances=4, plan=PlanOptions(time_scale=5.0, think_scale=2.0), pool_tokens=60_000),
        SimOptions(instances=4, noise=Noise(arrival_jitter_s=2.0, speed_sigma=0.1), seed=7),
        SimOptions(instances=2, plan=PlanOptions(time_scale=0.5, idle_gap_cap_s=3.0)),
    ],
)
def test_a_streamed_trace_gives_the_run_of_one_in_memory(options: SimOptions) -> None:
    whole = simulate(AGENTS, options, make_routing("lmetric")).run.records
    records, loop = streamed(AGENTS, iter(AGENTS.requests), options)
    assert records == whole
    assert loop.late_turns == 0


@settings(max_examples=15, deadline=None)
@given(
    sessions=st.lists(
        st.tuples(
            st.floats(0, 20),
            st.lists(
                st.tuples(st.floats(0, 30), st.integers(1, 20), st.integers(0, 60), st.none() | st.floats(0, 8)),
                min_size=1,
                max_size=4,
            ),
        ),
        min_size=1,
        max_size=6,
    ),
    time_scale=st.sampled_from([0.5, 1.0, 8.0]),
)
def test_any_closed_loop_is_the_same_streamed(
    sessions: list[tuple[float, list[tuple[float, int, int, float | None]]]], time_scale: float
) -> None:
    made = []
    for number, (start_s, turns) in enumerate(sessions):
        at_s, placed = start_s, []
        for gap_s, blocks, output, _ in turns:
            at_s += gap_s
            placed.append((at_s, blocks, output))
        made.append(
            conversation(*placed, session=f"s{number}", first_id=number * 10, think_s=tuple(turn[3] for turn in turns))
        )
    trace = trace_of(*made)
    options = SimOptions(instances=2, plan=PlanOptions(time_scale=time_scale))
    whole = simulate(trace, options, make_routing("lmetric")).run.records
    assert streamed(trace, iter(trace.requests), options, look_ahead_s=10_000.0)[0] == whole


def test_no_more_is_read_than_the_window_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests read ahead, except one, are within the look-ahead of the next due turn."""
    read: list[float] = []
    checked = 0
    next_s = StreamedLoop.next_s

    def watched() -> Iterator[TraceRequest]:
        for request in AGENTS.requests:
            read.append(request.timestamp_s)
            yield request

    def checking(loop: StreamedLoop) -> float:
        nonlocal checked
        before, due_s = len(read), next_s(loop)
        if len(read) > before:
            checked += 1
            assert read[-2] <= due_s + 20.0
        return due_s

    monkeypatch.setattr(StreamedLoop, "next_s", checking)
    requests = Trace(requests=[], block_tokens=AGENTS.block_tokens)
    records, _ = streamed(requests, watched(), SimOptions(instances=4), 20.0)
    assert len(records) == len(AGENTS.requests)
    assert checked > 50


def test_turns_beyond_the_window_come_late_and_are_counted() -> None:
    turns = conversation((0.0, 10, 2), (500.0, 12, 2))
    others = [conversation((float(at), 5, 2), session=f"o{at}", first_id=100 + at) for at in range(0, 600, 10)]
    trace = trace_of(turns, *others)
    options = SimOptions(instances=1, plan=PlanOptions(idle_gap_cap_s=5.0))
    wide, seen = streamed(trace, iter(trace.requests), options, 600.0)
    assert seen.late_turns == 0
    narrow, seen = streamed(trace, iter(trace.requests), options, 50.0)
    assert seen.late_turns == 1
    assert seen.most_late_s > 400.0
    assert {record.request_id for record in narrow} == {record.request_id for record in wide}
    (second,) = [record for record in narrow if record.turn == 2]
    assert (second.sent_s or 0.0) - second.scheduled_s == pytest.approx(seen.most_late_s)


def test_sessions_that_are_over_are_forgotten() -> None:
    sessions = [conversation((hour * 3600.0, 3, 1), session=f"s{hour}", first_id=hour * 10) for hour in range(50)]
    trace = trace_of(*sessions)
    _, loop = streamed(trace, iter(trace.requests), SimOptions(instances=1))
    assert loop.most_sessions <= 6


@pytest.mark.parametrize("limit", [1, 17, 90, 199, 200, 1000])
def test_a_request_limit_takes_the_sessions_that_it_takes_in_memory(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    bailian.write(path, AGENTS.requests)
    options = SimOptions(instances=2, plan=PlanOptions(request_limit=limit))
    plan = make_plan(AGENTS, options.plan)
    whole = simulate(AGENTS, options, make_routing("lmetric")).run.records
    with read_apart(path, LoadOptions(), limit) as opened:
        records, _ = streamed(AGENTS, opened.requests, options)
        assert opened.cut_session == plan.cut_session
    assert [(record.chat_id, record.sent_s) for record in records] == [(each.chat_id, each.sent_s) for each in whole]


def test_a_file_is_read_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    bailian.write(path, AGENTS.requests)
    trace = load_trace(path)
    options = SimOptions(instances=4, pool_tokens=100_000)
    whole = simulate(trace, options, make_routing("lmetric")).run.records
    with read_apart(path, LoadOptions()) as opened:
        assert (opened.name, opened.sha256, opened.block_tokens) == (trace.name, trace.sha256, trace.block_tokens)
        records, _ = streamed(trace, opened.requests, options)
    assert records == whole


def test_what_the_reader_finds_wrong_is_raised_here(tmp_path: Path) -> None:
    backwards = tmp_path / "backwards.jsonl"
    bailian.write(backwards, reversed(AGENTS.requests))
    with pytest.raises(TraceError, match="comes before"), read_apart(backwards, LoadOptions(time_unit="s")) as opened:
        list(opened.requests)
    with pytest.raises(TraceError, match="no such file"), read_apart(tmp_path / "none.jsonl", LoadOptions()):
        pass


def test_leaving_early_ends_the_reader(tmp_path: Path) -> None:
    import multiprocessing

    path = tmp_path / "trace.jsonl"
    bailian.write(path, AGENTS.requests)
    with read_apart(path, LoadOptions()) as opened:
        next(opened.requests)
        assert any(child.name == "trace-reader" for child in multiprocessing.active_children())
    assert not any(child.name == "trace-reader" for child in multiprocessing.active_children())


@pytest.mark.parametrize(
    ("options", "look_ahead_s", "message"),
    [
        (SimOptions(max_inflight_sessions=3), 600.0, "--max-inflight-sessions"),
        (SimOptions(noise=Noise(arrival_jitter_s=10.0)), 60.0, "--look-ahead-s must be at least 80"),
        (SimOptions(), -1.0, "--look-ahead-s"),
        (SimOptions(), math.nan, "--look-ahead-s"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(options: SimOptions, look_ahead_s: float, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        StreamedLoop(iter(AGENTS.requests), "", options, look_ahead_s)


def test_scales_and_empty_streams_are_refused() -> None:
    with pytest.raises(TraceError, match="--arrival-speed"):
        StreamedLoop(iter(AGENTS.requests), "", SimOptions(plan=PlanOptions(time_scale=-1.0)), 600.0)
    with pytest.raises(TraceError, match="no requests"):
        StreamedLoop(iter(()), "", SimOptions(), 600.0)


def test_a_stream_has_the_times_and_the_sharing_of_a_loaded_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    bailian.write(path, AGENTS.requests)
    loaded, opened = load_trace(path), stream(path)
    assert [request.timestamp_s for request in opened.requests] == [each.timestamp_s for each in loaded.requests]
