"""The cut of a trace for a run of minutes, and its command."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.home_case.__main__ import app
from bench.home_case.cut import SessionCut, first_turns
from replayer.traces.loading import load_trace
from replayer.traces.trace import Trace, TraceRequest

BLOCK = 64
SESSIONS, TURNS = 3, 5
COMMON = [1, 2]
"""Blocks of the system prompt, which all sessions of the trace begin with."""


def prompt(session: int, turn: int) -> list[int]:
    """Block ids of a turn: those of the turn before, and ten more."""
    return COMMON + [1000 * (session + 1) + block for block in range(10 * (turn + 1))]


def request(session: int, turn: int) -> TraceRequest:
    """A call of trace session ``session``; think times of 0.1, 3 and 60 s in turn."""
    ids = prompt(session, turn)
    return TraceRequest(
        chat_id=100 * session + turn,
        parent_chat_id=100 * session + turn - 1 if turn else -1,
        session_id=f"long-{session}",
        turn=turn + 1,
        timestamp_s=5.0 * session + 100.0 * turn,
        input_length=BLOCK * len(ids),
        output_length=(20, 500)[turn % 2],
        hash_ids=ids,
        think_time_s=(60.0, 0.1, 3.0)[turn % 3] if turn else None,
    )


@pytest.fixture
def whole() -> Trace:
    """Three sessions of five turns whose prompts grow from 12 to 52 blocks."""
    calls = [request(session, turn) for turn in range(TURNS) for session in range(SESSIONS)]
    return Trace(requests=calls, block_tokens=BLOCK)


def by_session(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["session_id"], []).append(row)
    return grouped


def test_sessions_are_kept_from_their_first_turn_on(whole: Trace) -> None:
    sessions = by_session(first_turns(whole, SessionCut(copies=2, turns=3)))
    assert len(sessions) == 2 * SESSIONS
    lengths = [BLOCK * len(prompt(0, turn)) for turn in range(3)]
    for turns in sessions.values():
        assert [row["turn"] for row in turns] == [1, 2, 3]
        assert [row["input_length"] for row in turns] == lengths
        assert [row["parent_chat_id"] for row in turns] == [-1, *(row["chat_id"] for row in turns[:-1])]


def test_copies_share_nothing_and_sessions_of_a_copy_what_they_shared(whole: Trace) -> None:
    sessions = by_session(first_turns(whole, SessionCut(copies=2))).values()
    blocks = [set().union(*(row["hash_ids"] for row in turns)) for turns in sessions]
    shared = [len(one & other) for at, one in enumerate(blocks) for other in blocks[at + 1 :]]
    pairs_of_one_copy, pairs_of_two = SESSIONS * (SESSIONS - 1), SESSIONS * SESSIONS
    assert sorted(shared) == [0] * pairs_of_two + [len(COMMON)] * pairs_of_one_copy
    for turns in sessions:
        for before, after in pairwise(turns):
            assert after["hash_ids"][: len(before["hash_ids"])] == before["hash_ids"]


def test_a_session_ends_before_its_first_prompt_that_is_too_long(whole: Trace) -> None:
    longest = BLOCK * len(prompt(0, 2))
    exact = by_session(first_turns(whole, SessionCut(copies=1, max_tokens=longest)))
    assert [len(turns) for turns in exact.values()] == [3] * SESSIONS
    shorter = by_session(first_turns(whole, SessionCut(copies=1, max_tokens=longest - 1)))
    assert [len(turns) for turns in shorter.values()] == [2] * SESSIONS
    assert first_turns(whole, SessionCut(max_tokens=BLOCK)) == []


def test_a_shorter_prompt_after_one_that_is_too_long_is_not_kept(whole: Trace) -> None:
    whole.requests = [request(0, 0), request(0, 4), request(0, 1)]
    assert len(first_turns(whole, SessionCut(copies=1, max_tokens=BLOCK * 30))) == 1


def test_one_session_begins_each_second(whole: Trace) -> None:
    sessions = by_session(first_turns(whole, SessionCut(copies=2)))
    assert [turns[0]["timestamp"] for turns in sessions.values()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert list(sessions) == [f"s{number:03d}" for number in range(2 * SESSIONS)]


def test_think_times_and_answers_are_bounded(whole: Trace) -> None:
    sessions = by_session(first_turns(whole, SessionCut(copies=1, think_s=5.0, output_tokens=128)))
    for turns in sessions.values():
        assert [row["think_time"] for row in turns] == [0.0, 0.5, 3.0, 5.0, 0.5]
        assert [row["output_length"] for row in turns] == [20, 128, 20, 128, 20]


def test_the_seed_decides_the_order_of_sessions(whole: Trace) -> None:
    rows = first_turns(whole, SessionCut(seed=1))
    assert rows == first_turns(whole, SessionCut(seed=1))
    other = first_turns(whole, SessionCut(seed=2))
    assert rows != other

    def prompts(found: list[dict[str, Any]]) -> list[list[int]]:
        return sorted(row["hash_ids"] for row in found)

    assert prompts(rows) == prompts(other)


def written(path: Path, whole: Trace) -> Path:
    rows = [
        {
            "chat_id": each.chat_id,
            "parent_chat_id": each.parent_chat_id,
            "timestamp": each.timestamp_s,
            "input_length": each.input_length,
            "output_length": each.output_length,
            "type": "coder",
            "turn": each.turn,
            "hash_ids": list(each.hash_ids),
            "session_id": each.session_id,
            "think_time": each.think_time_s or 0.0,
            "api_time": 1.0,
        }
        for each in whole.requests
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_writes_a_trace_with_the_same_sessions(whole: Trace, tmp_path: Path) -> None:
    trace, output = written(tmp_path / "whole.jsonl", whole), tmp_path / "cut.jsonl"
    done = CliRunner().invoke(app, ["cut", str(trace), str(output), "--copies", "2", "--turns", "4"])
    assert done.exit_code == 0, done.output
    assert done.output == "24 requests of 6 sessions, 1,728 tokens a prompt\n"

    made = load_trace(output)
    expected = by_session(first_turns(load_trace(trace), SessionCut(copies=2, turns=4)))
    assert made.notes == [], "nothing to repair"
    assert made.block_tokens == BLOCK
    assert {
        name: [(each.input_length, each.output_length, list(each.hash_ids), each.think_time_s) for each in turns]
        for name, turns in made.sessions().items()
    } == {
        name: [(row["input_length"], row["output_length"], row["hash_ids"], row["think_time"]) for row in turns]
        for name, turns in expected.items()
    }


def test_a_cut_without_a_session_is_refused(whole: Trace, tmp_path: Path) -> None:
    trace, output = written(tmp_path / "whole.jsonl", whole), tmp_path / "cut.jsonl"
    done = CliRunner().invoke(app, ["cut", str(trace), str(output), "--max-tokens", "100"])
    assert done.exit_code == 2
    assert "no session begins with a prompt of at most 100 tokens" in done.output
    assert not output.exists()


def test_a_cut_does_not_replace_its_trace(whole: Trace, tmp_path: Path) -> None:
    trace = written(tmp_path / "whole.jsonl", whole)
    before = trace.read_bytes()
    done = CliRunner().invoke(app, ["cut", str(trace), str(trace)])
    assert done.exit_code == 2
    assert "is an input and would be overwritten" in done.output
    assert trace.read_bytes() == before
