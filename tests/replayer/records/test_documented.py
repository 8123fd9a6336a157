"""The code in docs/replayer.md: it converts a log to a trace, and gives records to other programs."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from replayer.records.runs import read_run
from replayer.traces.loading import load_trace
from replayer.traces.trace import TraceError
from tests.replayer.constructed_runs import make_run, write_run

PAGE = Path(__file__).parents[3] / "docs" / "replayer.md"


OWN = """timestamp_ms,prompt_tokens,output_tokens,session_id
1732786004000,200,20,séance
1732786000000,100,20,séance
yesterday,100,20,séance
1732786005000,,20,séance
1732786006000,0,20,séance
1732786007000
1732786002000,130,20,
"""


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_documented_lines_convert_a_log_with_broken_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    convert, _ = code_blocks()
    (tmp_path / "own.csv").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(convert, {})
    assert capsys.readouterr().out == "4 rows left out\n"
    trace = load_trace("own.jsonl")
    assert [(one.session_id, one.timestamp_s, one.input_length, one.turn) for one in trace.requests] == [
        ("séance", 0.0, 100, 1),
        ("row 6", 2.0, 130, 1),
        ("séance", 4.0, 200, 2),
    ]
    assert (trace.block_tokens, trace.tail) == (64, "ceil")
    first, other, second = (list(one.hash_ids) for one in trace.requests)
    assert second[: len(first)] == first
    assert not set(other) & set(second)


def test_an_unknown_format_is_refused_with_the_place_of_the_documented_lines(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(OWN, encoding="utf-8")
    (tmp_path / "own.jsonl").write_text('{"timestamp": 1, "prompt_tokens": 5}\n')
    for name in ("own.csv", "own.jsonl"):
        with pytest.raises(TraceError, match=r"see 'A trace of your own' in docs/replayer\.md"):
            load_trace(tmp_path / name)
    assert "\n### A trace of your own\n" in PAGE.read_text()


def test_the_documented_lines_write_every_record_as_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, code = code_blocks()
    write_run(tmp_path / "run.jsonl", make_run(fail_every=7))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    records = read_run(tmp_path / "run.jsonl").records
    assert [row["request_id"] for row in rows] == [record.request_id for record in records]
    assert [row["ttft_s"] for row in rows] == ["" if one.ttft_s is None else str(one.ttft_s) for one in records]
