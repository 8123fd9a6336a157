"""Several engines in virtual time: one event queue takes each from step to step and moves KV between them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from sim.core.engine import Engine
from sim.core.handoff import Pull, PullFailure, failure_delay_s
from sim.core.sequence import Request
from sim.core.types import TokenEvent


class VirtualFleet:
    """Engines by name, sharing one virtual clock. Deterministic: equal calls give equal events.

    A pull finds its P by ``remote_bootstrap_addr``, which here is the name of an engine.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.engines = dict(engines)
        self.now_s = 0.0
        self._wakes: list[tuple[float, str]] = []
        self._arrivals: list[tuple[float, int, str, Request]] = []
        self._transfers: list[tuple[float, int, str, str, PullFailure | None]] = []
        self._unanswered: list[tuple[str, Pull, float]] = []
        """(D, pull, when D gives up) for transfers that P does not know yet."""
        self._count = 0
        self._horizon_s = math.inf

    def submit(self, engine: str, request: Request, at_s: float | None = None) -> None:
        """Send a request to an engine at ``at_s`` (default: now; not before now)."""
        self._count += 1
        heapq.heappush(self._arrivals, (max(at_s or 0.0, self.now_s), self._count, engine, request))

    def abort(self, engine: str, request_id: str) -> bool:
        """Abort a request now."""
        return self.engines[engine].abort(request_id)

    def next_s(self) -> float:
        """When the next thing happens (infinite: nothing will)."""
        candidates = [queue[0][0] for queue in (self._arrivals, self._transfers, self._wakes) if queue]
        candidates += [gives_up_s for _, _, gives_up_s in self._unanswered]
        return min(candidates, default=math.inf)

    def run(self, until_s: float = math.inf) -> Iterator[tuple[str, TokenEvent]]:
        """Let time pass up to ``until_s``, or until nothing happens any more; yields (engine, event) in order.

        Runs of decode steps are cut at ``until_s``, so what is missing then is at most the tokens of one step.
        Whoever consumes the events may submit and abort between them.
        """
        self._horizon_s = until_s
        while (now_s := self.next_s()) <= until_s and not math.isinf(now_s):
            self.now_s = now_s
            yield from self._settle(now_s)
        if not math.isinf(until_s):
            self.now_s = max(self.now_s, until_s)
            for engine in self.engines.values():
                engine.interrupt(self.now_s)
            self._wakes = []
            for name in self.engines:
                self._wake(name)

    def _settle(self, now_s: float) -> Iterator[tuple[str, TokenEvent]]:
        due: set[str] = set()
        while self._arrivals and self._arrivals[0][0] <= now_s:
            _, _, name, request = heapq.heappop(self._arrivals)
            self.engines[name].submit(request, now_s)
            due.add(name)
        while self._transfers and self._transfers[0][0] <= now_s:
            _, _, name, request_id, failure = heapq.heappop(self._transfers)
            yield from self._end_pull(name, request_id, failure, now_s)
            due.add(name)
        self._ask_again(now_s)
        while self._wakes and self._wakes[0][0] <= now_s:
            due.add(heapq.heappop(self._wakes)[1])
        for name in sorted(due):
            engine = self.engines[name]
            end_s = engine.step_end_s
            if end_s is not None and end_s <= now_s:
                for event in engine.end_step():
                    yield name, event
                self._ask_again(now_s)
            if engine.step_end_s is None:
                engine.begin_step(now_s, self._horizon_s)
                for pull in engine.take_pulls():
                    self._ask(name, pull, now_s, now_s + engine.config.abort_timeout_s)
            self._wake(name)

    def _wake(self, name: str) -> None:
        engine = self.engines[name]
        end_s = engine.step_end_s
        at_s = max(engine.next_event_s(), self.now_s) if end_s is None else end_s
        if not math.isinf(at_s):
            heapq.heappush(self._wakes, (at_s, name))

    def _end_pull(
        self, name: str, request_id: str, failure: PullFailure | None, now_s: float
    ) -> Iterator[tuple[str, TokenEvent]]:
        engine = self.engines[name]
        engine.interrupt(now_s)
        if failure is None:
            engine.finish_pull(request_id)
            return
        event = engine.fail_pull(request_id, now_s)
        if event is not None:
            yield name, event

    def _ask(self, name: str, pull: Pull, now_s: float, gives_up_s: float) -> None:
        params = pull.params
        source = self.engines.get(params.remote_bootstrap_addr or "")
        failure: PullFailure | None
        if not (params.transfer_id and params.remote_engine_id and params.remote_bootstrap_addr):
            failure, seconds = PullFailure.INVALID_PARAMS, 0.0
        elif source is None:
            failure, seconds = PullFailure.UNREACHABLE, 0.0
        else:
            answer = source.serve_pull(
                params.transfer_id, params.remote_engine_id, pull.blocks, pull.streams, pull.transfers, now_s
            )
            failure, seconds = answer.failure, answer.seconds
        if failure is PullFailure.UNKNOWN_TRANSFER:
            self._unanswered.append((name, pull, gives_up_s))
            return
        if failure is not None:
            seconds = failure_delay_s(failure, self.engines[name].config.abort_timeout_s)
        self._count += 1
        heapq.heappush(self._transfers, (now_s + seconds, self._count, name, pull.request_id, failure))

    def _ask_again(self, now_s: float) -> None:
        """P may have come to hold a transfer since; those that D has waited for long enough fail."""
        waiting, self._unanswered = self._unanswered, []
        for name, pull, gives_up_s in waiting:
            if gives_up_s <= now_s:
                self._count += 1
                failure = PullFailure.UNKNOWN_TRANSFER
                heapq.heappush(self._transfers, (now_s, self._count, name, pull.request_id, failure))
            else:
                self._ask(name, pull, now_s, gives_up_s)
