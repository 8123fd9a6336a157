"""The offline fleet's state and its routing session: the routing step of the live proxy, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies.admission.base import AdmissionRule, Admit
from policies.admission.line import Held
from policies.costs.book import CostBook
from policies.ledger import Ledger
from policies.offload.base import OffloadPlanner
from policies.replicas.parts import part_of
from policies.routing.base import RoutingPolicy
from policies.session import Routed, RoutingSession
from policies.state import FleetState
from policies.types import RequestView, Role, Transport
from sim.core.engine import Engine
from sim.offline.exchange import SimulatedExchange
from sim.offline.options import SimOptions, SimulationError
from sim.offline.replicas import ReplicaNews


class OfflineRouter:
    """Builds the state of a simulated fleet and routes over all of it: simulated instances are always healthy.

    With several replicas each has a state of its own and hears of the others through `ReplicaNews`.

    Raises:
        SimulationError: several replicas, and a rule that holds requests.
    """

    def __init__(
        self,
        options: SimOptions,
        engines: Mapping[str, Engine],
        roles: Mapping[str, Role],
        transport: Transport | None,
        policy: RoutingPolicy,
        planner: OffloadPlanner,
        admission: AdmissionRule,
        costs: Callable[[], CostBook] = CostBook,
    ) -> None:
        self._engines = engines
        self._decoders = frozenset(name for name in engines if roles[name] is not Role.KV_PRODUCER)
        self._producers = frozenset(engines) - self._decoders
        self.replicas = tuple(
            # A simulation must not hide a policy's failure behind another policy's decisions.
            RoutingSession(
                _state(options, engines, roles, transport, costs()),
                policy,
                planner,
                options.thresholds,
                options.bounds.hold_s,
                guarded=False,
                admission=admission,
                max_hold_s=options.max_hold_s,
                explains_holds=False,  # nobody asks for a place in line
            )
            for _ in range(options.replicas.count)
        )
        self.routing = self.replicas[0]
        self.state = self.routing.state
        self._used: set[str] = set()
        """Instances whose KV was in use at the last reading."""
        self._next = 0
        self._news: ReplicaNews | None = None
        if len(self.replicas) > 1:
            if not self.routing.gate.never_holds:
                raise SimulationError("several replicas are simulated with the admission rule never_hold only")
            names = [f"replica-{number}" for number in range(len(self.replicas))]
            for name, each in zip(names, self.replicas, strict=True):
                each.part = part_of(name, names, self._decoders) if options.replicas.parts else frozenset()
            self._news = ReplicaNews([each.state for each in self.replicas], options.replicas, options.seed)

    def probe(self, now_s: float) -> None:
        """Read every engine's KV usage, as the proxy's health monitor does."""
        if self._news is not None:
            self._news.deliver(now_s)
        for name, engine in self._engines.items():
            engine.catch_up(now_s)
            capacity = engine.config.num_blocks * engine.config.block_tokens
            used = int(engine.kv_usage * capacity)
            if not used and name not in self._used:
                continue  # what is promised at a report counts only up to the figure that is reported
            (self._used.add if used else self._used.discard)(name)
            for each in self.replicas:
                each.state.set_usage(name, used)

    def offer(self, request: RequestView, now_s: float) -> Admit | Held:
        """Send a request now, or hold it."""
        return self.routing.offer(request, self._decoders, now_s)

    def admitted(self, now_s: float) -> Held | None:
        """The next held request to be sent now."""
        return self.routing.admitted(self._decoders, now_s)

    def route(self, request: RequestView, now_s: float, room_on: frozenset[str]) -> tuple[int, Routed]:
        """Decide and count on the replica whose turn it is; returns its number too.

        ``room_on``: as in ``Admit.instances``.
        """
        number = self._next
        self._next = (number + 1) % len(self.replicas)
        if self._news is not None:
            self._news.deliver(now_s)
        routed = self.replicas[number].route(request, self._decoders, self._producers, now_s, room_on)
        if self._news is not None:
            self._news.routed(number, request, routed.decision, now_s)
        return number, routed

    def routing_of(self, exchange: SimulatedExchange) -> RoutingSession:
        """The replica that decided on an exchange."""
        return self.replicas[exchange.replica]

    def changed(self, exchange: SimulatedExchange, now_s: float) -> None:
        """The load that an exchange is counted with has changed."""
        if self._news is not None:
            self._news.changed(exchange.replica, exchange.decision, now_s)

    def computed(self, exchange: SimulatedExchange, instance: str, now_s: float) -> None:
        """An instance has computed the exchange's prompt."""
        if self._news is not None:
            self._news.computed(exchange.replica, instance, exchange.request, now_s)

    def in_flight(self) -> dict[str, int]:
        """Sums over all instances and replicas, as ``Ledger.totals``."""
        totals = [each.state.ledger.totals() for each in self.replicas]
        return {name: sum(each[name] for each in totals) for name in totals[0]}


def _state(
    options: SimOptions,
    engines: Mapping[str, Engine],
    roles: Mapping[str, Role],
    transport: Transport | None,
    costs: CostBook,
) -> FleetState:
    state = FleetState(ledger=Ledger(options.recent_half_life_s), costs=costs)
    for name, engine in engines.items():
        config = engine.config
        state.add_instance(name, roles[name], transport=transport, ordered=config.priority_scheduling)
        state.set_capacity(name, config.num_blocks * config.block_tokens, config.block_tokens)
    return state
