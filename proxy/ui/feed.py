"""Feed of the dashboard: one message per second, computed once for all viewers, and not at all while nobody looks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from proxy.admin.conditions import conditions
from proxy.admin.instance_rows import departure_row, instance_rows
from proxy.breakdown import plain
from proxy.core import Core
from proxy.errors import RequestError
from proxy.operations.fleet_changes import FleetChanges
from proxy.ui.state import INSTANCE_WINDOW_S, FinishedRequest, RecentRequests, decisions, sample

log = logging.getLogger("warmroute.ui")

MAX_VIEWERS = 32
PERIOD_S = 1.0
DECISIONS_PER_MESSAGE = 20
_SHOWN_AT_START = 60
"""Decisions in the first message of a viewer."""
_READ_AT_START = 1_000
"""Rows read when the first viewer arrives; at 3 µs each."""
_READ_PER_MESSAGE = 2_000

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(FinishedRequest).decode


def event(kind: str, number: int, message: dict[str, Any]) -> bytes:
    """A server-sent event."""
    try:
        data = _encode(message)
    except (TypeError, UnicodeEncodeError):  # names and error texts are others'
        data = _encode(plain(message))
    return b"event: %b\r\nid: %d\r\ndata: %b\r\n\r\n" % (kind.encode(), number, data)


class DashboardFeed:
    """Messages for the viewers of one proxy's dashboard. There is no task: viewers' own requests compute them.

    The first viewer of a second computes its message, the others get the same bytes.
    """

    def __init__(self, core: Core, fleet: FleetChanges) -> None:
        self._core = core
        self._fleet = fleet
        self._recent = RecentRequests()
        self._shown: list[dict[str, Any]] = []
        self._row_number: int | None = None
        """Number of the last row read; None: none was looked for."""
        self._from_unix_s: float | None = None
        """End of the oldest request that was read; None: all that are kept were read."""
        self._message = b""
        self._state: dict[str, Any] = {}
        self._computed_s = float("-inf")
        self.viewers = 0
        self.messages = 0
        """Messages computed since the start."""

    def check_room(self) -> None:
        """Raise RequestError (503) if there are as many viewers as there may be."""
        if self.viewers >= MAX_VIEWERS:
            raise RequestError(
                503,
                f"the dashboard has {MAX_VIEWERS} viewers, its limit: close one of them",
                kind="service_unavailable",
                code="too_many_viewers",
                retry_after_s=10,
            )

    async def events(self) -> AsyncIterator[bytes]:
        """Events of one viewer, until the proxy shuts down: ``start`` with the last minutes, then ``state``.

        A viewer that missed a message gets ``start`` again, so that it lacks no point and no decision.
        """
        self.check_room()
        self.viewers += 1
        try:
            self._refresh()
            seen = self.messages
            yield self._start()
            while not self._core.draining:
                now_s = time.monotonic()
                await asyncio.sleep(max(0.01, self._computed_s + PERIOD_S - now_s))
                if self._core.draining:
                    break
                self._refresh()
                # A viewer that took longer than a period for a message has missed those of others meanwhile.
                message = self._message if self.messages <= seen + 1 else self._start()
                seen = self.messages
                yield message
            yield event("end", self.messages, {"why": "the proxy is shutting down"})
        finally:
            self.viewers -= 1

    def _refresh(self) -> None:
        """Compute the message of this second unless another viewer has."""
        now_s = time.monotonic()
        age_s = now_s - self._computed_s
        if age_s < 0.9 * PERIOD_S:
            return
        if age_s > 10 * PERIOD_S:  # nobody looked
            self._recent, self._shown, self._row_number = RecentRequests(), [], None
        self._computed_s = now_s
        self.messages += 1
        self.compute(time.time())

    def compute(self, now_unix_s: float) -> bytes:
        """The message of this moment."""
        first = self._row_number is None
        limit = _READ_AT_START if first else _READ_PER_MESSAGE
        rows = self._rows(limit)
        recent = self._recent
        if first:
            served = [row for row in rows if row.outcome != "rejected"]  # rejected ones are kept apart
            self._from_unix_s = served[0].ended_unix_s if len(served) >= limit else None
        recent.add(rows)
        chosen = sample(rows, _SHOWN_AT_START if first else DECISIONS_PER_MESSAGE)
        shown = list(decisions(chosen))
        self._shown = (self._shown + shown)[-_SHOWN_AT_START:]
        proxy = self._proxy()
        points = recent.advance(now_unix_s, {"in_flight": proxy["in_flight"], "held": proxy["held"]})
        self._state = {
            "unix_s": round(now_unix_s, 3),
            "proxy": proxy,
            "instances": self._instances(),
            "departing": [departure_row(each) for each in self._fleet.departures],
            "flows": recent.flows(),
            "minute": {**recent.fleet(), "seconds": self._seconds_read(now_unix_s)},
            "conditions": [condition.as_dict() for condition in conditions(self._core)],
        }
        streamed = {"points": points, "decisions": shown, "decisions_left_out": len(rows) - len(chosen)}
        self._message = event("state", self.messages, {**self._state, **streamed})
        return self._message

    def _start(self) -> bytes:
        streamed = {"points": list(self._recent.points), "decisions": self._shown, "decisions_left_out": 0}
        return event("start", self.messages, {**self._state, "window_s": INSTANCE_WINDOW_S, **streamed})

    def _rows(self, limit: int) -> list[FinishedRequest]:
        rows = []
        self._row_number = self._row_number or 0
        for number, line in self._core.breakdown.after(self._row_number, limit):
            self._row_number = number
            try:
                rows.append(_decode(line))
            except msgspec.DecodeError as error:
                log.debug("a row cannot be shown: %s", error)
        return rows

    def _seconds_read(self, now_unix_s: float) -> int:
        """Seconds of the last minute whose requests were read: fewer soon after the first viewer arrived."""
        if self._from_unix_s is None:
            return INSTANCE_WINDOW_S
        return min(INSTANCE_WINDOW_S, max(1, round(now_unix_s - self._from_unix_s)))

    def _proxy(self) -> dict[str, Any]:
        core, router = self._core, self._core.router
        breakdown = core.breakdown
        return {
            "policy": router.policy.name,
            "planner": router.planner.name,
            "admission": router.routing.gate.rule.name,
            "draining": core.draining,
            "started": breakdown.started,
            "finished": breakdown.finished,
            "in_flight": core.admission.in_flight,
            "held": len(core.holding),
            "queued": core.admission.waiting,
            "sessions": len(router.state.sessions),
            "event_loop_late_s": round(core.lag.late_s(10.0), 3),
            "viewers": self.viewers,
            "worker": core.worker,
            "workers": core.settings.workers,
        }

    def _instances(self) -> list[dict[str, Any]]:
        recent = self._recent.by_instance()
        rows = instance_rows(self._core, self._fleet)
        for row in rows:
            row["recent"] = recent.get(row["name"])
        return rows
