"""Traces and runs for the tests of offline simulation."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from policies.registry import make_planner, make_routing
from replayer.records.runs import RequestRecord, RunEnd, RunHeader, encode_line
from replayer.traces.synth import SynthOptions, synthetic_trace
from replayer.traces.trace import Trace, TraceRequest
from sim.offline.simulate import SimOptions, SimResult, simulate

BLOCK = 64
ROOMY_TOKENS = 4_000_000
"""A pool large enough that these runs evict nothing."""


def agents(requests: int = 250, *, rate_per_s: float = 3.0, seed: int = 1, length_scale: float = 0.3) -> Trace:
    """A synthetic agentic trace, prompts of 10k tokens on average."""
    options = SynthOptions(requests=requests, seed=seed, rate_per_s=rate_per_s, length_scale=length_scale)
    trace = synthetic_trace(options)
    trace.sha256 = "0123456789abcdef" * 4
    return trace


def conversation(
    *turns: tuple[float, int, int], session: str = "s", first_id: int = 0, think_s: Any = ()
) -> list[TraceRequest]:
    """One session: (timestamp_s, prompt blocks, output tokens) per turn; ``think_s`` per turn where known."""
    return [
        TraceRequest(
            chat_id=first_id + turn,
            parent_chat_id=first_id + turn - 1 if turn else -1,
            session_id=session,
            turn=turn + 1,
            timestamp_s=at_s,
            input_length=blocks * BLOCK + 7,
            output_length=output,
            hash_ids=array("q", [first_id * 10_000 + block for block in range(blocks)]),
            think_time_s=think_s[turn] if turn < len(think_s) else None,
        )
        for turn, (at_s, blocks, output) in enumerate(turns)
    ]


def trace_of(*sessions: list[TraceRequest]) -> Trace:
    """A trace of whole sessions."""
    requests = sorted((request for session in sessions for request in session), key=lambda each: each.timestamp_s)
    return Trace(requests=requests, block_tokens=BLOCK, tail="floor", name="made", sha256="fedcba9876543210" * 4)


def run(trace: Trace, policy: str = "lmetric", planner: str = "never", params: Any = None, **options: Any) -> SimResult:
    """Simulate, by default on four instances."""
    settings = SimOptions(**{"instances": 4, **options})
    return simulate(trace, settings, make_routing(policy), make_planner(planner, params))


def lines(result: SimResult) -> bytes:
    """The bytes of the run file and of the decisions."""
    header, records, end, _ = result.run
    assert end is not None
    parts: list[RunHeader | RequestRecord | RunEnd] = [header, *records, end]
    written = b"".join(encode_line(each) for each in parts)
    return written + msgspec.json.encode(result.decisions)


def by_session(records: list[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """Records per session, in order of turn."""
    sessions: dict[str, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda each: each.turn):
        sessions.setdefault(record.session_id, []).append(record)
    return sessions
