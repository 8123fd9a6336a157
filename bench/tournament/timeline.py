"""A trace's sessions on a nominal time line: due times of all turns if calls took their nominal time at some load.

The nominal time line depends on trace, hardware and load, not on a policy. It determines the sessions alive at an
instant, the turns in a stretch of time, and the KV of those sessions.
"""

from __future__ import annotations

from array import array
from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.tournament.capacity import Pace, prefill_s
from replayer.replay.plan import wait_between
from replayer.traces.trace import TailRule, Trace, TraceRequest
from sim.hardware import HardwareProfile

IDLE_GAP_CAP_S = 60.0
"""Longest think time or gap in seconds, as in `warmroute replay`."""
COMMON_SHARE = 0.1
COMMON_SESSIONS = 3
"""A block that this many of a trace's sessions hold, in share and in number, belongs to the agent's fixed prefix
(system prompt, tools): copies of a session keep it, while all other blocks of a copy are its own."""


class SessionCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a session, independent of the load."""

    request: TraceRequest
    wait_s: float
    """Think time or gap before it, capped; 0 for the first turn."""
    after_end: bool
    """True: ``wait_s`` counts from the end of the turn before; False: from its due time."""
    first_s: float
    """Nominal time to its first token, with the session's own history cached."""
    cold_s: float
    """Nominal time to its first token with nothing cached."""
    ids: array[int]
    """Block ids, renumbered 0.. over the trace."""
    common: int
    """Number of the first ``ids`` that are common to the agent's sessions."""


class NominalTurn(SessionCall, frozen=True, kw_only=True):
    """One call on the nominal time line."""

    due_s: float
    """Due time from the session's start."""
    latency_s: float
    """Nominal time from sending to the last token."""


class NominalSession(msgspec.Struct, frozen=True, kw_only=True):
    """One session on the nominal time line."""

    session_id: str
    start_s: float
    """Start within the period, unscaled."""
    turns: list[NominalTurn]

    @property
    def end_s(self) -> float:
        """End of its last turn, from its start."""
        return self.turns[-1].due_s + self.turns[-1].latency_s


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """All sessions of a trace, which repeat forever with this period."""

    sessions: list[NominalSession]
    """Sessions in order of start."""
    period_s: float
    """Unscaled; one mean gap between sessions lies between the last start and the next first one."""
    block_tokens: int
    tail: TailRule
    distinct_blocks: int
    requests: int

    @property
    def latency_s(self) -> float:
        """Mean nominal latency of a request."""
        turns = [turn.latency_s for session in self.sessions for turn in session.turns]
        return sum(turns) / len(turns)

    def cycle_s(self, requests_per_s: float) -> float:
        """The period when arrivals are scaled so that the trace makes this many requests per second."""
        return self.requests / requests_per_s


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """A trace's calls by session, which all its time lines share."""

    sessions: dict[str, list[SessionCall]]
    starts_s: list[float]
    """Starts of the sessions, from the first one's."""
    block_tokens: int
    tail: TailRule
    distinct_blocks: int


def calls_of(trace: Trace, profile: HardwareProfile) -> Calls:
    """Number a trace's blocks and find those that are common to its sessions."""
    grouped = trace.sessions()
    numbers: dict[int, int] = {}
    holders: Counter[int] = Counter()
    for turns in grouped.values():
        held: set[int] = set()
        for request in turns:
            for block in request.hash_ids:
                held.add(numbers.setdefault(block, len(numbers)))
        holders.update(held)
    least = max(COMMON_SESSIONS, COMMON_SHARE * len(grouped))
    common = np.zeros(len(numbers) + 1, dtype=np.bool_)
    common[[block for block, count in holders.items() if count >= least]] = True
    first_s = trace.requests[0].timestamp_s
    return Calls(
        sessions={name: _calls(turns, trace.block_tokens, profile, numbers, common) for name, turns in grouped.items()},
        starts_s=[turns[0].timestamp_s - first_s for turns in grouped.values()],
        block_tokens=trace.block_tokens,
        tail=trace.tail,
        distinct_blocks=len(numbers),
    )


def _calls(
    turns: list[TraceRequest],
    block_tokens: int,
    profile: HardwareProfile,
    numbers: dict[int, int],
    common: NDArray[np.bool_],
) -> list[SessionCall]:
    calls: list[SessionCall] = []
    for request in turns:
        wait_s, after_end, cached = 0.0, False, 0
        ids = array("q", [numbers[block] for block in request.hash_ids])
        if calls:
            wait_s, after_end = wait_between(calls[-1].request, request, IDLE_GAP_CAP_S)
            cached = _shared(calls[-1].ids, ids, request.input_length // block_tokens) * block_tokens
        cached = min(cached, max(request.input_length - 1, 0))
        calls.append(
            SessionCall(
                request=request,
                wait_s=wait_s,
                after_end=after_end,
                first_s=prefill_s(profile, request.input_length - cached, cached),
                cold_s=prefill_s(profile, request.input_length, 0),
                ids=ids,
                common=_leading(ids, common),
            )
        )
    return calls


def timeline(calls: Calls, pace: Pace) -> Timeline:
    """Place every call of a trace at an instance's pace."""
    sessions = [
        NominalSession(session_id=name, start_s=start_s, turns=_place(found, pace))
        for (name, found), start_s in zip(calls.sessions.items(), calls.starts_s, strict=True)
    ]
    span_s = calls.starts_s[-1]
    gap_s = span_s / (len(sessions) - 1) if len(sessions) > 1 and span_s > 0 else 1.0
    return Timeline(
        sessions=sessions,
        period_s=span_s + gap_s,
        block_tokens=calls.block_tokens,
        tail=calls.tail,
        distinct_blocks=calls.distinct_blocks,
        requests=sum(map(len, calls.sessions.values())),
    )


def _place(calls: list[SessionCall], pace: Pace) -> list[NominalTurn]:
    placed: list[NominalTurn] = []
    due_s = 0.0
    for call in calls:
        if placed:
            before = placed[-1]
            ended_s = before.due_s + before.latency_s
            due_s = ended_s + call.wait_s if call.after_end else max(before.due_s + call.wait_s, ended_s)
        latency_s = call.first_s + max(call.request.output_length, 1) * pace.token_s
        placed.append(NominalTurn(**msgspec.structs.asdict(call), due_s=due_s, latency_s=latency_s))
    return placed


def _shared(before: array[int], ids: array[int], full: int) -> int:
    """Length of the common beginning of two chains, by bisection (ids are chained), at most ``full``."""
    known, unknown = 0, min(len(before), len(ids), full) + 1
    while unknown - known > 1:
        middle = (known + unknown) // 2
        if before[middle - 1] == ids[middle - 1]:
            known = middle
        else:
            unknown = middle
    return known


def _leading(ids: array[int], common: NDArray[np.bool_]) -> int:
    """Number of the first ids that are common."""
    if not ids:
        return 0
    flags = common[np.frombuffer(ids, dtype=np.int64)]
    return len(ids) if flags.all() else int(np.argmin(flags))
