"""Drives an engine against the wall clock and hands each request its tokens.

Engine time is ``time_scale`` times wall time since the start. Steps are chained on the engine's own clock: the next
step begins when the last one ended in engine time, not when the event loop ran, so delays do not accumulate.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from sim.core.engine import Engine
from sim.core.handoff import Pull
from sim.core.sequence import Request
from sim.core.types import EngineDeadError, TokenEvent

_MOST_STEPS_AT_ONCE = 200
"""Steps a late driver catches up on before it yields to other work."""


class EngineClock:
    """Engine seconds since the clock was made."""

    def __init__(self, time_scale: float) -> None:
        self.time_scale = time_scale
        self._start_s = time.monotonic()

    def now(self) -> float:
        """The engine time."""
        return (time.monotonic() - self._start_s) * self.time_scale

    def wall_delay(self, engine_s: float) -> float:
        """Wall seconds until the engine time ``engine_s``; negative when it is past."""
        return self._start_s + engine_s / self.time_scale - time.monotonic()


class Delivery:
    """One request's tokens on their way to its HTTP response; made by ``Driver.submit``, read by one coroutine."""

    def __init__(self, request: Request, arrived_s: float, stream: bool, interval: int) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.sent = 0
        self.pending = 0
        """Tokens that have arrived and were not taken yet."""
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.ended = False
        """No more tokens will come: finished, or cut off."""
        self.cut_off = False
        """The client left or the server stops; no answer is sent."""
        self.woken_s = -math.inf
        self._least = interval if stream else math.inf
        self._news: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> bool:
        """Take an event; True if the reader should be woken now instead of with the next flush."""
        self.pending += event.tokens
        self.cached_tokens = event.cached_tokens
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.ended = True
        return self.ended or (event.first and self._least is not math.inf)

    @property
    def worth_waking(self) -> bool:
        """True if the reader would find something to send."""
        if self.ended or self._least is math.inf:
            return self.ended
        return self.pending > 0 and (self.pending >= self._least or not self.sent)

    def wake(self) -> None:
        """Wake the reader."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def cut(self) -> None:
        """End it without an answer."""
        self.ended = self.cut_off = True
        self.wake()

    async def tokens(self) -> int:
        """Wait until there is something to send; the number of tokens, 0 only at the end."""
        while not self.worth_waking:
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None
        count, self.pending = self.pending, 0
        self.sent += count
        return count


class Driver:
    """Owns one engine, its clock and the timer that takes it from step to step. ``close`` ends all of it."""

    def __init__(
        self,
        engine: Engine,
        clock: EngineClock,
        *,
        flush_s: float,
        stream_interval: int,
        on_pull: Callable[[Pull], None],
        on_first_token: Callable[[float], None],
        on_dead: Callable[[], None],
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.closed = False
        self._flush_s = flush_s
        self._stream_interval = stream_interval
        self._on_pull = on_pull
        self._on_first_token = on_first_token
        self._on_dead = on_dead
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._deliveries: dict[str, Delivery] = {}
        self._unflushed: set[Delivery] = set()
        self._step_timer: asyncio.Handle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._held: dict[str, list[asyncio.Future[None]]] = {}
        self._settled_s = 0.0
        """Engine time before which an idle engine has nothing left to do."""

    def submit(self, request: Request, arrived_s: float, stream: bool) -> Delivery:
        """Give a request to the engine as of its arrival.

        Raises:
            ValueError: the engine can never serve it.
            EngineDeadError: the engine is dead, or this request killed it.
        """
        try:
            self.engine.submit(request, arrived_s)
        except EngineDeadError:
            self._on_dead()
            raise
        delivery = Delivery(request, arrived_s, stream, self._stream_interval)
        self._deliveries[request.request_id] = delivery
        self._arm()
        return delivery

    def abort(self, request_id: str) -> None:
        """Drop a request; nothing happens if it is finished."""
        self._deliveries.pop(request_id, None)
        if self.engine.abort(request_id, self.clock.now()):
            self.nudge()

    def nudge(self) -> None:
        """Reschedule at the next step boundary after a change from outside."""
        now_s = self.clock.now()
        self.engine.interrupt(now_s)
        idle = self.engine.step_end_s is None
        if idle:
            self._settled_s = now_s
        self._arm(at_once=idle)

    def end_pull(self, request_id: str, arrived: bool) -> None:
        """Report the outcome of a pull that ``on_pull`` announced."""
        now_s = self.clock.now()
        self.engine.interrupt(now_s)
        if arrived:
            self.engine.finish_pull(request_id)
        else:
            event = self.engine.fail_pull(request_id, now_s)
            if event is not None:
                self._deliver(event)
        self.nudge()

    async def wait_until_held(self, transfer_id: str, engine_seconds: float) -> None:
        """Wait until a P leg's blocks are held under ``transfer_id``, but no longer than ``engine_seconds``."""
        future = self._loop.create_future()
        self._held.setdefault(transfer_id, []).append(future)
        try:
            await asyncio.wait([future], timeout=engine_seconds / self.clock.time_scale)
        finally:
            waiters = self._held[transfer_id]
            waiters.remove(future)
            if not waiters:
                del self._held[transfer_id]

    def close(self) -> None:
        """Stop the clock's work and cut every request off."""
        self.closed = True
        for timer in (self._step_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        for delivery in list(self._deliveries.values()):
            delivery.cut()

    def _arm(self, at_once: bool = False) -> None:
        """Set the timer for the step's end, or for the next event of an idle engine."""
        if self._step_timer is not None:
            self._step_timer.cancel()
            self._step_timer = None
        if self.closed:
            return
        end_s = self.engine.step_end_s
        due_s = self.engine.next_event_s() if end_s is None else end_s
        if at_once:
            delay_s = 0.0
        elif math.isinf(due_s):
            return
        else:
            # uvloop counts whole milliseconds and rounds; a timer that fires early would only be set again.
            delay_s = math.ceil(max(self.clock.wall_delay(due_s), 0.0) * 1000) / 1000
        self._step_timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        """Bring the engine up to the present: end the steps that are over and begin the next."""
        engine, now_s = self.engine, self.clock.now()
        start_s = min(max(engine.next_event_s(), self._settled_s), now_s)
        for _ in range(_MOST_STEPS_AT_ONCE):
            end_s = engine.step_end_s
            if end_s is not None:
                if end_s > now_s:
                    break
                events = engine.end_step()
                self._on_step()
                for event in events:
                    self._deliver(event)
                start_s = end_s
            horizon_s = start_s + self._flush_s * self.clock.time_scale
            begun = engine.begin_step(start_s, horizon_s)
            for pull in engine.take_pulls():
                self._on_pull(pull)
            if begun is None:
                next_s = engine.next_event_s()
                if not start_s < next_s <= now_s:
                    break
                start_s = next_s
        self._arm()

    def _deliver(self, event: TokenEvent) -> None:
        if event.transfer_id is not None:
            for future in self._held.get(event.transfer_id, ()):
                if not future.done():
                    future.set_result(None)
        delivery = self._deliveries.get(event.request_id)
        if delivery is None:
            return
        if event.first and event.tokens:
            self._on_first_token(event.time_s - delivery.arrived_s)
        if event.finish_reason is not None:
            del self._deliveries[event.request_id]
        now_s = time.monotonic()
        if delivery.put(event) or (delivery.worth_waking and now_s - delivery.woken_s >= self._flush_s):
            delivery.woken_s = now_s
            delivery.wake()
            return
        self._unflushed.add(delivery)
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(self._flush_s, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        unflushed, self._unflushed = self._unflushed, set()
        now_s = time.monotonic()
        for delivery in unflushed:
            if delivery.worth_waking:
                delivery.woken_s = now_s
                delivery.wake()
