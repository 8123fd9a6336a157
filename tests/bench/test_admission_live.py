"""Comparison of admission rules on running engines: order of arms, counters, and a whole run on simulated engines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from bench.admission_live import RuleArm, _sum, app, order_of
from bench.admission_records import ARM_FILE, RUN_FILE, RuleArmNote
from replayer.records.runs import SCHEMA
from replayer.traces.loading import load_trace


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
