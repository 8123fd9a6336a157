"""Several engines in virtual time: one event queue takes each from step to step and moves KV between them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from sim.core.engine import Engine
from sim.core.handoff import Pull, PullFailure, failure_delay_s
from sim.core.sequence import Request
from sim.core.types import TokenEvent

News = tuple[str, TokenEvent]
"""(engine, event)"""


class _Member:
    """One engine and the time of its next event."""

    __slots__ = ("engine", "name", "wake_s")

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.wake_s = math.inf


class VirtualFleet:
    """Engines by name, sharing one virtual clock. Deterministic: equal calls give equal events.

    A pull finds its P by ``remote_bootstrap_addr``, which here is the name of an engine. Cost of an event: O(log n)
    for n engines. With ``report_progress`` off in the engines the only events are first tokens and ends.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.engines = dict(engines)
        self.now_s = 0.0
        self._members = {name: _Member(name, engine) for name, engine in self.engines.items()}
        self._wakes: list[tuple[float, str, _Member]] = []
        """Entries whose time differs from their member's ``wake_s`` are stale."""
        self._arrivals: list[tuple[float, int, str, Request]] = []
        self._transfers: list[tuple[float, int, str, str, PullFailure | None]] = []
        self._unanswered: dict[int, tuple[str, Pull, float]] = {}
        """(D, pull, time at which D gives up) by number of the placeholder transfer: pulls whose id P does not hold
        yet."""
        self._waiting_pulls: dict[str, list[int]] = {}
        """Numbers of unanswered pulls by transfer id."""
        self._count = 0
        self._horizon_s = math.inf

    def submit(self, engine: str, request: Request, at_s: float | None = None) -> None:
        """Send a request to an engine at ``at_s`` (default: now; not before now).

        Raises:
            ValueError, EngineDeadError: it arrives now and the engine can never serve it (``Engine.submit``).
        """
        if at_s is None or at_s <= self.now_s:
            member = self._members[engine]
            member.engine.submit(request, self.now_s)
            self._set_wake(member)
        else:
            self._count += 1
            heapq.heappush(self._arrivals, (at_s, self._count, engine, request))

    def abort(self, engine: str, request_id: str) -> bool:
        """Abort a request now."""
        member = self._members[engine]
        known = member.engine.abort(request_id, self.now_s)
        if known:
            self._reschedule(member)
        return known

    def next_s(self) -> float:
        """Time of the next event in seconds (infinite: there is none)."""
        wakes = self._wakes
        while wakes and wakes[0][2].wake_s != wakes[0][0]:
            heapq.heappop(wakes)
        next_s = wakes[0][0] if wakes else math.inf
        if self._arrivals and self._arrivals[0][0] < next_s:
            next_s = self._arrivals[0][0]
        if self._transfers and self._transfers[0][0] < next_s:
            next_s = self._transfers[0][0]
        return next_s

    def advance(self, until_s: float = math.inf) -> list[News]:
        """Advance to the next instant with events, but no further than ``until_s``; returns the events in order.

        An empty list means that ``until_s`` is reached, or that no event is left if it is infinite. Runs of
        steps are not cut at ``until_s``: use ``run`` for progress up to then.
        """
        while (now_s := self.next_s()) <= until_s and now_s != math.inf:
            self.now_s = now_s
            news = self._settle(now_s)
            if news:
                return news
        if until_s != math.inf and until_s > self.now_s:
            self.now_s = until_s
        return []

    def run(self, until_s: float = math.inf) -> Iterator[News]:
        """Advance to ``until_s``, or until no event is left; yields (engine, event) in order.

        Runs of steps are cut at ``until_s``, so at most the tokens of one step are missing then. The consumer of the
        events may submit and abort between them. O(engines) per call besides its events.
        """
        self._horizon_s = until_s
        try:
            while news := self.advance(until_s):
                yield from news
        finally:
            self._horizon_s = math.inf
        if until_s != math.inf:
            for member in self._members.values():
                member.engine.interrupt(self.now_s)
                self._set_wake(member)

    def _settle(self, now_s: float) -> list[News]:
        news: list[News] = []
        arrivals, transfers, wakes = self._arrivals, self._transfers, self._wakes
        while arrivals and arrivals[0][0] <= now_s:
            _, _, name, request = heapq.heappop(arrivals)
            self.submit(name, request, now_s)
        while transfers and transfers[0][0] <= now_s:
            _, number, name, request_id, failure = heapq.heappop(transfers)
            if failure is not PullFailure.UNKNOWN_TRANSFER or self._unanswered.pop(number, None) is not None:
                self._end_pull(news, name, request_id, failure)
        while wakes and wakes[0][0] <= now_s:
            at_s, _, member = heapq.heappop(wakes)
            if member.wake_s != at_s:
                continue
            member.wake_s = math.inf
            engine = member.engine
            end_s = engine.step_end_s
            if end_s is not None and end_s <= now_s:
                for event in engine.end_step():
                    news.append((member.name, event))
                    if event.transfer_id is not None:
                        self._retry_pulls(event.transfer_id)
                end_s = None
            if end_s is None:
                engine.begin_step(now_s, self._horizon_s)
                for pull in engine.take_pulls():
                    self._request_pull(member.name, pull, now_s + engine.config.abort_timeout_s)
            self._set_wake(member)
        return news

    def _set_wake(self, member: _Member) -> None:
        """Wake an engine when its step ends, or when it has something to begin."""
        if member.wake_s == self.now_s:
            return  # it is woken at this instant anyway
        at_s = member.engine.step_end_s
        if at_s is None:
            at_s = max(member.engine.next_event_s(), self.now_s)
        if at_s != member.wake_s:
            member.wake_s = at_s
            if at_s != math.inf:
                heapq.heappush(self._wakes, (at_s, member.name, member))

    def _reschedule(self, member: _Member) -> None:
        """Reschedule an engine at its next step boundary after a change from outside."""
        member.engine.interrupt(self.now_s)
        if member.engine.step_end_s is not None:
            self._set_wake(member)
        elif member.wake_s != self.now_s:
            member.wake_s = self.now_s
            heapq.heappush(self._wakes, (self.now_s, member.name, member))

    def _end_pull(self, news: list[News], name: str, request_id: str, failure: PullFailure | None) -> None:
        member = self._members[name]
        member.engine.interrupt(self.now_s)
        if failure is None:
            member.engine.finish_pull(request_id)
        else:
            event = member.engine.fail_pull(request_id, self.now_s)
            if event is not None:
                news.append((name, event))
        self._reschedule(member)

    def _request_pull(self, name: str, pull: Pull, gives_up_s: float) -> None:
        """Send D's pull request to P. If P does not hold the transfer yet, D waits for it until it gives up."""
        params = pull.params
        source_name = params.remote_bootstrap_addr or ""
        source = self.engines.get(source_name)
        failure: PullFailure | None
        if not (params.transfer_id and params.remote_engine_id and params.remote_bootstrap_addr):
            failure, seconds = PullFailure.INVALID_PARAMS, 0.0
        elif source is None:
            failure, seconds = PullFailure.UNREACHABLE, 0.0
        else:
            answer = source.serve_pull(
                params.transfer_id, params.remote_engine_id, pull.blocks, pull.streams, pull.transfers, self.now_s
            )
            failure, seconds = answer.failure, answer.seconds
            self._set_wake(self._members[source_name])
        done_s = self.now_s + seconds
        self._count += 1
        if failure is PullFailure.UNKNOWN_TRANSFER:
            done_s = gives_up_s
            self._unanswered[self._count] = (name, pull, gives_up_s)
            self._waiting_pulls.setdefault(params.transfer_id or "", []).append(self._count)
        elif failure is not None:
            done_s = self.now_s + failure_delay_s(failure, self.engines[name].config.abort_timeout_s)
        heapq.heappush(self._transfers, (done_s, self._count, name, pull.request_id, failure))

    def _retry_pulls(self, transfer_id: str) -> None:
        """Answer the pulls that were waiting for a transfer that P has just begun to hold."""
        for number in self._waiting_pulls.pop(transfer_id, ()):
            waiting = self._unanswered.pop(number, None)
            if waiting is not None:
                self._request_pull(*waiting)
