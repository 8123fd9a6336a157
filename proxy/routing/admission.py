"""Admission control: caps on requests in flight, and one bounded queue, fair between tenants.

A request is admitted by being routed: one synchronous step chooses an instance below its cap and enters the lease into
the ledger, so the caps hold for any number of simultaneous arrivals. A request without room waits. When a lease is
released, a client leaves or an instance recovers, the waiting requests are routed until one does not fit: tenants in
turns (`policies.fairness`), a tenant's requests in order of arrival. Each waiter is woken after it has been routed.
There is no polling or spurious wake-up. Requests for other models, or of longer contexts, served by other engines which
are full, block none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Set
from math import ceil

from policies.admission.base import NO_INSTANCES
from policies.fairness import FairQueue, TenantShares
from policies.ledger import Ledger
from policies.session import Routed
from policies.types import NoCandidateError, RequestView, Role
from proxy.fleet.breaker import Trial
from proxy.fleet.instances import Instances
from proxy.routing.refusals import queue_full, queued_too_long
from proxy.routing.routes import Routes
from proxy.settings import LimitSettings

log = logging.getLogger("warmroute.admission")


_Kind = tuple[str | None, frozenset[str]]
"""Model, and the instances that cannot serve it with a context of that length."""


class Admission:
    """Admission of one proxy. Every request takes a ``seat`` and closes it at its end."""

    def __init__(
        self,
        limits: LimitSettings,
        instances: Instances,
        router: Routes,
        ledger: Ledger,
        shares: TenantShares | None = None,
    ) -> None:
        """``shares``: turns of the tenants, those of the line of held requests if there is one."""
        self._limits = limits
        self._instances = instances
        self._router = router
        self._ledger = ledger
        self.shares = shares or TenantShares()
        self._queue: FairQueue[Seat] = FairQueue(self.shares)
        self._again: OrderedDict[Seat, None] = OrderedDict()
        self._waiting: Counter[_Kind] = Counter()  # of the requests in the queue
        self._loop: asyncio.AbstractEventLoop | None = None
        self._moving_up = False
        self.in_flight = 0
        """Requests being served, each counted once for all its attempts and legs."""
        self.refused_full = 0
        self.refused_late = 0
        self.left = 0
        """Clients that left while in the queue."""
        self.on_waited: Callable[[float], None] = _ignore
        """Called with the seconds of every finished wait, regardless of its outcome."""
        self.on_wake: Callable[[], None] = _ignore
        """Called when room may have appeared, after the queue was woken."""
        self._last_wait_s = 0.0
        instances.on_room = ledger.on_release = self.wake

    def apply(self, limits: LimitSettings) -> None:
        """Apply other limits and re-check the queue."""
        self._limits = limits
        self.wake()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue) + len(self._again)

    def queued_models(self) -> set[str | None]:
        """Models for which new requests wait in the queue."""
        return {model for model, _ in self._waiting}

    def as_dict(self) -> dict[str, int]:
        """JSON-ready."""
        return {
            "in_flight": self.in_flight,
            "waiting": self.waiting,
            "queue_full": self.refused_full,
            "queue_timeout": self.refused_late,
            "left_the_queue": self.left,
        }

    def seat(self, model: str | None = None) -> Seat:
        """A new seat for one request, to be routed and closed; with ``model``, on instances that serve it."""
        return Seat(self, model)

    def wake(self) -> None:
        """Schedule one pass over the heads of the queue after the current callback."""
        if (self._waiting or self._again) and not self._moving_up and self._loop is not None:
            self._moving_up = True
            self._loop.call_soon(self._move_up)
        self.on_wake()

    def retry_after_s(self) -> int:
        """Value of Retry-After: the approximate current waiting time in whole seconds."""
        head = next(iter(self._queue), None)
        wait_s = max(self._last_wait_s, time.monotonic() - head.waits_since_s) if head is not None else 0.0
        return max(1, ceil(min(wait_s, self._limits.queue_timeout_s)))

    def _choose(self, seat: Seat) -> bool:
        """Route a request if it has room. Raises NoCandidateError if even an idle fleet could not serve it."""
        limits = self._limits
        if not seat.admitted and limits.max_in_flight is not None and self.in_flight >= limits.max_in_flight:
            return False
        started_s = time.perf_counter()
        candidates = self._instances.candidates(seat.model, seat.tokens)
        if seat.tried or seat.only is not None:
            candidates = seat.among(candidates)
        cap = limits.max_in_flight_per_instance
        if cap is not None:
            requests_on = self._ledger.joint_requests
            candidates = {name for name in candidates if requests_on(name) < cap}
        try:
            routed = self._router.route(seat.request, candidates, seat.room_on)
        except NoCandidateError:
            if self._can_answer(seat.among(self._instances.healthy(seat.model, seat.tokens))):
                return False
            raise
        seat.take(routed, time.perf_counter() - started_s)
        return True

    def _can_answer(self, names: Set[str]) -> bool:
        return any(self._instances[name].settings.role is not Role.KV_PRODUCER for name in names)

    def _begin_trials(self, routed: Routed) -> list[Trial]:
        decode, prefill = routed.decision.decode_on, routed.decision.prefill_on
        trials = [self._instances[name].breaker.begin_trial() for name in ((decode, prefill) if prefill else (decode,))]
        return [trial for trial in trials if trial is not None]

    def _join(self, seat: Seat) -> None:
        # One that must wait for its instance must not block the others.
        again = seat.admitted or seat.only is not None
        if not seat.admitted:
            if again:
                if len(self._again) >= self._limits.queue_size:
                    self.refused_full += 1
                    raise queue_full(len(self._again), self.retry_after_s())
            elif len(self._queue) >= self._limits.queue_size:
                self._make_place(seat)
        self._loop = asyncio.get_running_loop()
        seat.waits_since_s = time.monotonic()
        seat.room_on = NO_INSTANCES  # others take that room meanwhile
        if again:
            self._again[seat] = None
            return
        self._queue.append(seat, seat.request.tenant, seat.waits_since_s)
        seat.queued_as = seat.kind
        self._waiting[seat.queued_as] += 1
        seat.waited = True

    def _make_place(self, seat: Seat) -> None:
        """Refuse a request of the tenant that uses most of a full queue: this one, or else that tenant's last."""
        self.refused_full += 1
        error = queue_full(len(self._queue), self.retry_after_s())
        last = self._queue.last_of_largest(seat.request.tenant)
        if last is None:
            raise error
        self._dequeue(last)
        if last.granted is not None and not last.granted.done():
            last.granted.set_exception(error)

    def _leave(self, seat: Seat) -> None:
        waited_s = time.monotonic() - seat.waits_since_s
        seat.queued_s += waited_s
        self._last_wait_s = waited_s
        self.on_waited(waited_s)
        self._dequeue(seat)

    def _dequeue(self, seat: Seat) -> None:
        self._again.pop(seat, None)
        if seat in self._queue:
            self._queue.remove(seat)
            self._waiting[seat.queued_as] -= 1
            if not self._waiting[seat.queued_as]:
                del self._waiting[seat.queued_as]

    def _move_up(self) -> None:
        self._moving_up = False
        # Retries may exclude some instances, so one that does not fit must not block the others.
        for again in list(self._again):
            self._try(again)
        # Those for a model that is full must not block the others. Equal sets of instances are tried once.
        full: set[frozenset[str]] = set()
        now_s = time.monotonic()

        def stuck(seat: Seat) -> bool:
            return bool(full) and seat.kind[1] in full

        while (seat := self._queue.next(now_s, stuck)) is not None:
            if not self._try(seat):
                if len(self._waiting) == 1:
                    return
                full.add(seat.kind[1])

    def _try(self, seat: Seat) -> bool:
        """Try to route a waiting request; True if its wait has ended, with a place or an error."""
        granted = seat.granted
        assert granted is not None
        if not granted.done():  # else its client has just left, or its wait has timed out
            try:
                if not self._choose(seat):
                    return False
            except NoCandidateError as error:
                if not seat.admitted:
                    return False  # the last instance failed: one may recover before the timeout
                granted.set_exception(error)
            except Exception as error:
                # A policy's defect must fail this request only, not block the requests behind it.
                log.debug("a waiting request could not be routed", exc_info=True)
                granted.set_exception(error)
            else:
                granted.set_result(None)
        self._dequeue(seat)
        return True


