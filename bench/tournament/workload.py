"""Requests of one cell: a stretch of the trace as if its sessions had been running forever.

A fleet's load depends on sessions that began long ago. A replay from the trace's first request spends most of a short
run filling up; with agents' sessions of a hundred turns it never reaches its nominal load. So a cell starts in the
middle:

1. *Rate.* Sessions start as in the trace, in its order and pattern, with the times between starts divided so that the
   trace's requests come at ``load x saturation x instances`` per second. Think times and gaps within sessions are kept
   (capped at 60 s). When the trace is over it starts again: every repetition is a renamed copy whose blocks are its
   own, except those that are common to the agent's sessions (`bench.tournament.timeline`).
2. *Stretch.* [0, end) of that endless stream, at a place that depends on the seed. Turns belong to it by their
   *nominal* due time, which depends on no policy (`bench.tournament.timeline`).
3. *Warming.* Of every session that began before 0 the fleet is first given the last turn due before 0, with one output
   token, in the order of those turns and at half the fleet's prefill capacity. This puts sessions on instances and
   histories into caches. Then the stretch begins, and these sessions continue at their due times. Where a trace has no
   sessions of several turns, the requests of the 30 s before 0 are used for warming.
4. *Judged* are turns by their nominal due time: ``settle_latencies`` mean nominal latencies are left out at the
   beginning, because at 0 no instance decodes yet, and ``tail_latencies`` at the end, when no request arrives and the
   fleet drains. Every policy is judged on the same requests.

The judged stretch is as long as ``requests x sqrt(instances)`` requests take, and at least ``least_latencies`` mean
nominal latencies. The number grows with the root of the fleet because a quantile's error depends on the number of
requests, not of instances; the least length lets large fleets reach a steady state.

Each request is due at its time in the resulting trace, so it is replayed with time and think scales of 1 and no cap.
"""

from __future__ import annotations

import math
from array import array

import msgspec
import numpy as np

from bench.tournament.settings import Sizes
from bench.tournament.timeline import NominalSession, NominalTurn, Timeline
from replayer.traces.trace import Trace, TraceRequest

WARMING_LOAD = 0.5
"""Share of the fleet's time that warming may take."""
PAUSE_LATENCIES = 1.0
"""Mean nominal latencies between the last warming request and the stretch."""
LINGER_S = 30.0
"""In a trace without sessions, seconds before the stretch at which warming requests begin."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class CellWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one cell and which of them are judged."""

    trace: Trace
    judged: frozenset[int]
    """``chat_id`` of the judged requests."""
    whole: frozenset[str]
    """Sessions that begin and end in the stretch and of which every turn is judged."""
    warming: int
    """Number of warming requests."""
    copies: int
    """Repetitions of the trace that the stretch covers."""
    stretch_s: float
    settle_s: float
    time_scale: float
    """Divisor of the trace's own session starts."""

    @property
    def requests(self) -> int:
        """All requests, warming ones included."""
        return len(self.trace.requests)


class _Part(msgspec.Struct):
    """The part of a session within the stretch."""

    session: NominalSession
    copy: int
    start_s: float
    warm: NominalTurn | None
    turns: list[NominalTurn]


