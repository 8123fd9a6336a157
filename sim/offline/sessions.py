"""The closed loop: send times of turns, as in ``replayer.replay``, in virtual time.

Sessions start in order of arrival, each when its time has come and a slot is free. Turn k + 1 is due after turn k's end
plus think time, or at its gap from turn k's due time but not before turn k's end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from replayer.replay.plan import SessionPlan, Step


class LiveSession:
    """A session in progress."""

    __slots__ = ("due_s", "number", "plan", "turn")

    def __init__(self, plan: SessionPlan, number: int) -> None:
        self.plan = plan
        self.number = number
        """Place in the order of arrival."""
        self.turn = 0
        """Index of the turn that is due or in flight."""
        self.due_s = plan.arrival_s


class DueTurn(NamedTuple):
    """A turn that is due to be sent."""

    session: LiveSession
    step: Step
    due_s: float
    """Due time in engine seconds; the turn is sent later if its session waited for a slot."""


SessionOver = Callable[[str], None]
"""(session_id): called when a session has ended its last turn."""


def nobody(session_id: str) -> None:
    """Drop the notice that a session is over."""


class TurnSource(Protocol):
    """A source of due turns; the simulation reports to it when they end."""

    on_over: SessionOver
    """Called once for each session that is over."""

    def next_s(self) -> float:
        """Due time of the next turn in engine seconds (infinite: none, until one in flight ends)."""
        ...

    def take(self) -> DueTurn | None:
        """Take the turn that is due next; None if there is none."""
        ...

    def ended(self, session: LiveSession, now_s: float) -> None:
        """The session's turn in flight has ended, well or badly."""
        ...


class ClosedLoopSource:
    """All sessions known beforehand. ``plans`` must be in order of arrival."""

    def __init__(self, plans: Iterable[SessionPlan], max_inflight_sessions: int | None) -> None:
        self._arrivals = iter(plans)
        self._slots = math.inf if max_inflight_sessions is None else max_inflight_sessions
        self._due: list[tuple[float, int, LiveSession]] = []
        self._count = 0
        self._next = next(self._arrivals, None)
        self._started = 0
        self.on_over: SessionOver = nobody

    def next_s(self) -> float:
        """Due time of the next turn in engine seconds; infinite if none is known."""
        due_s = self._due[0][0] if self._due else math.inf
        if self._next is not None and self._slots > 0 and self._next.arrival_s < due_s:
            return self._next.arrival_s
        return due_s

    def take(self) -> DueTurn | None:
        """Take the turn that is due next; None if there is none."""
        arrival = self._next
        due = self._due
        if arrival is not None and self._slots > 0 and (not due or arrival.arrival_s < due[0][0]):
            self._slots -= 1
            session = LiveSession(arrival, self._started)
            self._started += 1
            self._next = next(self._arrivals, None)
        elif due:
            session = heapq.heappop(due)[2]
        else:
            return None
        return DueTurn(session, session.plan.steps[session.turn], session.due_s)

    def ended(self, session: LiveSession, now_s: float) -> None:
        """Schedule the session's next turn, or end the session."""
        session.turn += 1
        if session.turn == len(session.plan.steps):
            self._slots += 1
            self.on_over(session.plan.session_id)
            return
        step = session.plan.steps[session.turn]
        session.due_s = now_s + step.wait_s if step.after_end else max(session.due_s + step.wait_s, now_s)
        self._count += 1
        heapq.heappush(self._due, (session.due_s, self._count, session))
