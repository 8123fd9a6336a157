"""Plan of a replay: sessions, their arrivals, think times, and the load that results.

All times are engine seconds from the start of the run. A session arrives at its trace time / ``time_scale``. A
later turn is due after the one before it:
- where the trace has think times (or the duration of calls): previous turn's end + think time / ``think_scale``;
- else at the previous turn's due time + gap in the trace / ``think_scale``, never before the previous turn's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from replayer.records.counted import counted
from replayer.replay.own_prefix import PromptMarks
from replayer.traces.ideal import cached_tokens
from replayer.traces.numbers import is_not_negative, is_positive
from replayer.traces.trace import Trace, TraceError, TraceRequest


class Step(msgspec.Struct, frozen=True):
    """One turn of the plan."""

    request: TraceRequest
    request_id: str
    wait_s: float
    """Scaled think time (``after_end``) or scaled gap between due times; 0 for the first turn."""
    after_end: bool
    """True: ``wait_s`` counts from the previous turn's end."""
    own_blocks: int = 0
    """Blocks at the start of the prompt that repeat the session's previous prompt (`replayer.replay.own_prefix`)."""

    def own_prefix_tokens(self, block_tokens: int) -> int:
        """Tokens of ``own_blocks`` that a prefix cache can give: full blocks, and never the last token."""
        return min(self.own_blocks, max(self.request.input_length - 1, 0) // block_tokens) * block_tokens


class SessionPlan(msgspec.Struct, frozen=True):
    """The turns of one session, in order."""

    session_id: str
    arrival_s: float
    steps: list[Step]


class OfferedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the plan, in engine seconds, if every call took as long as in the trace (no time if it has none)."""

    requests: int
    sessions: int
    cut_sessions: int
    """Sessions of which only the first turns fit the request limit."""
    span_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    new_tokens_per_s: float
    """Prompt tokens that one infinite cache would not hold: the least prefill of any fleet."""
    output_tokens_per_s: float
    ideal_apc: float
    input_mean_tokens: float
    output_mean_tokens: float
    longest_tokens: int = 0
    """Most tokens of a prompt with its answer; 0 in records of former versions."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions to send, and the load they offer."""

    sessions: list[SessionPlan]
    offered: OfferedLoad
    cut_session: str | None = None
    """Session of which only the first turns fit the request limit."""

    @property
    def requests(self) -> int:
        return self.offered.requests


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling and limits of the trace."""

    time_scale: float = 1.0
    think_scale: float | None = None
    """None: as ``time_scale``."""
    request_limit: int | None = None
    idle_gap_cap_s: float | None = 60.0
    """Longest think time or gap, before scaling; None: no cap."""

    @property
    def think_factor(self) -> float:
        """``think_scale``, or the scale that stands in for it."""
        return self.time_scale if self.think_scale is None else self.think_scale

    def check(self) -> None:
        """Check that the values are in range; raises TraceError."""
        if not is_positive(self.time_scale, self.think_factor):
            raise TraceError("--arrival-speed and --think-speed must be above 0 (2 means twice as fast) and finite")
        if self.request_limit is not None and self.request_limit < 1:
            raise TraceError("--request-limit must be at least 1")
        if self.idle_gap_cap_s is not None and not is_not_negative(self.idle_gap_cap_s):
            raise TraceError("--idle-gap-cap-s must be at least 0 and finite; a large number means no cap")


def choose_sessions(trace: Trace, request_limit: int | None) -> tuple[list[list[TraceRequest]], int]:
    """Whole sessions by arrival while they fit; the first that does not fit is cut to what is left.

    Returns:
        The turns of every chosen session, and the number of sessions that were cut (0 or 1).
    """
    sessions = trace.sessions()
    if request_limit is None:
        return list(sessions.values()), 0
    turns, cut = chosen_turns((request.session_id for request in trace.requests), request_limit)
    return [sessions[session_id][:count] for session_id, count in turns.items()], int(cut is not None)


def chosen_turns(session_ids: Iterable[str], request_limit: int) -> tuple[dict[str, int], str | None]:
    """The rule of ``choose_sessions`` from the session of every request in time order; memory grows with the limit.

    Returns:
        Number of first turns to send of every chosen session, and the session that is cut (None: none is).
    """
    sizes: dict[str, int] = {}
    for session_id in session_ids:
        if session_id in sizes or len(sizes) < request_limit:
            sizes[session_id] = sizes.get(session_id, 0) + 1
    chosen: dict[str, int] = {}
    left = request_limit
    for session_id, turns in sizes.items():
        if left <= 0:
            break
        chosen[session_id] = min(turns, left)
        if turns > left:
            return chosen, session_id
        left -= turns
    return chosen, None


def first_turns(requests: Iterable[TraceRequest], chosen: Mapping[str, int]) -> Iterator[TraceRequest]:
    """The first turns of every session, as many as ``chosen_turns`` gives; ends after the last of them."""
    left = dict(chosen)
    for request in requests:
        turns = left.get(request.session_id, 0)
        if turns:
            yield request
            if turns > 1:
                left[request.session_id] = turns - 1
            else:
                del left[request.session_id]
                if not left:
                    return


def wait_between(before: TraceRequest, request: TraceRequest, cap_s: float | None) -> tuple[float, bool]:
    """Unscaled wait of a turn after the one before it, and True if it counts from the end of that turn."""
    gap_s = max(request.timestamp_s - before.timestamp_s, 0.0)
    if request.think_time_s is not None:
        wait = (max(request.think_time_s, 0.0), True)
    elif before.api_time_s is not None:
        wait = (max(gap_s - before.api_time_s, 0.0), True)
    else:
        wait = (gap_s, False)
    return (wait[0] if cap_s is None else min(wait[0], cap_s), wait[1])


def _waits(turns: list[TraceRequest], cap_s: float | None) -> list[tuple[float, bool]]:
    return [(0.0, False), *(wait_between(before, request, cap_s) for before, request in pairwise(turns))]


def id_prefix(sha256: str) -> str:
    """Beginning of a trace's request ids."""
    return sha256[:8] or "trace"


def make_plan(trace: Trace, options: PlanOptions) -> Plan:
    """Choose sessions, scale their times and compute the offered load.

    Raises:
        TraceError: nothing to send, or an option out of range.
    """
    options.check()
    chosen, cut = choose_sessions(trace, options.request_limit)
    if not chosen:
        raise TraceError(f"{trace.name}: no requests to replay")
    start_s = chosen[0][0].timestamp_s
    prefix = id_prefix(trace.sha256)
    plans = []
    ends_s = [0.0]
    for turns in chosen:
        arrival_s = (turns[0].timestamp_s - start_s) / options.time_scale
        steps = []
        due_s = arrival_s
        before: TraceRequest | None = None
        marks = PromptMarks()
        for request, (wait_s, after_end) in zip(turns, _waits(turns, options.idle_gap_cap_s), strict=True):
            scaled_s = wait_s / options.think_factor
            steps.append(
                Step(request, f"{prefix}-{request.chat_id}", scaled_s, after_end, marks.next(request.hash_ids))
            )
            due_s += scaled_s
            if after_end and before is not None:
                due_s += before.api_time_s or 0.0
            before = request
        ends_s.append(due_s)
        plans.append(SessionPlan(turns[0].session_id, arrival_s, steps))
    offered = _offered(trace, plans, cut, max(ends_s))
    return Plan(sessions=plans, offered=offered, cut_session=plans[-1].session_id if cut else None)


def _offered(trace: Trace, plans: list[SessionPlan], cut: int, span_s: float) -> OfferedLoad:
    requests = sorted((step.request for plan in plans for step in plan.steps), key=lambda r: r.timestamp_s)
    prompt = sum(r.input_length for r in requests)
    output = sum(max(r.output_length, 1) for r in requests)
    hits = sum(cached_tokens(requests, trace.block_tokens, lambda _index, _request: 0))
    # Requests of a single instant have no rate: take one second.
    over_s = span_s if span_s > 0 else 1.0
    return OfferedLoad(
        requests=len(requests),
        sessions=len(plans),
        cut_sessions=cut,
        span_s=span_s,
        requests_per_s=len(requests) / over_s,
        prompt_tokens_per_s=prompt / over_s,
        new_tokens_per_s=(prompt - hits) / over_s,
        output_tokens_per_s=output / over_s,
        ideal_apc=hits / prompt,
        input_mean_tokens=prompt / len(requests),
        output_mean_tokens=output / len(requests),
        longest_tokens=max(r.input_length + max(r.output_length, 1) for r in requests),
    )


def describe(offered: OfferedLoad) -> list[tuple[str, str]]:
    """The offered load as rows of a table."""
    cut = f" ({offered.cut_sessions} of them cut)" if offered.cut_sessions else ""
    return [
        ("requests", f"{offered.requests:,} in {counted(offered.sessions, 'session')}{cut}"),
        ("span", f"{offered.span_s:,.1f} s"),
        ("requests/s", f"{offered.requests_per_s:,.3f}"),
        ("prompt tokens/s", f"{offered.prompt_tokens_per_s:,.0f}"),
        ("new tokens/s (infinite cache)", f"{offered.new_tokens_per_s:,.0f}"),
        ("output tokens/s", f"{offered.output_tokens_per_s:,.0f}"),
        ("mean input / output", f"{offered.input_mean_tokens:,.0f} / {offered.output_mean_tokens:,.0f} tokens"),
        ("longest prompt with its answer", f"{offered.longest_tokens:,} tokens"),
        ("APC, one infinite cache", f"{offered.ideal_apc:.3f}"),
    ]


def offered_dict(offered: OfferedLoad) -> dict[str, Any]:
    """The offered load as plain data for the run header."""
    plain: dict[str, Any] = msgspec.to_builtins(offered)
    return plain