def build(line: Timeline, requests_per_s: float, instances: int, seed: int, sizes: Sizes, name: str) -> CellWorkload:
    """The workload of a cell; equal arguments give equal requests.

    Args:
        line: The trace at the pace of this load.
        requests_per_s: Request rate of the whole fleet.
        instances: Number of instances.
        seed: Determines the start of the stretch in the stream.
        sizes: Determines its length.
        name: Name of the resulting trace.
    """
    latency_s = line.latency_s
    settle_s = sizes.settle_latencies * latency_s
    judged_s = max(sizes.requests * math.sqrt(instances) / requests_per_s, sizes.least_latencies * latency_s)
    end_s = settle_s + judged_s + sizes.tail_latencies * latency_s
    parts = _parts(line, requests_per_s, end_s, seed)
    ramp_s, warmed = _warming(parts, instances)
    begins_s = ramp_s + PAUSE_LATENCIES * latency_s if warmed else 0.0
    lowest = min((part.copy for part in parts), default=0)
    drafts: list[tuple[float, int, TraceRequest, bool]] = []
    whole: set[str] = set()
    for part in parts:
        offset = (part.copy - lowest) * line.distinct_blocks
        session_id = f"{part.session.session_id}~{part.copy - lowest}"
        if part.warm is None and len(part.turns) == len(part.session.turns):
            whole.add(session_id)
        at_s = 0.0
        for place, turn in enumerate([*([part.warm] if part.warm else []), *part.turns]):
            due_s = part.start_s + turn.due_s
            warming = part.warm is not None and place == 0
            if warming:
                at_s = warmed[id(part)]
            elif place == (0 if part.warm is None else 1):
                at_s = begins_s + due_s
            else:
                at_s += turn.wait_s
            # The turn after a warming one is due at its nominal time; later ones as in the trace.
            paced = turn.after_end and place > (0 if part.warm is None else 1)
            drafts.append(
                (
                    at_s,
                    len(drafts),
                    TraceRequest(
                        chat_id=0,
                        session_id=session_id,
                        turn=place + 1,
                        timestamp_s=at_s,
                        input_length=turn.request.input_length,
                        output_length=1 if warming else max(turn.request.output_length, 1),
                        hash_ids=_renamed(turn, offset),
                        think_time_s=turn.wait_s if paced else None,
                        type=turn.request.type,
                    ),
                    not warming and settle_s <= due_s < settle_s + judged_s,
                )
            )
    drafts.sort(key=lambda draft: draft[:2])
    judged = set()
    previous: dict[str, int] = {}
    for number, (_, _, request, counts) in enumerate(drafts):
        request.chat_id = number
        request.parent_chat_id = previous.get(request.session_id, -1)
        previous[request.session_id] = number
        if counts:
            judged.add(number)
        else:
            whole.discard(request.session_id)
    return CellWorkload(
        trace=Trace(
            requests=[request for _, _, request, _ in drafts], block_tokens=line.block_tokens, tail=line.tail, name=name
        ),
        judged=frozenset(judged),
        whole=frozenset(whole),
        warming=len(warmed),
        copies=max((part.copy for part in parts), default=0) - lowest + 1,
        stretch_s=end_s,
        settle_s=settle_s,
        time_scale=line.period_s / line.cycle_s(requests_per_s),
    )


def _parts(line: Timeline, requests_per_s: float, end_s: float, seed: int) -> list[_Part]:
    cycle_s = line.cycle_s(requests_per_s)
    scale = line.period_s / cycle_s
    begin_s = cycle_s * (seed * _GOLDEN % 1.0)
    longest_s = max(session.end_s for session in line.sessions)
    linger_s = LINGER_S if all(len(session.turns) == 1 for session in line.sessions) else 0.0
    longest_s = max(longest_s, linger_s)
    parts = []
    for copy in range(math.floor((begin_s - longest_s) / cycle_s) - 1, math.ceil((begin_s + end_s) / cycle_s) + 1):
        for session in line.sessions:
            start_s = copy * cycle_s + session.start_s / scale - begin_s
            if start_s >= end_s or start_s + session.turns[-1].due_s < -linger_s:
                continue
            before = [turn for turn in session.turns if start_s + turn.due_s < 0]
            inside = [turn for turn in session.turns if 0 <= start_s + turn.due_s < end_s]
            if inside or linger_s:
                parts.append(_Part(session, copy, start_s, before[-1] if before else None, inside))
    return parts


def _warming(parts: list[_Part], instances: int) -> tuple[float, dict[int, float]]:
    """(Seconds that warming takes, send time of each part's warming request by the part's identity)"""
    due = sorted(
        ((part.start_s + part.warm.due_s, number, part) for number, part in enumerate(parts) if part.warm is not None),
        key=lambda entry: entry[:2],
    )
    sent: dict[int, float] = {}
    at_s = 0.0
    for _, _, part in due:
        assert part.warm is not None
        sent[id(part)] = at_s
        at_s += part.warm.cold_s / (WARMING_LOAD * instances)
    return at_s, sent


def _renamed(turn: NominalTurn, offset: int) -> array[int]:
    if not offset:
        return turn.ids
    ids = np.frombuffer(turn.ids, dtype=np.int64).copy() if turn.ids else np.empty(0, dtype=np.int64)
    ids[turn.common :] += offset
    return array("q", ids.tobytes())
