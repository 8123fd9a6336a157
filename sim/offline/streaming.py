"""The closed loop over a trace too long to hold: turns are read as virtual time advances, and dropped when sent.

The reader is ``look_ahead_s`` of the trace ahead of the clock, so memory holds the turns that arrive within
that time and those whose sessions have not reached them yet. A turn that its client sends earlier than that (because a
long gap is capped, or think times are scaled) is read late; it is then sent immediately, and counted.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Iterator

import msgspec

from replayer.replay.own_prefix import PromptMarks
from replayer.replay.plan import PlanOptions, SessionPlan, Step, id_prefix, wait_between
from replayer.traces.trace import TraceError, TraceRequest
from sim.offline.options import LARGEST_SIGMAS, SimOptions, SimulationError
from sim.offline.sessions import DueTurn, LiveSession, SessionOver, nobody

FORGET_S = 4 * 3600.0
"""Trace time after which a session that has sent nothing counts as over; a later turn of it starts a new session."""


class _Streamed(LiveSession):
    """A session with the turns that are read and not sent yet."""

    __slots__ = ("ended_s", "forgotten", "idle", "last", "marks", "steps")

    def __init__(self, plan: SessionPlan, number: int, first: TraceRequest) -> None:
        super().__init__(plan, number)
        self.last = _times_of(first)
        """The last turn read, without its prompt."""
        self.marks = PromptMarks()
        self.ended_s = 0.0
        self.steps: deque[Step] = deque()
        self.idle = False
        """True after its last known turn has ended; more turns may still be read."""
        self.forgotten = False
        """True when no more turns will be read."""


class StreamedLoop:
    """Turns of a stream in time order; a ``TurnSource``.

    Args:
        requests: In time order, with the request limit applied (``read_apart``).
        sha256: Of the trace, for the request ids.
        options: Of the simulation; ``max_inflight_sessions`` must be None.
        look_ahead_s: Distance read ahead of the clock, seconds of the trace.

    Raises:
        SimulationError: options that do not work with a stream.
        TraceError: no requests, or scales out of range.
    """

    def __init__(
        self, requests: Iterator[TraceRequest], sha256: str, options: SimOptions, look_ahead_s: float = 600.0
    ) -> None:
        if options.max_inflight_sessions is not None:
            raise SimulationError(
                "--max-inflight-sessions: a stream does not show where a session ends; leave out --stream"
            )
        least_s = 2 * LARGEST_SIGMAS * options.noise.arrival_jitter_s * options.plan.time_scale
        if not least_s <= look_ahead_s < math.inf:
            raise SimulationError(
                f"--look-ahead-s must be at least {least_s:g} with this --arrival-jitter-s, and finite"
            )
        plan = options.plan
        plan.check()
        self._think_scale = plan.think_factor
        self._plan: PlanOptions = plan
        self._noise = options.noise
        self._draw = random.Random(f"{options.seed}/arrivals")
        self._prefix = id_prefix(sha256)
        self._requests = requests
        self.on_over: SessionOver = nobody
        self._look_ahead_s = look_ahead_s
        self._due: list[tuple[float, bool, int, _Streamed]] = []
        """(due time in engine seconds, True if it begins a session, order, session)"""
        self._sessions: OrderedDict[str, _Streamed] = OrderedDict()
        """Least recently read first."""
        self._count = self._started = 0
        self._now_s = 0.0
        self.late_turns = 0
        """Turns that were read only after their due time."""
        self.most_late_s = 0.0
        self.most_sessions = 0
        """Largest number of sessions known at once."""
        first = next(self._requests, None)
        if first is None:
            raise TraceError("no requests to replay")
        self._start_s = first.timestamp_s
        self._next: TraceRequest | None = first

    def next_s(self) -> float:
        """Due time of the next turn in engine seconds; infinite if none is known."""
        due = self._due
        while self._next is not None and (
            not due or self._next.timestamp_s - self._start_s <= due[0][0] * self._plan.time_scale + self._look_ahead_s
        ):
            self._read()
        return due[0][0] if due else math.inf

    def take(self) -> DueTurn | None:
        """Take the turn that is due next; None if there is none."""
        if not self._due:
            return None
        due_s, _, _, session = heapq.heappop(self._due)
        self._now_s = max(self._now_s, due_s)
        return DueTurn(session, session.steps.popleft(), session.due_s)

    def ended(self, session: LiveSession, now_s: float) -> None:
        """Schedule the session's next turn, or end the session."""
        assert isinstance(session, _Streamed)
        self._now_s = max(self._now_s, now_s)
        session.ended_s = now_s
        if session.steps:
            self._schedule(session)
        else:
            session.idle = True
            if session.forgotten:
                self.on_over(session.plan.session_id)

    def _schedule(self, session: _Streamed) -> None:
        """Schedule a session's next turn: it is known, and the one before has ended."""
        step = session.steps[0]
        ended_s = session.ended_s
        session.due_s = ended_s + step.wait_s if step.after_end else max(session.due_s + step.wait_s, ended_s)
        session.idle = False
        self._push(session, begins=False)

    def _push(self, session: _Streamed, *, begins: bool) -> None:
        late_s = self._now_s - session.due_s
        if late_s > 0:
            self.late_turns += 1
            self.most_late_s = max(self.most_late_s, late_s)
        self._count += 1
        heapq.heappush(self._due, (max(session.due_s, self._now_s), begins, self._count, session))

    def _read(self) -> None:
        """Take in the current request and fetch the one after it."""
        request = self._next
        assert request is not None
        self._next = next(self._requests, None)
        session = self._sessions.get(request.session_id)
        request_id = f"{self._prefix}-{request.chat_id}"
        if session is None:
            self._start(request, request_id)
            return
        wait_s, after_end = wait_between(session.last, request, self._plan.idle_gap_cap_s)
        session.last = _times_of(request)
        shared = session.marks.next(request.hash_ids)
        session.steps.append(Step(request, request_id, wait_s / self._think_scale, after_end, shared))
        self._sessions.move_to_end(request.session_id)
        if session.idle:
            self._schedule(session)

    def _start(self, request: TraceRequest, request_id: str) -> None:
        arrival_s = (request.timestamp_s - self._start_s) / self._plan.time_scale
        arrival_s = max(arrival_s + self._noise.shift_s(self._draw), 0.0)
        session = _Streamed(SessionPlan(request.session_id, arrival_s, []), self._started, request)
        session.steps.append(Step(request, request_id, 0.0, False, session.marks.next(request.hash_ids)))
        self._started += 1
        self._sessions[request.session_id] = session
        self._forget(request.timestamp_s)
        self.most_sessions = max(self.most_sessions, len(self._sessions))
        self._push(session, begins=True)

    def _forget(self, read_s: float) -> None:
        """Drop sessions that ended long ago; O(1) per session."""
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if session.last.timestamp_s > read_s - FORGET_S:
                return
            del self._sessions[name]
            session.forgotten = True
            if session.idle:
                self.on_over(name)


def _times_of(request: TraceRequest) -> TraceRequest:
    """A turn without its prompt, which is not needed once it is sent."""
    return msgspec.structs.replace(request, hash_ids=(), text=None)
