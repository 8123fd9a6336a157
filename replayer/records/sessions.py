"""Sessions of a run: the time until the last turn is done, and its ratio to the time on an idle fleet.

*Completion time* of a session: end of its last turn minus the time at which its first turn was due, so waiting for a
session slot, in the client and at the router counts. Think times are part of it; they are equal under every policy.

*Slowdown* of a session: completion time over idle time, 1 at best. Idle time is the same session's completion if every
turn took its idle time: an instance with nothing else to do computes the tokens that no earlier turn of the session had
in its prompt (`replayer.records.idle`). Later turns are due by the plan's own waits, so a trace's gaps count in full
where an idle fleet would have waited for them. Idle time depends on the plan and the costs alone: it is the same for
every policy. The costs are those of the run's header: for simulations the hardware profile's, for replays a reference
(one H200), so the level of a replay's slowdown depends on how close its engines are to the reference; the order of two
runs of one trace does not. Prefixes shared with other sessions make a slowdown below 1 possible.

A session with a failed turn is not completed: it is counted, and has neither time. Nor has the session that the
request limit cut. Where it is not known which sessions are whole (a run that was interrupted, or a file that does
not name the session that a limit cut), no session has one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from replayer.records.idle import IdleCosts
from replayer.records.runs import RequestRecord, Run


class SessionClock:
    """One session's times, updated turn by turn; add the turns in their order. Seven numbers, whatever its length."""

    __slots__ = ("_costs", "_idle_due_s", "_idle_end_s", "due_s", "ended_s", "failed_turns", "turns")

    def __init__(self, costs: IdleCosts) -> None:
        self._costs = costs
        self.due_s = 0.0
        """Due time of the first turn, engine seconds."""
        self.ended_s = 0.0
        """End of the latest turn, engine seconds."""
        self.turns = 0
        self.failed_turns = 0
        self._idle_due_s = 0.0
        self._idle_end_s: float | None = 0.0
        """Due time and end of the latest turn on an idle fleet, from the due time of the first; None: not known."""

    def add(self, record: RequestRecord) -> None:
        """Add the next turn."""
        if not self.turns:
            self.due_s = record.scheduled_s
        self.turns += 1
        if not record.ok or record.finished_s is None:
            self.failed_turns += 1
            return
        self.ended_s = record.finished_s
        self._add_idle(record)

    def _add_idle(self, record: RequestRecord) -> None:
        before_s = self._idle_end_s
        if before_s is None or record.wait_s is None or record.own_prefix_tokens is None:
            self._idle_end_s = None  # recorded by a version that did not write the plan's waits
            return
        if self.turns > 1:
            due_s = self._idle_due_s + record.wait_s
            self._idle_due_s = before_s + record.wait_s if record.wait_after_end else max(due_s, before_s)
        turn_s = self._costs.turn_s(record.input_length, record.own_prefix_tokens, record.output_length)
        self._idle_end_s = self._idle_due_s + turn_s

    @property
    def completion_s(self) -> float | None:
        """Engine seconds; None with a failed turn."""
        return None if self.failed_turns else self.ended_s - self.due_s

    @property
    def slowdown(self) -> float | None:
        """Completion over idle time; None with a failed turn or where the plan's waits were not recorded."""
        completion_s = self.completion_s
        return completion_s / self._idle_end_s if completion_s is not None and self._idle_end_s else None


class SessionSpread(msgspec.Struct, frozen=True):
    """Mean, p50 and p90 (linear between order statistics) of ``n`` values; None without values."""

    n: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None


class SessionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run's sessions."""

    sessions: int
    """Sessions that sent a turn."""
    completed: int
    """Whole sessions of which every turn succeeded."""
    failed: int
    """Sessions with a failed turn."""
    cut: int
    """Sessions that are not known to be whole; none of them failed."""
    completion_s: SessionSpread
    """From the first turn's due time to the last turn's end, engine seconds, of completed sessions."""
    slowdown: SessionSpread
    """Completion over idle time, a factor, of completed sessions."""


class SessionTally:
    """Figures of sessions as they end: the clocks of those in progress, and two floats of each completed one.

    Args:
        costs: for the idle times.
    """

    def __init__(self, costs: IdleCosts) -> None:
        self._costs = costs
        self._open: dict[str, SessionClock] = {}
        self._completion_s = array("d")
        self._slowdown = array("d")
        self._failed = self._cut = 0

    @property
    def completion_s(self) -> Sequence[float]:
        """Completion times of the completed sessions, engine seconds."""
        return self._completion_s

    @property
    def in_progress(self) -> int:
        """Sessions that have sent a turn and are not known to be over."""
        return len(self._open)

    def add(self, record: RequestRecord) -> None:
        """Add a turn; those of one session in their order."""
        clock = self._open.get(record.session_id)
        if clock is None:
            clock = self._open[record.session_id] = SessionClock(self._costs)
        clock.add(record)

    def over(self, session_id: str, *, whole: bool = True) -> None:
        """Count a session to which no turn will be added; ``whole``: no limit cut it."""
        clock = self._open.pop(session_id, None)
        if clock is not None:
            self.count(clock, whole=whole)

    def count(self, clock: SessionClock, *, whole: bool = True) -> None:
        """Count a session that has all its turns."""
        completion_s, slowdown = clock.completion_s, clock.slowdown
        if completion_s is None:
            self._failed += 1
        elif not whole:
            self._cut += 1
        else:
            self._completion_s.append(completion_s)
            if slowdown is not None:
                self._slowdown.append(slowdown)

    def all_over(self, *, whole: bool = True) -> None:
        """Count all sessions that are still in progress."""
        for session_id in list(self._open):
            self.over(session_id, whole=whole)

    def figures(self) -> SessionFigures:
        """Figures of the sessions that are over."""
        completed = len(self._completion_s)
        return SessionFigures(
            sessions=completed + self._failed + self._cut,
            completed=completed,
            failed=self._failed,
            cut=self._cut,
            completion_s=_spread(self._completion_s),
            slowdown=_spread(self._slowdown),
        )


def _spread(values: array[float]) -> SessionSpread:
    if not values:
        return SessionSpread(0)
    p50, p90 = (float(value) for value in np.quantile(values, (0.5, 0.9)))
    return SessionSpread(len(values), float(np.mean(values)), p50, p90)


def whole_sessions_known(run: Run) -> bool:
    """True if every session of the run but ``header.cut_session`` is whole.

    False for a run that did not end or lost records, and for one that its request limit may have cut without naming
    the session.
    """
    header = run.header
    if run.incomplete:
        return False
    if header.request_limit is None or len(run.records) < header.request_limit or header.cut_session is not None:
        return True
    return header.offered.get("cut_sessions") == 0


def session_clocks(run: Run, costs: IdleCosts | None = None) -> dict[str, SessionClock]:
    """The clock of every session of a run, all its turns added.

    Args:
        run: one run (of several pooled ones, sessions of one name would be taken for one).
        costs: for the idle times; None: those of the run's header.
    """
    costs = costs or run.header.idle_costs
    clocks: dict[str, SessionClock] = {}
    for record in sorted(run.records, key=lambda record: record.scheduled_s):
        clocks.setdefault(record.session_id, SessionClock(costs)).add(record)
    return clocks


def session_tally(runs: Iterable[Run]) -> SessionTally:
    """All sessions of one or several runs, those of each run for themselves."""
    tally = SessionTally(IdleCosts())
    for run in runs:
        known = whole_sessions_known(run)
        for session_id, clock in session_clocks(run).items():
            tally.count(clock, whole=known and session_id != run.header.cut_session)
    return tally
