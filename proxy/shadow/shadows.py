"""Shadow decisions off the latency path: a bounded queue of live decisions, and the one task that works it off.

The routing step appends request, snapshot and decision (all immutable) and continues. The task waits ``BATCH_S``, or
until the queue is half full, so that the request's bytes leave first and several decisions have arrived. Then it
decides for the shadows in slices of ``SLICE_S`` with a rest after each that is ``REST`` times as long: they take at
most a fifth of the event loop's time, however many they are. What the queue cannot hold is skipped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from policies.admission.base import AdmissionView, Admit, Hold, SessionView
from policies.session import RoutingSession
from policies.shadow import LiveDecision, ShadowVerdict, admitted_by
from policies.snapshot import FleetSnapshot
from policies.types import Decision, PolicyPart, RequestView
from proxy.logs import LimitedLog
from proxy.settings.observation.shadow import ShadowEntry, ShadowParts, ShadowSettings
from proxy.shadow.figures import LatestDecisions, ShadowFigures

log = logging.getLogger("warmroute.shadow")

BATCH_S = 1.0
"""Seconds from the first waiting decision to the shadows'. Many at once cost less: the event loop wakes once, and the
processor's caches are warm.
"""
SLICE_S = 0.001
"""Seconds after which the shadows leave the rest to a later turn of the event loop; one shadow's is never split.
A batch of three shadows at 100 requests/s takes three.
"""
REST = 4.0
"""Rest after a slice, as a multiple of its duration."""
LONGEST_REST_S = 0.05
PAUSE_AFTER = 20
"""Failures in a row after which a shadow is paused."""
SLOW_S = 0.01
"""A decision that takes longer counts as a failure: no request is served meanwhile."""
_DONE = object()


class Decided(NamedTuple):
    """A live routing decision."""

    request: RequestView
    fleet: FleetSnapshot
    decision: Decision


class Offered(NamedTuple):
    """A live answer of admission to a new request."""

    request: RequestView
    session: SessionView
    fleet: AdmissionView
    answer: Admit | Hold


class Shadows:
    """Owner of the shadows, their queue and figures. ``run`` is the task; its caller owns and cancels it."""

    def __init__(self, settings: ShadowSettings, routing: RoutingSession) -> None:
        self._routing = routing
        self._parts = ShadowParts({}, {}, {})
        self._queue: deque[Decided | Offered] = deque()
        self._steps: Iterator[None] | None = None
        """The rest of the decision that is being worked on."""
        self._now_s = self._end_s = 0.0
        """Latest reading of the clock, and the end of this slice on it."""
        self._bound = settings.queue
        self._waiting = asyncio.Event()
        self._crowded = asyncio.Event()
        """The queue is half full."""
        self.figures: dict[str, ShadowFigures] = {}
        """By label, in the order policies, planners, admission rules."""
        self.latest = LatestDecisions()
        self.requests = 0
        """Live routing decisions that the shadows were asked about."""
        self.skipped = 0
        """Live decisions that found the queue full, or could not be read."""
        self.seconds = 0.0
        """Seconds spent on all of it."""
        self._log = LimitedLog(log)
        self._clock = time.perf_counter
        self.switch(settings)

    @property
    def enabled(self) -> bool:
        """True if any shadow is configured."""
        return bool(self.figures)

    @property
    def waiting(self) -> int:
        """Live decisions in the queue, and the one that is being worked on."""
        return len(self._queue) + (self._steps is not None)

    def switch(self, settings: ShadowSettings) -> None:
        """Other shadows from now on; those that stay as they are keep their figures, unless paused. Raises ValueError.

        Every part is built before any is replaced.
        """
        parts = settings.built()
        kept, old = self.figures, self._parts
        figures: dict[str, ShadowFigures] = {}
        for part, now, before in (
            (PolicyPart.POLICY, parts.policies, old.policies),
            (PolicyPart.PLANNER, parts.planners, old.planners),
            (PolicyPart.ADMISSION, parts.admission, old.admission),
        ):
            for label, (entry, _) in now.items():
                same = label in before and before[label][0] == entry and not kept[label].paused
                figures[label] = kept[label] if same else _figures_of(part, entry)
        self.figures, self._parts, self._bound = figures, parts, settings.queue
        self._queue.clear()
        self._steps = None
        self.latest.clear()
        routing = self._routing
        routing.on_decided = self._decided if parts.policies or parts.planners else None
        routing.gate.on_offer = self._offered if parts.admission else None

    def as_settings(self) -> dict[str, Any]:
        """The shadows in the form of the settings."""
        return {
            "policies": [entry for entry, _ in self._parts.policies.values()],
            "planners": [entry for entry, _ in self._parts.planners.values()],
            "admission": [entry for entry, _ in self._parts.admission.values()],
            "queue": self._bound,
        }

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "enabled": self.enabled,
            "requests": self.requests,
            "skipped": self.skipped,
            "waiting": self.waiting,
            "request_us_mean": round(self.seconds / self.requests * 1e6, 3) if self.requests else None,
            "policies": [each.as_dict() for each in self.figures.values()],
            "latest": self.latest.as_list(),
        }

    async def run(self) -> None:
        """Decide for the shadows until cancelled."""
        queue, waiting = self._queue, self._waiting
        while True:
            await waiting.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(BATCH_S):
                    await self._crowded.wait()
            while queue or self._steps is not None:
                took_s = self.work_off(SLICE_S)
                if self.waiting:  # else the wait for the next batch is rest enough
                    await asyncio.sleep(min(REST * took_s, LONGEST_REST_S))
            waiting.clear()
            self._crowded.clear()

    def work_off(self, for_s: float) -> float:
        """Decide about waiting decisions until there are none, or ``for_s`` seconds have passed; returns the time."""
        queue, clock = self._queue, self._clock
        began_s = self._now_s = clock()
        self._end_s = began_s + for_s
        while self._now_s < self._end_s:
            if self._steps is None:
                if not queue:
                    break
                entry = queue.popleft()
                self._steps = self._decide(entry) if isinstance(entry, Decided) else self._admit(entry)
            if not self._step(self._steps):
                self._steps = None
                self._now_s = clock()
        self.seconds += self._now_s - began_s
        return self._now_s - began_s

    def _step(self, steps: Iterator[None]) -> bool:
        """Do one step; False if it was the last. An error ends this decision only, not the task."""
        try:
            return next(steps, _DONE) is not _DONE
        except Exception as error:
            log.debug("a shadow decision failed", exc_info=True)
            self._log.warning("unread", "the shadows skip a decision: %s: %s", type(error).__name__, error)
            self.skipped += 1
            return False

    def _decided(self, request: RequestView, fleet: FleetSnapshot, decision: Decision) -> None:
        self._append(tuple.__new__(Decided, (request, fleet, decision)))

    def _offered(self, request: RequestView, session: SessionView, fleet: AdmissionView, answer: Admit | Hold) -> None:
        self._append(Offered(request, session, fleet, answer))

    def _append(self, entry: Decided | Offered) -> None:
        waiting = len(self._queue)
        if waiting >= self._bound:
            self.skipped += 1
            return
        self._queue.append(entry)
        if not waiting:  # else the task knows
            self._waiting.set()
        elif 2 * waiting >= self._bound:
            self._crowded.set()

    def _decide(self, entry: Decided) -> Iterator[None]:
        """All shadows' decisions, with a pause after each at which the time is over."""
        self.requests += 1
        live = LiveDecision(*entry)
        verdicts: dict[str, ShadowVerdict] = {}
        for label, (_, policy) in self._parts.policies.items():
            self._ask(label, verdicts, live.routed_by, policy)
            if self._now_s >= self._end_s:
                yield
        if self._parts.planners:
            thresholds = self._routing.thresholds
            for label, (_, planner) in self._parts.planners.items():
                self._ask(label, verdicts, live.planned_by, planner, thresholds)
                if self._now_s >= self._end_s:
                    yield
        self.latest.note(entry.request.request_id, time.time(), entry.decision, verdicts)

    def _admit(self, entry: Offered) -> Iterator[None]:
        verdicts: dict[str, ShadowVerdict] = {}
        for label, (_, rule) in self._parts.admission.items():
            self._ask(label, verdicts, admitted_by, rule, *entry)
            if self._now_s >= self._end_s:
                yield
        self.latest.note(entry.request.request_id, time.time(), entry.answer, verdicts)

    def _ask(
        self,
        label: str,
        verdicts: dict[str, ShadowVerdict],
        decide: Callable[..., ShadowVerdict | None],
        *arguments: object,
    ) -> None:
        """Let one shadow decide; its failure is counted and ends there."""
        figures = self.figures[label]
        if figures.paused:
            return
        verdict, error = None, ""
        began_s = self._now_s  # the end of what came before: one reading of the clock for each shadow
        try:
            verdict = decide(*arguments)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:500]
            log.debug("the shadow %r failed", label, exc_info=True)
        self._now_s = now_s = self._clock()
        took_s = now_s - began_s
        figures.decisions += 1
        figures.seconds += took_s
        if verdict is not None:
            verdicts[label] = verdict
            if verdict[2] and not verdict[5]:  # agreed, without an answer: nothing else to add
                figures.agreed += 1
            else:
                figures.compared(verdict)
        if took_s > SLOW_S and not error:
            error = f"a decision took {took_s * 1e3:.0f} ms"
        if not error:
            figures.in_a_row = 0
        elif figures.failed(error, PAUSE_AFTER):
            log.warning("the shadow %s %r is %s", figures.part.value, label, figures.last_error)


def _figures_of(part: PolicyPart, entry: ShadowEntry) -> ShadowFigures:
    return ShadowFigures(part, entry.shown_as, dict(entry.params))
