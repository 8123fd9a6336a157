"""Requests that the admission rule holds: they wait ahead of the queue, take no place in flight and cost no engine.

The line (`policies.admission.gate`) is looked at after a lease is released, an instance changes, a client leaves or the
rule is switched, and once a second while anything is held. A look sends one request at a time through the caps, so that
the rule sees the room that it takes. While requests for a model wait in the queue, others for it are sent at the bound
only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Set
from enum import StrEnum
from typing import Any, NamedTuple

from policies.admission.base import NO_INSTANCES, AdmissionReason, Admit, Hold
from policies.admission.gate import LOOK_S
from policies.admission.line import Held
from policies.admission.room import ONE_PART, Parts, Room
from policies.registry import parameters
from policies.row import Row
from policies.types import RequestView
from proxy.fleet.instances import Instances
from proxy.routing.admission import Admission, Seat
from proxy.routing.hold_text import held_sentence, hold_reason, offer_sentence
from proxy.routing.refusals import wait_too_long
from proxy.routing.router import Router
from proxy.settings import AdmissionSettings

log = logging.getLogger("warmroute.admission")

_AT_ONCE_S = 0.005
"""Seconds after which a look leaves the rest of its work to a later turn of the event loop."""
_REST = 9.0
"""Rest after a look, as a multiple of its duration: a long line takes at most a tenth of the event loop's time."""
_REST_UNFINISHED = 1.0
"""The same after a look that has more to send."""
_SHOWN = 20
"""Held requests listed by ``as_dict``."""


_AT_BOUND = Admit(AdmissionReason.HELD_LONG_ENOUGH)


class HoldEnd(StrEnum):
    """End of a hold: closed set used as a metric's label."""

    SENT = "sent"
    AT_BOUND = "at_bound"
    """Sent because ``admission.max_hold_s`` was reached."""
    LEFT = "left"
    """The client left, or the proxy shut down."""
    FAILED = "failed"
    """No instance could take it when it was sent."""


class _Waiter(NamedTuple):
    held: Held
    seat: Seat
    sent: asyncio.Future[AdmissionReason]


