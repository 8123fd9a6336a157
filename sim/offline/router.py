"""The offline fleet's state and its routing session: the routing step of the live proxy, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping

from policies.admission.base import AdmissionRule, Admit
from policies.admission.gate import Held
from policies.costs.book import CostBook
from policies.ledger import Ledger
from policies.offload.base import OffloadPlanner
from policies.routing.base import RoutingPolicy
from policies.session import Routed, RoutingSession
from policies.state import FleetState
from policies.types import RequestView, Role, Transport
from sim.core.engine import Engine
from sim.offline.options import SimOptions


class OfflineRouter:
    """Builds the state of a simulated fleet and routes over all of it: simulated instances are always healthy."""

    def __init__(
        self,
        options: SimOptions,
        engines: Mapping[str, Engine],
        roles: Mapping[str, Role],
        transport: Transport | None,
        policy: RoutingPolicy,
        planner: OffloadPlanner,
        admission: AdmissionRule,
        costs: CostBook | None = None,
    ) -> None:
        self._engines = engines
        self.state = FleetState(ledger=Ledger(options.recent_half_life_s), costs=costs)
        for name, engine in engines.items():
            config = engine.config
            self.state.add_instance(name, roles[name], transport=transport)
            self.state.set_capacity(name, config.num_blocks * config.block_tokens, config.block_tokens)
        self._decoders = frozenset(name for name in engines if roles[name] is not Role.KV_PRODUCER)
        self._producers = frozenset(engines) - self._decoders
        # A simulation must not hide a policy's failure behind another policy's decisions.
        hold_s = options.bounds.hold_s
        self.routing = RoutingSession(
            self.state,
            policy,
            planner,
            options.thresholds,
            hold_s,
            guarded=False,
            admission=admission,
            max_hold_s=options.max_hold_s,
        )

    def probe(self, now_s: float) -> None:
        """Read every engine's KV usage, as the proxy's health monitor does."""
        for name, engine in self._engines.items():
            engine.catch_up(now_s)
            capacity = engine.config.num_blocks * engine.config.block_tokens
            self.state.set_usage(name, int(engine.kv_usage * capacity))

    def offer(self, request: RequestView, now_s: float) -> Admit | Held:
        """Send a request now, or hold it."""
        return self.routing.offer(request, self._decoders, now_s)

    def admitted(self, now_s: float) -> Held | None:
        """The next held request to be sent now."""
        return self.routing.admitted(self._decoders, now_s)

    def route(self, request: RequestView, now_s: float, room_on: frozenset[str]) -> Routed:
        """Decide and count; ``room_on``: as in ``Admit.instances``."""
        return self.routing.route(request, self._decoders, self._producers, now_s, room_on)
