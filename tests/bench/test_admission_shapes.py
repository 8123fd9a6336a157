"""The live comparison's agents in virtual time: figures, the choice of the best cap, and a whole command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.admission_shapes import DrawFigures, main, rows_of

APP = typer.Typer()
APP.command()(main)


def test_rules_are_compared_with_the_cap_that_is_best_on_average() -> None:
    runs = {
        "session_cap,sessions=5": [DrawFigures(2.0, 20.0, 0.8), DrawFigures(6.0, 40.0, 0.6)],
        "session_cap,sessions=7": [DrawFigures(1.0, 20.0, 0.8), DrawFigures(8.0, 40.0, 0.6)],
        "working_set": [DrawFigures(3.0, 30.0, 0.5), DrawFigures(3.0, 30.0, 0.7)],
    }
    assert list(rows_of(4, runs)) == [
        "| 4 | `session_cap,sessions=5` | 2 | 4.00 | 1.00 (1.00–1.00) | 30 | 1.00 | 0.70 |",
        "| 4 | `working_set` | 2 | 3.00 | 1.00 (0.50–1.50) | 30 | 1.00 | 0.60 |",
    ]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Six sessions of seven turns that grow from 16,000 tokens."""
    rows = [
        {
            "chat_id": 7 * session + turn,
            "parent_chat_id": 7 * session + turn - 1 if turn else -1,
            "timestamp": 10.0 * turn + session,
            "input_length": 16_000 + 640 * turn,
            "output_length": 50,
            "type": "coder",
            "turn": turn + 1,
            "hash_ids": [1_000 * session + block for block in range(250 + 10 * turn)],
            "session_id": f"long-{session}",
        }
        for session in range(6)
        for turn in range(7)
    ]
    path = tmp_path / "whole.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_prints_the_best_cap_and_the_rules(whole: Path) -> None:
    options = ["--instances", "1", "--draws", "1", "--slowdown", "1", "--rule", "working_set,fill=0.9"]
    result = CliRunner().invoke(APP, [str(whole), *options])
    assert result.exit_code == 0, result.output
    _, _, cap, rule = result.output.splitlines()
    assert cap.startswith("| 1 | `session_cap,sessions=")
    assert rule.startswith("| 1 | `working_set,fill=0.9` | 1 |")


def test_an_unknown_rule_is_refused(whole: Path) -> None:
    result = CliRunner().invoke(APP, [str(whole), "--rule", "absent"])
    assert result.exit_code == 2
    assert "absent" in result.output