class HoldingLine:
    """Owner of the held requests of one proxy, and of the timer that looks at them. ``close`` ends both."""

    def __init__(self, settings: AdmissionSettings, router: Router, instances: Instances, admission: Admission) -> None:
        self._settings = settings
        self._router = router
        self._gate = router.routing.gate
        self._instances = instances
        self._admission = admission
        self._waiters: dict[Held, _Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._look_handle: asyncio.Handle | None = None
        self._rests_until_s = 0.0
        self._closed = False
        self.refused = 0
        """Requests answered 429 because of ``admission.reject_above_s``."""
        self.on_ended: Callable[[HoldEnd, float], None] = _ignore_end
        """Called with every end of a hold and its seconds."""
        admission.on_wake = self.wake

    def __len__(self) -> int:
        return len(self._waiters)

    def apply(self, settings: AdmissionSettings) -> None:
        """Apply other bounds; rule and ``max_hold_s`` stay: ``switch`` changes those."""
        self._settings = settings
        self.wake()

    def switch(self, name: str | None, params: Mapping[str, Any], max_hold_s: float | None) -> None:
        """Switch the rule or the bound on holding; held requests stay in line. Raises ValueError for an unknown one."""
        self._router.switch_admission(name, params, max_hold_s)
        self._rests_until_s = 0.0
        self.wake()

    def enter(self, request: RequestView, seat: Seat, row: Row) -> Coroutine[Any, Any, None] | None:
        """Decide when a new request may be sent: now (None), or when the coroutine has returned, in which it is held.

        No coroutine for most requests: this runs for each of them. Records reason and time in ``row``.

        Raises:
            QueueError: 429, its expected wait is above ``admission.reject_above_s``.
            NoCandidateError: by the coroutine: it was held, and no instance could take it afterwards.
        """
        if self._gate.never_holds:
            row.admission = AdmissionReason.NEVER_HOLDS
            if self._gate.on_offer is not None:
                self._gate.observe_offer(request, self._room(), time.monotonic())
            return None
        decoders = self._instances.decoders()
        lacking = self._instances.served.lacking(seat.model) if seat.model is not None else NO_INSTANCES
        if decoders <= lacking:
            return None  # routing rejects it
        answer = self._router.routing.offer(request, decoders, time.monotonic(), self._parts(decoders))
        if isinstance(answer, Admit):
            row.admission, seat.room_on = answer.reason, answer.instances
            return None
        expected_s, limit_s = answer.hold.expected_wait_s, self._settings.reject_above_s
        if limit_s is not None and expected_s > limit_s:
            self._gate.leave(answer)
            self.refused += 1
            raise wait_too_long(expected_s, limit_s)
        if len(self._gate) > self._settings.max_held or self._closed:
            self._gate.leave(answer)
            row.admission = AdmissionReason.LINE_FULL
            return None
        return self._hold(answer, seat, row)

    def wake(self) -> None:
        """Schedule one look at the line after the current callback, or after the rest of the last look."""
        if not self._waiters or self._look_handle is not None or self._closed:
            return
        loop, rest_s = asyncio.get_running_loop(), self._rests_until_s - time.monotonic()
        self._look_handle = loop.call_soon(self._look) if rest_s <= 0 else loop.call_later(rest_s, self._look)

    def answer(self, request: RequestView) -> Admit | Hold:
        """The answer that a request would get now; nothing is counted."""
        decoders = self._instances.decoders()
        return self._router.would_admit(request, decoders, self._parts(decoders))

    def explained(self, answer: Admit | Hold) -> dict[str, Any]:
        """An answer of ``answer``, JSON-ready."""
        return {"rule": self._gate.rule.name, "answer": "send" if isinstance(answer, Admit) else "hold"} | _shown(
            answer, offer_sentence(answer)
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the rule, the first held requests in the order of the line, the parts of a divided fleet."""
        now_s, room = time.monotonic(), self._room()
        return {
            "rule": self._gate.rule.name,
            "held": len(self),
            "longest_held_s": round(max((now_s - held.since_s for held in self._waiters), default=0.0), 3),
            "refused": self.refused,
            "line": [
                {
                    "request_id": held.request.request_id,
                    "session_id": held.request.session_id,
                    "held_s": round(now_s - held.since_s, 3),
                    **_shown(hold, held_sentence(hold, now_s - held.since_s)),
                }
                for held, hold in self._gate.reasons(_SHOWN, room, now_s)
            ],
            "parts": [
                {
                    "instances": sorted(part),
                    "held": view.held,
                    "pool_tokens": view.pool_tokens,
                    "active_tokens": view.active_tokens,
                    "kept_tokens": view.kept_tokens,
                    "recomputation_ratio": round(view.lost_share, 3),
                }
                for part, view in self._gate.by_part(room, now_s)
            ],
        }

    def rule_as_dict(self) -> dict[str, Any]:
        """JSON-ready: rule, parameters and bounds that apply now."""
        return {
            "name": self._gate.rule.name,
            "params": parameters(self._gate.rule),
            "max_hold_s": self._gate.max_hold_s,
            "max_held": self._settings.max_held,
            "reject_above_s": self._settings.reject_above_s,
            "held": len(self),
            "known_rules": self._router.known_rules,
        }

    def pool_tokens(self) -> int:
        """KV pools of the instances that the rule is asked about, in tokens; 0: unknown."""
        return self._router.state.pool_tokens(self._instances.decoders())

    def lost_share(self) -> float:
        """Share of those instances' time that recomputing lost prefixes takes, lately."""
        return self._router.state.accounts.losses.share(len(self._instances.decoders()), time.monotonic())

    def close(self) -> None:
        """Stop looking; what is still held is cancelled."""
        self._closed = True
        for handle in (self._timer, self._look_handle):
            if handle is not None:
                handle.cancel()
        self._timer = self._look_handle = None
        for waiter in self._waiters.values():
            waiter.sent.cancel()

    async def _hold(self, held: Held, seat: Seat, row: Row) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiters[held] = _Waiter(held, seat, loop.create_future())
        seat.request = held.request
        row.held_because = hold_reason(held.hold)
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._tick)
        end = HoldEnd.LEFT
        try:
            row.admission = await waiter.sent
            end = HoldEnd.AT_BOUND if row.admission is AdmissionReason.HELD_LONG_ENOUGH else HoldEnd.SENT
        except Exception:
            end = HoldEnd.FAILED
            raise
        finally:
            row.held_s = time.monotonic() - held.since_s
            row.stages_ms["held"] = row.held_s * 1e3
            if waiter.sent.done() and not waiter.sent.cancelled():
                waiter.sent.exception()  # retrieved, in case that the client has left since
            del self._waiters[held]
            self._gate.leave(held)
            if not self._waiters and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            elif end is HoldEnd.LEFT:
                self.wake()
            self.on_ended(end, row.held_s)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        self.wake()

    def _look(self) -> None:
        """Send the held requests that may be sent, as far as there is time."""
        self._look_handle = None
        began_s = time.monotonic()
        finished = self._send_overdue(began_s) and self._send_admitted(began_s)
        now_s = time.monotonic()
        rest = _REST if finished else _REST_UNFINISHED
        self._rests_until_s = now_s + min(rest * (now_s - began_s), LOOK_S)
        if not finished:
            self.wake()

    def _send_admitted(self, now_s: float) -> bool:
        """Send until the rule holds the rest, there is no room, or the time is over; False in the last case."""
        decoders, full = self._instances.decoders(), self._admission.queued_models()
        full.update(
            model for model in {each.seat.model for each in self._waiters.values()} if not self._may_decode(model)
        )
        parts = self._parts(decoders)
        while True:
            stuck = {waiter.held for waiter in self._waiters.values() if waiter.seat.model in full} if full else ()
            held = self._router.routing.admitted(decoders, now_s, stuck, parts)
            if held is None:
                return True
            assert held.admitted is not None
            waiter = self._waiters[held]
            if not self._send(waiter, held.admitted):
                full.add(waiter.seat.model)
            if time.monotonic() - now_s > _AT_ONCE_S:
                return False

    def _send_overdue(self, now_s: float) -> bool:
        """Send those that have reached the bound, room or not; False if the time is over."""
        since_s = now_s - self._gate.max_hold_s
        overdue = [each for each in self._waiters.values() if each.held.since_s <= since_s and not each.sent.done()]
        for waiter in overdue:
            self._gate.leave(waiter.held)
            self._send(waiter, _AT_BOUND)
            if time.monotonic() - now_s > _AT_ONCE_S:
                return False
        return True

    def _send(self, waiter: _Waiter, admitted: Admit) -> bool:
        """Route a request, and wake it. False if there was no room, so that it waits in the queue."""
        if waiter.sent.done():  # its client has just left
            return True
        room = True
        try:
            waiter.seat.room_on = admitted.instances
            room = waiter.seat.reserve()
        except Exception as error:
            # A policy's defect must fail this request only, not block the requests behind it.
            log.debug("a held request could not be routed", exc_info=True)
            waiter.sent.set_exception(error)
        else:
            waiter.sent.set_result(admitted.reason)
        return room

    def _parts(self, decoders: Set[str]) -> Parts:
        """Parts of the fleet that have no model in common."""
        served = self._instances.served
        # An instance whose models are not known may serve any: then nothing is apart.
        return served.parts if decoders <= served.listed else ONE_PART

    def _room(self) -> Room:
        """That of the instances that may decode, whatever the model."""
        decoders = self._instances.decoders()
        return self._router.state.room(decoders, self._parts(decoders))

    def _may_decode(self, model: str | None) -> bool:
        return not self._instances.healthy(model) <= self._router.state.producers


def _shown(answer: Admit | Hold, sentence: str) -> dict[str, Any]:
    shown = {**answer._asdict(), "reason": answer.reason.value, "sentence": sentence}
    if isinstance(answer, Admit):
        shown["instances"] = sorted(answer.instances)
    return shown


def _ignore_end(_: HoldEnd, __: float) -> None:
    """Default of ``on_ended``."""
