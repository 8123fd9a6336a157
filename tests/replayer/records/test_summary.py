"""Summary and run files: figures by hand, torn lines, errors."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from policies.classes import ClassThresholds
from replayer.records.classes import classify
from replayer.records.journal import Journal
from replayer.records.runs import RecordError, RequestRecord, Run, RunEnd, RunHeader, encode_line, read_run
from replayer.records.sessions import whole_sessions_known
from replayer.records.summary import summarise, summary_dict
from replayer.records.tables import summary_lines


def record(
    index: int, *, prompt: int = 1000, cached: int | None = 0, ok: bool = True, **changes: object
) -> RequestRecord:
    values: dict[str, object] = {
        "request_id": f"r{index}",
        "session_id": "s",
        "turn": index + 1,
        "chat_id": index,
        "trace_timestamp_s": 0.0,
        "scheduled_s": float(index),
        "sent_s": index + 0.5,
        "finished_s": index + 3.0,
        "ttft_s": 1.0 + index if ok else None,
        "e2e_s": 2.5,
        "input_length": prompt,
        "output_length": 10,
        "prompt_tokens": prompt if ok else None,
        "completion_tokens": 10 if ok else None,
        "cached_tokens": cached if ok else None,
        "ok": ok,
        "error": None if ok else "http 503: busy",
    }
    return RequestRecord(**(values | changes))  # type: ignore[arg-type]


def run_of(records: list[RequestRecord], complete: bool = True) -> Run:
    ok = sum(item.ok for item in records)
    end = RunEnd(finished_unix_s=1.0, requests=len(records), ok=ok) if complete else None
    return Run(RunHeader(label="x", offered={"requests": len(records)}), records, end)


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(0, "WARM"), (4999, "WARM"), (5000, "MEDIUM"), (19_999, "MEDIUM"), (20_000, "HEAVY"), (None, "UNKNOWN")],
)
def test_classes_are_by_new_tokens(tokens: int | None, name: str) -> None:
    assert classify(tokens) == name
    if tokens is not None:
        assert ClassThresholds().classify(tokens) == name, "the router's word and the report's"


def test_a_summary_counts_what_the_records_say() -> None:
    records = [
        record(0, prompt=10_000, cached=8_000, predicted_cached_tokens=9_000),
        record(1, prompt=30_000, cached=0, predicted_cached_tokens=500, prefill_instance="inst-1"),
        record(2, prompt=30_000, cached=None, completion_tokens=4),
        record(3, ok=False),
    ]
    summary = summarise(run_of(records))
    assert (summary.requests, summary.ok, summary.complete, summary.offloaded, summary.short_outputs) == (
        4,
        3,
        True,
        1,
        1,
    )
    assert summary.apc == pytest.approx(8_000 / 40_000)
    assert {group.name: (group.ok, group.requests) for group in summary.classes} == {
        "WARM": (1, 1),
        "MEDIUM": (0, 0),
        "HEAVY": (1, 1),
        "UNKNOWN": (1, 2),
    }
    assert summary.total.ttft_s.p50 == 2.0
    assert summary.predicted_requests == 2
    assert summary.predicted_error_tokens.mean == 750.0
    assert summary.predicted_bias_tokens == 750.0
    assert summary.span_s == 6.0
    assert summary.requests_per_s == 0.5
    assert summary.errors == {"http 503: busy": 1}
    assert summary_dict(summary)["total"]["ttft_s"]["p50"] == 2.0
    text = "\n".join(summary_lines(summary))
    for words in ("3 ok", "0.200", "failed, 1x: http 503: busy", "fewer tokens"):
        assert words in text


def test_reasons_of_failures_are_whole_and_counted_by_their_beginning() -> None:
    refusal = 'http 400: {"error":{"message":"This model\'s maximum context length is 20000 tokens, and you sent '
    errors = [f"{refusal}{prompt}" for prompt in (20_286, 20_300)] + ["connect: refused", "x" * 5_000]
    failed = [msgspec.structs.replace(record(i, ok=False), error=error) for i, error in enumerate(errors)]
    summary = summarise(run_of(failed))
    assert summary.errors == {errors[0]: 2, "connect: refused": 1, "x" * 299 + "…": 1}


def test_an_empty_and_an_incomplete_run_are_summarised() -> None:
    summary = summarise(run_of([], complete=False))
    assert summary.total.ttft_s.p50 is None
    assert summary.apc is None
    assert "--resume" in summary_lines(summary)[0]


def lines(count: int) -> list[bytes]:
    return [encode_line(RunHeader(label="x")), *(encode_line(record(index)) for index in range(count))]


@given(cut=st.integers(1, 400))
def test_a_run_cut_anywhere_after_its_header_reads_back_what_was_whole(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "run.jsonl"
    parts = lines(4)
    data = b"".join(parts)
    kept = data[: max(len(parts[0]), len(data) - cut)]
    path.write_bytes(kept)
    run = read_run(path)
    assert run.end is None
    assert len(run.records) == kept.count(b"\n") - 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no run header"),
        (b"{}\n", ":1: not a run record"),
        (gzip.compress(encode_line(RunHeader())), "unpack it first"),
        (zstandard.compress(encode_line(RunHeader())), "unpack it first"),
        (encode_line(record(0)), ":1: the first line must be"),
        (encode_line(RunHeader(schema=9)), "schema 9"),
        (encode_line(RunHeader(label="LABEL")).replace(b"LABEL", b"caf\xe9"), ":1: not a run record"),
        (encode_line(RunHeader()) + b"garbage\n" + encode_line(record(0)), ":2: not a run record"),
    ],
)
def test_files_that_are_no_run_are_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(data)
    with pytest.raises(RecordError, match=words):
        read_run(path)


def test_a_file_that_lost_a_record_is_damaged_and_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Journal(path, RunHeader(label="x", offered={"requests": 4})) as journal:
        for index in range(4):
            journal.add(record(index))
        journal.finish(2.0)
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*kept[:2], *kept[3:]]))
    run = read_run(path)
    assert run.incomplete == "the file is damaged: its last line counts 4 requests, it has 3"
    assert not whole_sessions_known(run)
    summary = summarise(run)
    assert not summary.complete
    assert f"INCOMPLETE ({run.incomplete}; replay again)" in summary_lines(summary)[0]
    with pytest.raises(RecordError, match=r"is damaged.*cannot be resumed"):
        Journal(path, RunHeader(label="x", offered={"requests": 4}), resume=True)


def test_a_file_cut_inside_its_header_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(lines(0)[0][:20])
    with Journal(path, RunHeader(label="y"), resume=True) as journal:
        journal.add(record(0))
        journal.finish(2.0)
    run = read_run(path)
    assert (run.header.label, len(run.records), run.end) == ("y", 1, RunEnd(finished_unix_s=2.0, requests=1, ok=1))


def test_a_figure_left_out_counts_as_no_hit_where_the_instance_reports_hits(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    records = [
        record(0, cached=600, instance="a"),
        record(1, cached=None, instance="a"),
        record(2, cached=None, instance="b"),
        record(3, ok=False, instance="a"),
    ]
    path.write_bytes(encode_line(RunHeader()) + b"".join(encode_line(item) for item in records))
    assert [item.cached_tokens for item in read_run(path).records] == [600, 0, None, None]
    assert summarise(read_run(path)).apc == pytest.approx(0.3)


def test_a_run_of_failures_only_is_no_reason_to_set_a_flag_of_the_engine() -> None:
    assert not [line for line in summary_lines(summarise(run_of([record(0, ok=False)]))) if "APC" in line]
    unreported = summary_lines(summarise(run_of([record(0, cached=None), record(1, ok=False)])))
    assert [line for line in unreported if line.startswith("APC unknown: the engine reports no cached tokens")]
