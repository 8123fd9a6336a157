"""CSV logs of lengths: Azure's and BurstGPT's."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from replayer.traces.cli import register
from replayer.traces.formats import Format, detect_format
from replayer.traces.ideal import ideal
from replayer.traces.loading import LoadOptions, load, load_trace, stream
from replayer.traces.trace import TraceError

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50,396,109
2023-11-16 18:15:51.2224670,128,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
WITH_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,7,2.1,ChatGPT,472,18,490,Conversation log
6,8,2.1,ChatGPT,400,18,418,Conversation log
45,7,3.3,ChatGPT,1087,230,1317,Conversation log
50,,3.3,ChatGPT,10,20,30,API log
"""


def stored(folder: Path, text: str) -> Path:
    path = folder / "log.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [AZURE_2023, BURSTGPT])
def test_lengths_written_as_floats_are_integers(tmp_path: Path, text: str) -> None:
    expected = load_trace(stored(tmp_path, text)).requests
    floats = text.replace(",374,", ",374.0,").replace(",109\n", ",109.00\n").replace(",472,18,", ",472.0,18.,")
    assert floats != text
    assert load_trace(stored(tmp_path, floats)).requests == expected


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_azure_dates_become_offsets(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbf" + AZURE_2023.replace("\n", ending).encode())
    assert detect_format(path) is Format.AZURE
    trace = load_trace(path)
    assert [request.timestamp_s for request in trace.requests] == pytest.approx([0.0, 3.31941, 4.541877])
    assert [request.input_length for request in trace.requests] == [374, 396, 128]
    assert [request.output_length for request in trace.requests] == [44, 109, 55]
    assert len({request.session_id for request in trace.requests}) == 3
    assert "lengths only" in trace.notes[0]


def test_azure_dates_may_have_a_zone(tmp_path: Path) -> None:
    trace = load_trace(stored(tmp_path, AZURE_2024))
    assert [request.timestamp_s for request in trace.requests] == pytest.approx([0.0, 0.007405])


def test_prompts_of_logs_share_nothing(tmp_path: Path) -> None:
    trace = load_trace(stored(tmp_path, AZURE_2023))
    assert (trace.block_tokens, trace.tail) == (64, "ceil")
    assert [len(request.hash_ids) for request in trace.requests] == [6, 7, 2]
    assert ideal(trace).shared_apc == 0.0
    assert load_trace(stored(tmp_path, AZURE_2023), block_tokens=16).block_tokens == 16


def test_failures_of_burstgpt_are_dropped_and_counted(tmp_path: Path) -> None:
    path = stored(tmp_path, BURSTGPT)
    assert detect_format(path) is Format.BURSTGPT
    trace = load_trace(path)
    assert [(one.timestamp_s, one.input_length, one.output_length) for one in trace.requests] == [
        (5.0, 472, 18),
        (118.0, 417, 276),
    ]
    assert any(note.startswith("1 request without prompt or response tokens") for note in trace.notes)
    assert load(path, LoadOptions(time_unit="ms")).requests[1].timestamp_s == pytest.approx(0.118)


def test_sessions_of_burstgpt_are_kept_where_the_file_has_them(tmp_path: Path) -> None:
    path = stored(tmp_path, WITH_SESSIONS)
    found = [(request.session_id, request.turn) for request in load_trace(path).requests]
    assert found == [("7", 1), ("8", 1), ("7", 2), ("s3", 1)]
    assert [(request.session_id, request.turn) for request in stream(path).requests] == found


def test_long_sessions_of_burstgpt_are_not_taken_for_deltas(tmp_path: Path) -> None:
    header = WITH_SESSIONS.splitlines()[0]
    rows = [f"{5 * i},7,2.1,ChatGPT,{100 * i + 1},18,{100 * i + 19},Conversation log" for i in range(30)]
    trace = load_trace(stored(tmp_path, "\n".join([header, *rows])))
    assert [request.turn for request in trace.requests] == list(range(1, 31))
    assert not any("deltas" in note for note in trace.notes)


@pytest.mark.parametrize("command", [["sample"], ["repeat", "--times", "2"]])
def test_what_is_derived_from_long_sessions_of_burstgpt_needs_no_option_either(
    tmp_path: Path, command: list[str]
) -> None:
    rows = [f"{5 * i},7,2.1,ChatGPT,{100 * i + 1},18,{100 * i + 19},Conversation log" for i in range(30)]
    log = stored(tmp_path, "\n".join([WITH_SESSIONS.splitlines()[0], *rows]))
    derived = tmp_path / "derived.jsonl"
    register(app := typer.Typer())
    done = CliRunner().invoke(app, ["trace", *command, str(log), "-o", str(derived)])
    assert done.exit_code == 0, done.output
    assert all(request.lengths_only for request in load_trace(derived).requests)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE_2023 + "2023-11-16 18:15:52,5\n", r"log\.csv:5: 2 fields under 3 columns"),
        (AZURE_2023 + "yesterday,5,5\n", r"log\.csv:5: not a request of Azure"),
        (AZURE_2023 + "2023-11-16 18:15:52,5.5,5\n", r"log\.csv:5: not a request of Azure"),
        (BURSTGPT + "120,GPT-4,-1,5,4,API log\n", r"log\.csv:5: negative lengths"),
        (BURSTGPT + "nan,GPT-4,1,5,6,API log\n", r"log\.csv:5: negative lengths or no finite time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("a,b,c\n1,2,3\n", "or CSV with the columns of Azure"),
    ],
)
def test_other_lines_are_refused_by_number(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_trace(stored(tmp_path, text))
