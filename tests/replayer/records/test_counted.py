"""Numbers with their nouns, and commands that print them for one request."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from replayer.records.counted import counted
from warmroute import build

ONE = (
    '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 20, "output_length": 3, "type": "text", '
    '"turn": 1, "hash_ids": [1, 2]}\n'
)


def test_one_is_singular_and_thousands_are_apart() -> None:
    assert [counted(count, "request") for count in (0, 1, 2, 1_200)] == [
        "0 requests",
        "1 request",
        "2 requests",
        "1,200 requests",
    ]


def test_one_request_and_one_session_are_printed_in_the_singular(tmp_path: Path) -> None:
    trace, run = tmp_path / "one.jsonl", tmp_path / "run.jsonl"
    trace.write_text(ONE)
    for command, said in (
        (["trace", "repeat", trace, "--times", "1", "-o", tmp_path / "again.jsonl"], "(1 request, 1 session)"),
        (["trace", "repeat", trace, "--times", "2", "-o", tmp_path / "twice.jsonl"], "(2 requests, 2 sessions)"),
        (["simulate", trace, "-o", run], "1 request in "),
        (["summary", run], "1 request of 1 planned, 1 ok"),
    ):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(build(), [str(each) for each in command])
        assert (result.exit_code, said in result.output) == (0, True), result.output
        assert "1 requests" not in result.output
