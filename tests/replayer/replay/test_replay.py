"""The replay against a stub: order, schedule, failures, resume, and no request lost."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest

from replayer.records.runs import RecordError, RequestRecord, Run, read_run
from replayer.records.summary import summarise
from replayer.records.tables import summary_lines
from replayer.replay.endpoint import EndpointError
from replayer.replay.plan import PlanOptions
from replayer.replay.replay import ReplayOptions, replay_trace
from replayer.traces.trace import Trace, TraceRequest
from tests.full_disk import limited_to
from tests.replayer.conftest import Stub, make_trace

FAST = PlanOptions(time_scale=1e6)


def options(stub: Stub, **changes: object) -> ReplayOptions:
    base = ReplayOptions(endpoint=stub.url, plan=FAST, timeout_s=60.0)
    return msgspec.structs.replace(base, **changes)


def assert_one_record_each(run: Run, trace: Trace) -> None:
    assert run.end is not None
    assert sorted(record.chat_id for record in run.records) == sorted(request.chat_id for request in trace.requests)
    assert run.end.requests == len(trace.requests)
    assert run.end.ok == sum(record.ok for record in run.records)


async def test_turns_of_a_session_never_overlap_and_come_in_order(stub: Stub, tmp_path: Path) -> None:
    trace = make_trace(sessions=6, turns=4)
    stub.delay_s = 0.005
    run = await replay_trace(trace, tmp_path / "run.jsonl", options(stub))
    assert_one_record_each(run, trace)
    assert not any(call.overlapping for call in stub.calls)
    assert stub.most_sessions > 1
    for session, turns in trace.sessions().items():
        sent = [call.request_id for call in stub.calls if call.session_id == session]
        assert sent == [f"01234567-{request.chat_id}" for request in turns]


async def test_a_record_holds_what_the_engine_and_the_proxy_said(stub: Stub, tmp_path: Path) -> None:
    stub.pieces = 7
    trace = make_trace(sessions=1, turns=2)
    run = await replay_trace(trace, tmp_path / "run.jsonl", options(stub, label="arm"))
    record = run.records[1]
    request = trace.requests[1]
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (request.input_length, 3, 4)
    assert (record.instance, record.request_class, record.reason) == ("inst-3", "WARM", "lowest_score")
    assert record.predicted_cached_tokens == 7
    assert record.new_tokens == request.input_length - 4
    assert record.sent_s is not None
    assert record.first_token_s is not None
    assert record.finished_s is not None
    assert record.scheduled_s <= record.sent_s + 1e-6 <= record.first_token_s + 1e-6 <= record.finished_s + 1e-6
    assert record.ttft_s == pytest.approx(record.first_token_s - record.sent_s)
    assert record.e2e_scheduled_s == pytest.approx(record.finished_s - record.scheduled_s)
    assert record.tpot_s is not None
    body = stub.calls[1].body
    assert body["model"] == "stub-model"
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (3, True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert run.header.label == "arm"
    assert run.header.offered["requests"] == 2


async def test_the_first_token_of_a_chat_is_not_the_role(stub: Stub, tmp_path: Path) -> None:
    run = await replay_trace(make_trace(1, 1), tmp_path / "run.jsonl", options(stub, prompt_mode="chat"))
    assert stub.calls[0].body["messages"][0]["role"] == "user"
    assert run.records[0].ok
    assert run.records[0].completion_tokens == 2


@pytest.mark.parametrize(
    ("fault", "words", "status"),
    [
        ("busy", "http 503", 503),
        ("hang", "timeout: no first token", None),
        ("cut", "", 200),
        ("early_end", "ended early", 200),
        ("error_event", "out of memory", 200),
        ("garbage", "bad event", 200),
    ],
)
async def test_a_failure_is_a_record_and_the_session_goes_on(
    stub: Stub, tmp_path: Path, fault: str, words: str, status: int | None
) -> None:
    trace = make_trace(sessions=2, turns=3)
    stub.faults["01234567-1"] = fault
    run = await replay_trace(trace, tmp_path / "run.jsonl", options(stub, timeout_s=2.0 if fault == "hang" else 60.0))
    assert_one_record_each(run, trace)
    failed = [record for record in run.records if not record.ok]
    assert [record.chat_id for record in failed] == [1]
    assert failed[0].error is not None
    assert words in failed[0].error
    assert failed[0].http_status == status
    assert [call.request_id for call in stub.calls if call.session_id == "s0"][-1] == "01234567-2"


async def test_a_refused_connection_loses_no_request(tmp_path: Path, unused_tcp_port: int) -> None:
    trace = make_trace(sessions=2, turns=2)
    settings = ReplayOptions(endpoint=f"http://127.0.0.1:{unused_tcp_port}", model="m", plan=FAST)
    run = await replay_trace(trace, tmp_path / "run.jsonl", settings)
    assert_one_record_each(run, trace)
    assert run.end is not None
    assert run.end.ok == 0
    assert all(record.error is not None and record.error.startswith("connect") for record in run.records)


async def test_an_endpoint_without_models_is_an_error_before_anything_is_written(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    output = tmp_path / "run.jsonl"
    with pytest.raises(EndpointError, match="--endpoint"):
        await replay_trace(make_trace(), output, ReplayOptions(endpoint=f"http://127.0.0.1:{unused_tcp_port}"))
    assert not output.exists()


async def test_an_endpoint_that_wants_a_key_is_an_error_that_says_so(stub: Stub, tmp_path: Path) -> None:
    stub.key = "right"
    for key in (None, "wrong"):
        with pytest.raises(EndpointError, match="answered 401; give a key that it accepts"):
            await replay_trace(make_trace(), tmp_path / "a.jsonl", ReplayOptions(endpoint=stub.url, api_key=key))
    run = await replay_trace(make_trace(), tmp_path / "b.jsonl", ReplayOptions(endpoint=stub.url, api_key="right"))
    assert run.end is not None
    assert run.end.ok


@pytest.mark.parametrize("model", [None, "m"])
@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("127.0.0.1:21090", "http:// is missing; give http://127.0.0.1:21090"),
        ("localhost/v1", "http:// is missing; give http://localhost/v1"),
        ("ftp://localhost", "begins with http:// or https://"),
    ],
)
async def test_an_endpoint_that_is_no_url_is_refused_before_anything_is_written(
    tmp_path: Path, endpoint: str, words: str, model: str | None
) -> None:
    output = tmp_path / "run.jsonl"
    with pytest.raises(EndpointError, match=words):
        await replay_trace(make_trace(), output, ReplayOptions(endpoint=endpoint, model=model, plan=FAST))
    assert not output.exists()


async def test_no_more_sessions_than_allowed_are_in_progress(stub: Stub, tmp_path: Path) -> None:
    stub.delay_s = 0.01
    trace = make_trace(sessions=5, turns=2)
    run = await replay_trace(trace, tmp_path / "run.jsonl", options(stub, max_inflight_sessions=2))
    assert_one_record_each(run, trace)
    assert stub.most_sessions == 2
    order = list(dict.fromkeys(call.session_id for call in stub.calls))
    assert order == [f"s{index}" for index in range(5)]


async def test_arrivals_think_times_and_the_engine_clock_make_the_schedule(stub: Stub, tmp_path: Path) -> None:
    trace = make_trace(sessions=2, turns=2, gap_s=40.0, think_s=30.0)
    scales = PlanOptions(time_scale=10.0, think_scale=5.0)
    run = await replay_trace(
        trace, tmp_path / "run.jsonl", options(stub, plan=scales, clock_scale=100.0, timeout_s=50.0)
    )
    by_id = {record.chat_id: record for record in run.records}
    assert by_id[0].scheduled_s == 0.0
    assert by_id[2].scheduled_s == pytest.approx(4.0)
    for first, second in ((0, 1), (2, 3)):
        ended_s = by_id[first].finished_s
        assert ended_s is not None
        assert by_id[second].scheduled_s == pytest.approx(ended_s + 6.0)
    for record in run.records:
        assert record.sent_s is not None
        assert record.sent_s >= record.scheduled_s - 1e-3


async def test_without_think_times_gaps_count_from_the_schedule(stub: Stub, tmp_path: Path) -> None:
    trace = make_trace(sessions=1, turns=3, think_s=None)
    scales = PlanOptions(time_scale=1.0, idle_gap_cap_s=20.0)
    run = await replay_trace(
        trace, tmp_path / "run.jsonl", options(stub, plan=scales, clock_scale=1000.0, timeout_s=900.0)
    )
    due = [record.scheduled_s for record in run.records]
    ends = [record.finished_s or 0.0 for record in run.records]
    assert due[1] == pytest.approx(max(20.0, ends[0]))
    assert due[2] == pytest.approx(max(due[1] + 20.0, ends[1]))


async def test_the_request_limit_takes_whole_sessions_and_cuts_the_last(stub: Stub, tmp_path: Path) -> None:
    trace = make_trace(sessions=3, turns=3)
    scales = PlanOptions(time_scale=1e6, request_limit=5)
    run = await replay_trace(trace, tmp_path / "run.jsonl", options(stub, plan=scales))
    assert sorted((record.session_id, record.turn) for record in run.records) == [
        ("s0", 1),
        ("s0", 2),
        ("s0", 3),
        ("s1", 1),
        ("s1", 2),
    ]
    assert run.header.offered["cut_sessions"] == 1


async def test_prompts_share_exactly_the_tokens_of_common_blocks(stub: Stub, tmp_path: Path) -> None:
    await replay_trace(make_trace(sessions=2, turns=2), tmp_path / "run.jsonl", options(stub))
    prompts = {call.request_id[-1]: call.body["prompt"] for call in stub.calls}
    assert len(prompts["0"]) == 35
    assert prompts["1"][:32] == prompts["0"][:32]
    assert prompts["1"][32:35] != prompts["0"][32:35]
    assert prompts["2"][:16] != prompts["0"][:16]


async def interrupted(trace: Trace, output: Path, settings: ReplayOptions, after: int) -> None:
    """Run until ``after`` records are written, then cancel, as Ctrl-C does."""
    reached = asyncio.Event()
    written = 0

    def count(_record: RequestRecord) -> None:
        nonlocal written
        written += 1
        if written == after:
            reached.set()

    task = asyncio.create_task(replay_trace(trace, output, settings, on_record=count))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("torn", [b"", b'{"kind":"request","request_id":"0123'])
async def test_an_interrupted_run_is_resumed_without_sending_anything_twice(
    stub: Stub, tmp_path: Path, torn: bytes
) -> None:
    trace = make_trace(sessions=3, turns=4)
    output = tmp_path / "run.jsonl"
    stub.delay_s = 0.01
    await interrupted(trace, output, options(stub, max_inflight_sessions=1), after=6)
    first = read_run(output)
    assert first.end is None
    assert len(first.records) >= 6
    with output.open("ab") as stream:
        stream.write(torn)
    stub.calls.clear()
    run = await replay_trace(trace, output, options(stub, max_inflight_sessions=1), resume=True)
    assert_one_record_each(run, trace)
    sent = [call.request_id for call in stub.calls]
    assert set(sent).isdisjoint(record.request_id for record in first.records)
    assert len(sent) == len(trace.requests) - len(first.records)
    last_s = max(record.finished_s or 0.0 for record in first.records)
    resumed = [record for record in run.records if record.request_id in sent]
    assert all(record.scheduled_s >= last_s for record in resumed)
    assert (first.resumed_after, run.resumed_after) == (None, len(first.records))
    assert summary_lines(summarise(run))[1].startswith(f"resumed after {len(first.records)} requests: ")


async def test_a_run_that_is_being_written_is_neither_resumed_nor_touched(stub: Stub, tmp_path: Path) -> None:
    trace, output = make_trace(sessions=1, turns=3), tmp_path / "run.jsonl"
    stub.delay_s = 0.05
    recorded = asyncio.Event()
    first = asyncio.create_task(replay_trace(trace, output, options(stub), on_record=lambda _: recorded.set()))
    await recorded.wait()
    with pytest.raises(RecordError, match="another replay is writing it"):
        await replay_trace(trace, output, options(stub), resume=True)
    run = await first
    assert_one_record_each(run, trace)
    assert len(output.read_bytes().splitlines()) == len(trace.requests) + 2


async def test_resume_refuses_another_run_and_a_complete_one(stub: Stub, tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    trace = make_trace(1, 2)
    await replay_trace(trace, output, options(stub))
    with pytest.raises(RecordError, match="complete"):
        await replay_trace(trace, output, options(stub), resume=True)
    with pytest.raises(RecordError, match="exists already"):
        await replay_trace(trace, output, options(stub))
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(RecordError, match="was made with --seed 0, now 9; resume with the same settings"):
        await replay_trace(trace, output, options(stub, seed=9), resume=True)


async def test_a_device_is_refused_as_output_before_anything_is_sent(stub: Stub) -> None:
    with pytest.raises(RecordError, match=r"/dev/null: is no regular file; give the name of a new one as --output"):
        await replay_trace(make_trace(1, 1), Path("/dev/null"), options(stub))
    assert not stub.calls


@pytest.mark.parametrize(
    ("changes", "read_with", "words"),
    [
        ({"prompt_mode": "chat"}, {}, "--prompt-mode tokens, now chat"),
        ({"token_high": 2000}, {}, "--token-high"),
        ({"max_inflight_sessions": 1}, {}, "--max-inflight-sessions not set, now 1"),
        ({"plan": PlanOptions(time_scale=1e6, idle_gap_cap_s=5.0)}, {}, "--idle-gap-cap-s"),
        ({"timeout_s": 5.0}, {}, "--timeout-s 60.0, now 5.0"),
        (
            {"endpoint": "http://other:1", "model": "stub-model"},
            {},
            "--endpoint http://127.0.0.1:[0-9]+, now http://other:1",
        ),
        ({}, {"sessions": "single"}, "options of the trace not set, now {'sessions': 'single'}"),
    ],
)
async def test_resume_refuses_to_send_the_rest_otherwise(
    stub: Stub, tmp_path: Path, changes: dict[str, object], read_with: dict[str, object], words: str
) -> None:
    output, trace = tmp_path / "run.jsonl", make_trace(1, 3)
    await replay_trace(trace, output, options(stub))
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:-2]))
    other = msgspec.structs.replace(trace, read_with=read_with)
    with pytest.raises(RecordError, match=words):
        await replay_trace(other, output, options(stub, **changes), resume=True)
    same = options(stub, endpoint=stub.url + "/v1/")
    assert_one_record_each(await replay_trace(trace, output, same, resume=True), trace)


async def test_settings_that_make_no_sense_are_refused(stub: Stub, tmp_path: Path) -> None:
    for changes, words in (
        ({"clock_scale": 0.0}, "--engine-speed"),
        ({"clock_scale": math.nan}, "--engine-speed"),
        ({"timeout_s": -1.0}, "--timeout-s"),
        ({"timeout_s": math.nan}, "--timeout-s"),
        ({"max_inflight_sessions": 0}, "--max-inflight-sessions"),
        ({"plan": PlanOptions(time_scale=0.0)}, "--arrival-speed"),
        ({"plan": PlanOptions(time_scale=math.nan)}, "--arrival-speed"),
        ({"plan": PlanOptions(think_scale=math.inf)}, "--think-speed"),
        ({"plan": PlanOptions(idle_gap_cap_s=math.nan)}, "--idle-gap-cap-s"),
        ({"plan": PlanOptions(request_limit=0)}, "--request-limit"),
        ({"token_low": 9, "token_high": 9}, "--token-low"),
    ):
        with pytest.raises(ValueError, match=words):
            await replay_trace(make_trace(), tmp_path / "run.jsonl", options(stub, **changes))


async def test_session_ids_that_no_header_can_carry_end_no_replay(stub: Stub, tmp_path: Path) -> None:
    names = ["a\nb", "tab\tand\rnul\0", "世界", "plain"]
    requests = [
        TraceRequest(chat_id=number, session_id=name, input_length=3, output_length=1)
        for number, name in enumerate(names)
    ]
    trace = Trace(requests=requests, block_tokens=16, tail="floor", name="odd", sha256="ff")
    run = await replay_trace(trace, tmp_path / "run.jsonl", options(stub))
    assert_one_record_each(run, trace)
    assert run.end is not None
    assert run.end.ok == len(names)
    assert sorted(record.session_id for record in run.records) == sorted(names)
    assert len({call.session_id for call in stub.calls}) == len(names)
    assert {"a%0Ab", "plain"} <= {call.session_id for call in stub.calls}


async def test_an_output_length_of_zero_is_asked_for_as_one(stub: Stub, tmp_path: Path) -> None:
    request = TraceRequest(chat_id=0, session_id="a", input_length=3, output_length=0)
    trace = Trace(requests=[request], block_tokens=16, tail="floor", name="zero", sha256="ff")
    run = await replay_trace(trace, tmp_path / "run.jsonl", options(stub))
    assert stub.calls[0].body["max_tokens"] == 1
    assert run.records[0].output_length == 1
    assert run.records[0].tpot_s is None


@pytest.mark.parametrize("size_bytes", [100, 8000])  # within the header; within a record
async def test_a_disk_that_fills_is_an_error_after_which_resume_continues(
    stub: Stub, tmp_path: Path, size_bytes: int
) -> None:
    trace, path = make_trace(sessions=6, turns=4), tmp_path / "run.jsonl"
    said = rf"^{path}: cannot be written \(File too large\); it has \d+ records, continue with --resume"
    with limited_to(size_bytes), pytest.raises(RecordError, match=said):
        await replay_trace(trace, path, options(stub))
    assert path.stat().st_size == size_bytes
    assert len(stub.calls) < len(trace.requests)
    assert_one_record_each(await replay_trace(trace, path, options(stub), resume=True), trace)
