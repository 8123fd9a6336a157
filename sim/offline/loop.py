"""The event loop of an offline simulation: due turns are routed, run and end, and schedule the next turn."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable

from policies.admission.base import Admit
from policies.admission.gate import LOOK_S
from policies.admission.line import Held
from policies.types import OffloadReason, RequestView
from replayer.traces.trace import TraceRequest
from sim.core.sequence import KvTransfer, keyed_request
from sim.core.types import TokenEvent
from sim.offline.exchange import SimulatedExchange, SimulatedLeg, leg_priority
from sim.offline.options import SimOptions
from sim.offline.router import OfflineRouter
from sim.offline.sessions import DueTurn, TurnSource
from sim.virtual import VirtualFleet

FIRST_OUTPUT_KEY = 1 << 64
"""Keys of generated blocks lie above those of every trace."""
OUTPUT_KEYS = 1 << 24
"""Blocks that one output may have."""
Finished = Callable[[SimulatedExchange, float], None]
"""(exchange, when it ended): called once for every request."""


class Simulation:
    """Runs a fleet under a router until no turn is left. Single-threaded, in virtual time."""

    def __init__(
        self,
        options: SimOptions,
        turns: TurnSource,
        fleet: VirtualFleet,
        router: OfflineRouter,
        block_tokens: int,
        finished: Finished,
    ) -> None:
        self._bounds = options.bounds
        self._probe_interval_s = options.probe_interval_s
        self._turns = turns
        self._fleet = fleet
        self._router = router
        self._block_tokens = block_tokens
        self._finished = finished
        self._open: dict[str, SimulatedExchange] = {}
        """Open exchanges by the request id of the current leg at its engine."""
        self._abandoned: dict[str, Callable[[], None]] = {}
        """Decode legs that were given up, by the same id, with the function that ends each."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._probe_s = 0.0
        self._held: dict[Held, DueTurn] = {}
        self._look_s = math.inf
        """When the held requests are looked at next."""

    def run(self) -> float:
        """Run until every turn has ended; returns that time in engine seconds."""
        fleet, turns, timers = self._fleet, self._turns, self._timers
        advance, on_event = fleet.advance, self._on_event
        while True:
            turn_s = turns.next_s()
            until_s = min(turn_s, self._probe_s, self._look_s)
            if timers and timers[0][0] < until_s:
                until_s = timers[0][0]
            if turn_s == math.inf and not timers and not self._held and fleet.next_s() == math.inf:
                if not self._open:
                    return fleet.now_s
                self._give_up()
                continue
            news = advance(until_s)
            if news:
                for _, event in news:
                    on_event(event)
            elif timers and timers[0][0] <= until_s:
                heapq.heappop(timers)[2]()
            elif self._look_s <= until_s:
                self._look(until_s)
            elif self._probe_s <= until_s:
                self._probe(turn_s)
            else:
                turn = turns.take()
                if turn is not None:
                    self._send(turn, fleet.now_s)

    def _give_up(self) -> None:
        """No event is left but exchanges are open: end them as failed."""
        now_s = self._fleet.now_s
        for exchange in list(self._open.values()):
            self._stop_leg(exchange)
            self._end(exchange, now_s, error="no engine will ever answer: its KV pool is used up")

    def _probe(self, turn_s: float) -> None:
        """Read the engines' KV usage and schedule the next reading, unless nothing can change it."""
        interval_s = self._probe_interval_s
        self._router.probe(self._probe_s)
        self._probe_s += interval_s
        if not self._open and not self._timers and not self._held and turn_s != math.inf:
            self._probe_s = max(self._probe_s, turn_s // interval_s * interval_s)

    # Legs

    def _send(self, turn: DueTurn, now_s: float) -> None:
        """Hold a turn or send it."""
        request = view_of(turn.step.request, turn.step.request_id, self._block_tokens)
        answer = self._router.offer(request, now_s)
        if isinstance(answer, Held):
            self._held[answer] = turn
            self._look_s = min(self._look_s, now_s + LOOK_S)
        else:
            self._route(turn, request, answer, now_s)

    def _look(self, now_s: float) -> None:
        """Send the held requests that may be sent."""
        while (held := self._router.admitted(now_s)) is not None:
            assert held.admitted is not None
            self._route(self._held.pop(held), held.request, held.admitted, held.since_s)
        self._look_s = now_s + LOOK_S if self._held else math.inf

    def _route(self, turn: DueTurn, request: RequestView, admitted: Admit, sent_s: float) -> None:
        """Decide on a turn that its client sent at ``sent_s``, and send its first leg."""
        step, now_s = turn.step, self._fleet.now_s
        replica, (decision, commitment, prefill) = self._router.route(request, now_s, admitted.instances)
        exchange = SimulatedExchange(turn.session, step, request, decision, commitment, turn.due_s, sent_s, replica)
        exchange.admission, exchange.held_s = admitted.reason, now_s - sent_s
        if prefill is None:
            self._send_whole(exchange)
            return
        exchange.predicted_cached_tokens = prefill.cached_tokens
        exchange.prefill_instance = prefill.instance
        self._begin(exchange, SimulatedLeg.PREFILL)
        if self._too_long(prefill.instance, request):
            self._prefill_failed(exchange, OffloadReason.FELL_BACK_P_ERROR, "P answered 400", refused=True)
            return
        self._submit(exchange, 1, KvTransfer(do_remote_decode=True, transfer_id=request.request_id))
        bound_s = self._bounds.prefill_timeout_s
        self._bound_leg(exchange, bound_s, lambda: self._prefill_late(exchange, bound_s))

    def _send_whole(self, exchange: SimulatedExchange) -> None:
        """Send the request as it is to D."""
        self._begin(exchange, SimulatedLeg.WHOLE)
        request, instance = exchange.request, exchange.decision.decode_on
        if self._too_long(instance, request):
            exchange.commitment.retract(instance)
            limit = self._fleet.engines[instance].config.max_model_len
            # The limit first: errors that begin alike are counted together.
            message = (
                f"HTTP 400: no room for prompt and output in {limit} tokens (--max-model-len, at most the KV pool): "
                f"the prompt has {request.prompt_tokens}"
            )
            self._end(exchange, self._fleet.now_s, error=message)
            return
        self._submit(exchange, request.max_tokens, None)

    def _begin(self, exchange: SimulatedExchange, leg: SimulatedLeg) -> None:
        exchange.leg, exchange.leg_sent_s = leg, self._fleet.now_s
        exchange.serial += 1

    def _submit(self, exchange: SimulatedExchange, max_tokens: int, transfer: KvTransfer | None) -> None:
        request, leg_id = exchange.request, exchange.leg_id
        self._open[leg_id] = exchange
        self._count += 1
        self._fleet.submit(
            exchange.leg_instance,
            keyed_request(
                leg_id,
                request.block_hashes,  # type: ignore[arg-type]  # the list that ``view_of`` made
                request.prompt_tokens,
                max_tokens,
                # Prompts differ after their last full block, so their outputs differ: the number ensures that here.
                FIRST_OUTPUT_KEY + self._count * OUTPUT_KEYS,
                transfer,
                _priority(exchange),
            ),
        )

    def _stop_leg(self, exchange: SimulatedExchange) -> None:
        """Close the connection of the current leg."""
        del self._open[exchange.leg_id]
        self._fleet.abort(exchange.leg_instance, exchange.leg_id)

    def _too_long(self, instance: str, request: RequestView) -> bool:
        return request.prompt_tokens + 1 > self._fleet.engines[instance].config.max_model_len

    def _bound_leg(self, exchange: SimulatedExchange, bound_s: float, late: Callable[[], None]) -> None:
        """Call ``late`` after ``bound_s`` unless the current leg has ended by then."""
        serial = exchange.serial

        def call() -> None:
            if exchange.serial == serial:
                late()

        self._at(self._fleet.now_s + bound_s, call)

    def _at(self, when_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (when_s, self._count, call))

    # Engine events

    def _on_event(self, event: TokenEvent) -> None:
        exchange = self._open.get(event.request_id)
        if exchange is None:
            end = self._abandoned.pop(event.request_id, None)
            if end is not None:
                end()
            return
        if exchange.leg is SimulatedLeg.PREFILL:
            self._prefill_done(exchange, event)
            return
        if event.first:
            self._first_token(exchange, event)
        exchange.completion_tokens += event.tokens
        if event.finish_reason is None:
            return
        if event.finish_reason == "error":
            self._decode_failed(exchange, OffloadReason.FELL_BACK_D_ERROR, "D answered 500")
            return
        del self._open[event.request_id]
        self._router.routing_of(exchange).answered(exchange.commitment, exchange.completion_tokens, event.time_s)
        self._end(exchange, event.time_s)

    def _first_token(self, exchange: SimulatedExchange, event: TokenEvent) -> None:
        """Handle D's first token: the prefill is over and its time updates the cost model."""
        took_s = event.time_s - exchange.leg_sent_s
        exchange.serial += 1
        exchange.first_token_s = event.time_s
        commitment, routing = exchange.commitment, self._router.routing_of(exchange)
        if exchange.leg is SimulatedLeg.DECODE:
            exchange.stages_s["decode_leg_first_byte"] = took_s
            exchange.legs["transfer"] = routing.handed_over(commitment, took_s, event.time_s)
            routing.began(commitment, event.time_s)
        else:
            exchange.actual_cached_tokens = event.cached_tokens
            routing.began(commitment, event.time_s)
            exchange.legs["first_token"] = routing.prefilled(commitment, took_s)
        self._router.changed(exchange, event.time_s)
        self._router.computed(exchange, exchange.decision.decode_on, event.time_s)

    def _prefill_done(self, exchange: SimulatedExchange, event: TokenEvent) -> None:
        """Send D's leg after P has computed the prompt and holds its KV."""
        del self._open[event.request_id]
        took_s = event.time_s - exchange.leg_sent_s
        exchange.actual_cached_tokens = event.cached_tokens
        exchange.stages_s["prefill_leg"] = took_s
        exchange.legs["prefill"] = self._router.routing_of(exchange).prefilled_on_p(
            exchange.commitment, took_s, event.time_s
        )
        self._router.changed(exchange, event.time_s)
        self._begin(exchange, SimulatedLeg.DECODE)
        request, prefill_on = exchange.request, exchange.decision.prefill_on
        assert prefill_on is not None
        self._router.computed(exchange, prefill_on, event.time_s)
        if self._too_long(exchange.decision.decode_on, request):
            self._fall_back(exchange, OffloadReason.FELL_BACK_D_ERROR, "D answered 400", refused=True)
            return
        transfer = KvTransfer(
            do_remote_prefill=True,
            transfer_id=request.request_id,
            remote_engine_id=self._fleet.engines[prefill_on].config.engine_id,
            remote_bootstrap_addr=prefill_on,
        )
        self._submit(exchange, request.max_tokens, transfer)
        bound_s = self._bounds.first_token_timeout_s
        self._bound_leg(exchange, bound_s, lambda: self._decode_late(exchange, bound_s))

    # Failed hand-offs

    def _prefill_late(self, exchange: SimulatedExchange, bound_s: float) -> None:
        self._stop_leg(exchange)
        self._prefill_failed(exchange, OffloadReason.FELL_BACK_P_TIMEOUT, f"P leg took over {bound_s:g} s")

    def _prefill_failed(
        self, exchange: SimulatedExchange, reason: OffloadReason, message: str, *, refused: bool = False
    ) -> None:
        # It is unknown how much P computed: assume nothing.
        exchange.commitment.retract(exchange.leg_instance)
        self._fall_back(exchange, reason, message, refused=refused)

    def _decode_late(self, exchange: SimulatedExchange, bound_s: float) -> None:
        """Give up a pull. It stays open until its first token or a further bound, as in the proxy."""
        leg_id, instance = exchange.leg_id, exchange.leg_instance
        del self._open[leg_id]
        hold = exchange.commitment.hold_on_decode()

        def end() -> None:
            hold.release()
            self._fleet.abort(instance, leg_id)

        def overdue() -> None:
            if self._abandoned.pop(leg_id, None) is not None:
                end()

        self._abandoned[leg_id] = end
        self._at(self._fleet.now_s + self._bounds.abandoned_s, overdue)
        self._fall_back(exchange, OffloadReason.FELL_BACK_D_TIMEOUT, f"no first byte within {bound_s:g} s")

    def _decode_failed(self, exchange: SimulatedExchange, reason: OffloadReason, message: str) -> None:
        del self._open[exchange.leg_id]
        self._fall_back(exchange, reason, message)

    def _fall_back(
        self, exchange: SimulatedExchange, reason: OffloadReason, message: str, *, refused: bool = False
    ) -> None:
        """Count the failure by its reason and run the request co-located on D.

        ``refused``: an engine found the prompt too long. D refuses it too, as all have the same limit, so the pair has
        not failed.
        """
        decision = exchange.decision
        self._router.routing_of(exchange).fell_back(exchange.commitment, self._fleet.now_s, refused=refused)
        self._router.changed(exchange, self._fleet.now_s)
        attempt = {"instance": decision.prefill_on, "error": message, "offload": reason.value}
        exchange.attempts = [*(exchange.attempts or ()), attempt]
        exchange.offload_reason, exchange.prefill_instance = reason.value, None
        exchange.predicted_cached_tokens = decision.cached_tokens
        self._send_whole(exchange)

    def _end(self, exchange: SimulatedExchange, now_s: float, error: str | None = None) -> None:
        """End the request: release it, record it, and let its session continue."""
        exchange.error = error
        exchange.serial += 1
        if error is None and exchange.actual_cached_tokens is not None:
            routing, prompt_tokens = self._router.routing_of(exchange), exchange.request.prompt_tokens
            routing.compare(exchange.commitment, prompt_tokens, exchange.actual_cached_tokens, now_s)
        exchange.commitment.release(now_s, self._bounds.hold_s, exchange.actual_cached_tokens)
        self._router.changed(exchange, now_s)
        self._finished(exchange, now_s)
        self._turns.ended(exchange.session, now_s)
        if self._held:
            self._look(now_s)


def view_of(request: TraceRequest, request_id: str, block_tokens: int) -> RequestView:
    """A request of a trace as policies see it: its full blocks' ids stand for their hashes."""
    full = request.full_blocks(block_tokens)
    ids = request.hash_ids
    hashes = ids[:full].tolist() if isinstance(ids, array) else list(ids[:full])
    return RequestView(
        request_id,
        request.input_length,
        hashes,
        float(block_tokens),
        request.session_id or None,
        max(request.output_length, 1),
    )


def _priority(exchange: SimulatedExchange) -> int:
    """``priority`` of the current leg; 0 without an order."""
    commitment = exchange.commitment
    lease = commitment.prefill if exchange.leg is SimulatedLeg.PREFILL else commitment.decode
    return 0 if lease is None else leg_priority(lease) or 0
