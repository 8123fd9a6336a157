"""A trace for a run of minutes from one of hours: the first turns of long sessions, several copies of each."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.admission_shapes import session_rows, write_rows
from replayer.traces.loading import load_trace
from replayer.traces.trace import Trace, TraceRequest

OWN_IDS = 100_000_000
"""Distance between the block ids of two copies, so that they share none."""
_CALL_S = 2.0
"""Time of one call in the new trace; a replay waits for the answer instead."""


class SessionCut(NamedTuple):
    """Which part of a trace's sessions is kept."""

    copies: int = 4
    """Times that every session occurs; copies share no prefix with each other."""
    turns: int = 20
    """First turns of a session that are kept."""
    max_tokens: int = 150_000
    """A session ends before its first prompt that is longer."""
    think_s: float = 5.0
    """Longest think time, seconds."""
    output_tokens: int = 128
    """Answers are cut to this many tokens."""
    seed: int = 1
    """Seed of the order in which sessions begin."""


def first_turns(whole: Trace, cut: SessionCut) -> list[dict[str, Any]]:
    """Rows of a trace in which one session begins each second. Sharing between sessions of one copy is kept."""
    begun: list[tuple[int, list[TraceRequest]]] = []
    for copy in range(cut.copies):
        for session in whole.sessions().values():
            kept: list[TraceRequest] = []
            for each in session[: cut.turns]:
                if each.input_length > cut.max_tokens:
                    break
                kept.append(each)
            if kept:
                begun.append((copy, kept))
    random.Random(cut.seed).shuffle(begun)
    chosen = [(OWN_IDS * copy, session) for copy, session in begun]
    return session_rows(chosen, cut.think_s, cut.output_tokens, call_s=_CALL_S)


def cut_trace(whole: Trace, cut: SessionCut) -> Trace:
    """The trace of `first_turns` as it is loaded from the file that ``python -m bench.home_case cut`` writes.

    Raises:
        TraceError: nothing is left.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cut.jsonl"
        write_rows(first_turns(whole, cut), path)
        return load_trace(path)
