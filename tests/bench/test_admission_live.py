"""Comparison of admission rules on running engines: order of arms, counters, and a whole run on simulated engines."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from bench.admission_live import RuleArm, _sum, app, order_of
from bench.admission_records import ARM_FILE, RUN_FILE, RuleArmNote, lines_of, records_of
from replayer.records.runs import SCHEMA, RequestRecord
from replayer.traces.loading import load_trace

DOCS = Path(__file__).parents[2] / "docs"
UNCUT = DOCS / "results" / "admission-claude-h200"
PAGE = (DOCS / "admission.md").read_text(encoding="utf-8")
_UNCUT_POOLS = 4 * 411_648
SECTION = PAGE.partition("#### Uncut sessions of Claude Code\n")[2].partition("\n### ")[0]


def test_each_repeat_starts_with_another_arm() -> None:
    arms = [RuleArm.parse(text) for text in ("never_hold", "working_set", "session_cap,sessions=9,keep_s=5")]
    assert arms[2] == RuleArm("session_cap-9-5", "session_cap", {"sessions": 9, "keep_s": 5})
    labels = [(repeat, arm.rule) for repeat, arm in order_of(arms, 2)]
    assert [rule for repeat, rule in labels if repeat == 0] == ["never_hold", "working_set", "session_cap"]
    assert [rule for repeat, rule in labels if repeat == 1] == ["working_set", "session_cap", "never_hold"]


@pytest.mark.parametrize(
    ("metric", "value"),
    [("hits_total", 5.0), ("held", 2.0), ('tokens{state="kept"}', 7.0), ("absent", 0.0)],
)
def test_samples_of_a_metric_are_added(metric: str, value: float) -> None:
    page = (
        "# TYPE hits_total counter\n"
        'hits_total{engine="0"} 2.0\nhits_total{engine="1"} 3.0\nhits_total_created 9.0\nheld 2\n'
        'tokens{state="active"} 4.0\ntokens{state="kept"} 7.0\n'
    )
    assert _sum(page, metric) == value


def test_bad_input_is_refused_with_its_reason(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "absent.jsonl", "--config", "absent.yaml", "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert "absent.jsonl" in result.output
    result = CliRunner().invoke(app, ["table", str(tmp_path)])
    assert result.exit_code == 2
    assert "no arm never_hold" in result.output


def test_the_table_compares_what_was_kept(tmp_path: Path) -> None:
    for label, seconds in (("never_hold", 4.0), ("working_set", 1.0)):
        folder = tmp_path / f"{label}-r0"
        folder.mkdir()
        note = RuleArmNote(label=label, repeat=0, trace="t", started_unix_s=0.0, wall_s=9.0, counters={}, timeline=[])
        (folder / ARM_FILE).write_bytes(msgspec.json.encode(note))
        lines = _run_lines(seconds)
        (folder / f"{RUN_FILE}.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    result = CliRunner().invoke(app, ["table", str(tmp_path)])
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if line.startswith("| working_set"))
    assert "| 1.00 (1.00) |" in row
    assert "0.25 (0.25–0.25)" in row


def test_a_cut_trace_has_sessions_of_its_own_that_grow(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    rows = [
        {
            "chat_id": turn,
            "parent_chat_id": turn - 1,
            "timestamp": 100.0 * turn,
            "input_length": 640 * (turn + 1),
            "output_length": 500,
            "type": "coder",
            "turn": turn + 1,
            "hash_ids": list(range(10 * (turn + 1))),
            "session_id": "long",
        }
        for turn in range(12)
    ]
    whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "cut.jsonl"
    options = ["--sessions", "2", "--turns", "4", "--min-tokens", "1000", "--max-tokens", "7000"]
    result = CliRunner().invoke(app, ["cut", str(whole), str(out), *options])
    assert result.exit_code == 0, result.output
    requests = load_trace(out).requests
    assert sorted({each.session_id for each in requests}) == ["s000", "s001"]
    first = [each for each in requests if each.session_id == "s000"]
    other = [each for each in requests if each.session_id == "s001"]
    assert len(first) == len(other) == 4
    assert {each.output_length for each in requests} == {48}
    assert list(first[1].hash_ids)[: len(first[0].hash_ids)] == list(first[0].hash_ids)
    assert not set(first[3].hash_ids) & set(other[3].hash_ids)


def _run_lines(seconds: float) -> list[dict[str, Any]]:
    header = {"kind": "run", "schema": SCHEMA, "label": "x"}
    return [header, *(_record(session, turn, seconds) for session in "ab" for turn in (1, 2))]


def _record(session: str, turn: int, seconds: float) -> dict[str, Any]:
    due = 10.0 * turn
    return {
        "kind": "request",
        "request_id": f"{session}{turn}",
        "session_id": session,
        "turn": turn,
        "chat_id": turn,
        "trace_timestamp_s": due,
        "scheduled_s": due,
        "e2e_scheduled_s": seconds,
        "ttft_scheduled_s": seconds / 2,
        "prompt_tokens": 100,
        "cached_tokens": 50,
        "ok": True,
    }


def test_settings_of_an_arm_name_its_rule(tmp_path: Path) -> None:
    settings = {"port": 1, "instances": [], "admission": {"max_held": 5}}
    arm = RuleArm.parse("working_set,keep_s=5")
    assert yaml.safe_load(yaml.safe_dump(arm.settings(settings)))["admission"] == {
        "max_held": 5,
        "name": "working_set",
        "params": {"keep_s": 5},
    }


@pytest.mark.parametrize("folder", ["claude_2", "claude_1"])
def test_the_page_shows_the_table_of_uncut_sessions(folder: str) -> None:
    assert "\n".join(lines_of(UNCUT / folder, "before")) in SECTION


def test_what_the_page_says_of_uncut_sessions() -> None:
    words = " ".join(SECTION.split())
    sent = 0
    moved: dict[str, list[int]] = {}
    contexts: dict[str, int] = {}
    longest: list[float] = []
    for packed in sorted(UNCUT.glob(f"*/*/{RUN_FILE}.gz")):
        records = records_of(packed)
        sent += len(records)
        assert all(each.ok for each in records)
        assert not any(each.cached_tokens for each in records if each.turn == 1), "the run began with cached contexts"
        arm = f"{packed.parts[-3]}/{packed.parts[-2].rpartition('-')[0]}"
        moved.setdefault(arm, []).append(_moved(records))
        last = {each.session_id: each for each in sorted(records, key=lambda each: each.turn)}
        contexts[packed.parts[-3]] = sum(each.input_length + each.output_length for each in last.values())
        longest.append(max(each.ttft_scheduled_s or 0.0 for each in records))
    assert f"All {sent:,} requests were answered" in words
    for name in ("claude_2", "claude_1"):
        rules = ", ".join(
            f"`{rule}` {' and '.join(map(str, moved[f'{name}/{rule}']))}"
            for rule in ("working_set", "before", "working_set-0")
            if f"{name}/{rule}" in moved
        )
        assert f"{name}: {rules}" in words
    assert f"{min(longest):.0f} to {max(longest):.0f} s in a run" in words
    second, first = contexts["claude_2"], contexts["claude_1"]
    assert f"{second / 1e6:.2f} M tokens, {second / _UNCUT_POOLS:.2f} times the pools" in words
    assert f"{first / 1e6:.2f} M, {first / _UNCUT_POOLS:.2f} times" in words


def test_the_verdict_on_uncut_sessions_is_that_of_the_tables() -> None:
    words = " ".join(SECTION.split())
    rows = {
        (name, cells[1]): cells[-3:-1]
        for name in ("claude_2", "claude_1")
        for line in lines_of(UNCUT / name, "before")
        if (cells := [cell.strip() for cell in line.split("|")])
    }
    second, first = rows["claude_2", "working_set"], rows["claude_1", "working_set"]
    assert f"{second[0]} times that of `before` on `claude_2`, {first[0]} on `claude_1`" in words
    assert f"whole sessions take {second[1]} and {first[1]}" in words
    assert f"mean of `claude_2`, {rows['claude_2', 'working_set-0'][0]}, by one run" in words


def _moved(records: list[RequestRecord]) -> int:
    """Later turns on another instance than the turn before."""
    ordered = sorted(records, key=lambda each: (each.session_id, each.turn))
    turns = [(one, two) for one, two in pairwise(ordered) if one.session_id == two.session_id]
    assert len(turns) == 100
    return sum(one.instance != two.instance for one, two in turns)