class Seat:
    """One request's place: ``route`` for every attempt, ``wait`` if there was no room, ``close`` at the end."""

    __slots__ = (
        "_admission",
        "_counted_tokens",
        "_routed",
        "_trials",
        "admitted",
        "decided_s",
        "granted",
        "model",
        "only",
        "queued_as",
        "queued_s",
        "request",
        "room_on",
        "tokens",
        "tried",
        "waited",
        "waits_since_s",
    )

    request: RequestView
    queued_as: _Kind

    def __init__(self, admission: Admission, model: str | None) -> None:
        self._admission = admission
        self.model = model
        self.tokens = 0
        """Context in tokens that its instance must have; 0: any."""
        self.only: str | None = None
        """The one instance that can serve it; None: any that serves the model."""
        self._routed: Routed | None = None
        self._trials: list[Trial] = []
        self.tried: Set[str] = NO_INSTANCES
        self.admitted = False
        self.waited = False
        """True once it was held or in the queue, so that it counts against its tenant's share."""
        self._counted_tokens = 0
        self.granted: asyncio.Future[None] | None = None
        self.waits_since_s = 0.0
        self.queued_s = 0.0
        """Seconds spent in the queue, over all attempts."""
        self.decided_s = 0.0
        """Seconds taken by the last decision."""
        self.room_on: frozenset[str] = NO_INSTANCES
        """Instances on which the admission rule has just found room, for the first attempt; empty: all."""

    def route(self, request: RequestView, tried: Set[str]) -> Routed | None:
        """Route now if there is room and none for its model waits. The caller owns the lease; None means ``wait``.

        A request that was admitted before keeps its place in flight for further attempts and bypasses the queue.

        Raises:
            NoCandidateError: no instance, however idle, may take it.
        """
        if self._routed is not None:
            return self._taken()  # reserved
        admission = self._admission
        self.request, self.tried = request, tried
        self._end_trials()
        if not self.admitted:
            if admission._moving_up:
                admission._move_up()
            if self.only is None and admission._waiting and self.kind in admission._waiting:
                return None
        return self._taken() if admission._choose(self) else None

    def reserve(self) -> bool:
        """Route ``request`` now if there is room, so that the next ``route`` returns the result. True if there was.

        Raises:
            NoCandidateError: no instance, however idle, may take it.
        """
        self.waited = True
        self._routed = self.route(self.request, NO_INSTANCES)
        return self._routed is not None

    async def wait(self) -> Routed:
        """Wait for room and be routed, as its tenant's turn comes; retries of admitted requests come first.

        Raises:
            NoCandidateError: no instance may take it; for a retry, also on timeout.
            QueueError: 429 when the queue is full, 503 on timeout.
        """
        admission = self._admission
        healthy = admission._instances.healthy(self.model, self.tokens)
        if not self.admitted and not admission._can_answer(self.among(healthy)):
            raise NoCandidateError("no healthy instance")
        admission._join(self)
        loop = asyncio.get_running_loop()
        self.granted = loop.create_future()
        deadline = loop.call_later(admission._limits.queue_timeout_s, self._late)
        try:
            await self.granted
            return self._taken()
        except asyncio.CancelledError:
            admission.left += 1
            raise
        finally:
            deadline.cancel()
            self.granted = None
            admission._leave(self)

    @property
    def kind(self) -> _Kind:
        """Requests of one kind are served in order of arrival."""
        served, model = self._admission._instances.served, self.model
        return model, NO_INSTANCES if model is None else served.lacking(model, self.tokens)

    def among(self, names: set[str]) -> set[str]:
        """Those of ``names`` that this request may be sent to."""
        left = names - self.tried
        return left if self.only is None else left & {self.only}

    def take(self, routed: Routed, decided_s: float) -> None:
        """Record the routing result; called by ``Admission``."""
        self._routed, self.decided_s, self.room_on = routed, decided_s, NO_INSTANCES
        self._trials = self._admission._begin_trials(routed)
        if not self.admitted:
            self.admitted = True
            self._admission.in_flight += 1
            now_s = time.monotonic() if self.waited else 0.0  # unused unless it waited
            self._counted_tokens = self._admission.shares.sent(
                self.request.tenant, routed.decision.new_tokens, now_s, waited=self.waited
            )

    def close(self) -> None:
        """Return everything the request still owns, on any outcome."""
        routed, self._routed = self._routed, None
        if routed is not None:  # cancelled at the moment in which it was routed
            decision = routed.decision
            for name in (decision.decode_on, decision.prefill_on):
                if name is not None:
                    routed.commitment.retract(name)
            routed.commitment.release(time.monotonic())
        self._end_trials()
        if self.admitted:
            self.admitted = False
            self._admission.in_flight -= 1
            self._admission.shares.ended(self.request.tenant, self._counted_tokens)
            self._admission.wake()

    def _taken(self) -> Routed:
        routed, self._routed = self._routed, None
        assert routed is not None
        return routed

    def _end_trials(self) -> None:
        if self._trials:
            for trial in self._trials:
                trial.end()
            self._trials = []
            self._admission.wake()

    def _late(self) -> None:
        granted, admission = self.granted, self._admission
        if granted is None or granted.done():
            return
        if self.admitted:
            granted.set_exception(NoCandidateError("no other instance had room in time"))
            return
        admission.refused_late += 1
        granted.set_exception(queued_too_long(admission._limits.queue_timeout_s, admission.retry_after_s()))


def _ignore(*_: float) -> None:
    """Default of ``on_waited`` and ``on_wake``."""
