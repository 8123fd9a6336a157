"""The live proxy's routing step in virtual time: the same state, ``decide`` and learning, in the same order.

Mirrors ``proxy.router.Router``, which this package may not import; a test drives both and compares every decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from policies.decide import decide
from policies.ledger import Ledger
from policies.offload.base import OffloadPlanner
from policies.routing.base import RoutingPolicy
from policies.state import Commitment, FleetState
from policies.types import Decision, InstanceView, RequestView, Role, Transport
from sim.core.engine import Engine
from sim.offline.options import SimOptions


class Routed(NamedTuple):
    """A decision that is already counted."""

    decision: Decision
    commitment: Commitment
    prefill_view: InstanceView | None
    """P as the decision saw it, when the prefill is offloaded."""


class LegTime(NamedTuple):
    """A leg's time as the cost models predicted it and as it was, in seconds."""

    predicted_s: float
    actual_s: float


class OfflineRouter:
    """Owns the fleet's state, as the proxy's router does."""

    def __init__(
        self,
        options: SimOptions,
        engines: Mapping[str, Engine],
        roles: Mapping[str, Role],
        transport: Transport | None,
        policy: RoutingPolicy,
        planner: OffloadPlanner,
    ) -> None:
        self.policy = policy
        self.planner = planner
        self._thresholds = options.thresholds
        self._hold_s = options.bounds.hold_s
        self._engines = engines
        self.state = FleetState(ledger=Ledger(options.recent_half_life_s))
        for name, engine in engines.items():
            config = engine.config
            self.state.add_instance(name, roles[name], transport=transport)
            self.state.set_capacity(name, config.num_blocks * config.block_tokens, config.block_tokens)
        self._decoders = [name for name in engines if roles[name] is not Role.KV_PRODUCER]
        self._producers = [name for name in engines if roles[name] is Role.KV_PRODUCER]
        self._decoder_set, self._producer_set = frozenset(self._decoders), frozenset(self._producers)

    def probe(self, now_s: float) -> None:
        """Read every engine's KV usage, as the proxy's health monitor does."""
        state = self.state
        for name, engine in self._engines.items():
            engine.catch_up(now_s)
            capacity = engine.config.num_blocks * engine.config.block_tokens
            state.set_usage(name, int(engine.kv_usage * capacity))

    def route(self, request: RequestView, now_s: float) -> Routed:
        """Decide and count."""
        state = self.state
        fleet = state.snapshot(request, now_s, self._decoder_set, self._producer_set)
        decision = decide(request, fleet, self.policy, self.planner, self._thresholds)
        commitment = state.commit(request, fleet, decision, now_s)
        prefill = fleet.prefill_view(decision.prefill_on) if decision.prefill_on is not None else None
        return Routed(decision, commitment, prefill)

    def prefilled(self, commitment: Commitment, seconds: float) -> LegTime:
        """Learn from D's first token of a request that ran co-located."""
        return LegTime(self.state.costs.prefilled(commitment.workload.decode, seconds), seconds)

    def prefilled_on_p(self, commitment: Commitment, seconds: float) -> LegTime:
        """Learn from a P leg that succeeded; its KV now waits for D."""
        commitment.end_prefill()
        job = commitment.workload.prefill
        assert job is not None
        return LegTime(self.state.costs.prefilled(job, seconds), seconds)

    def handed_over(self, commitment: Commitment, seconds: float, now_s: float) -> LegTime:
        """Learn from a hand-off that succeeded: D's first token came ``seconds`` after its leg was sent."""
        commitment.handed_over()
        job = commitment.workload.transfer
        assert job is not None
        self.state.pairs.record(job.pair, True, now_s)
        return LegTime(self.state.costs.transferred(commitment.workload, seconds, now_s), seconds)

    def fell_back(self, commitment: Commitment, now_s: float) -> None:
        """Record a failed hand-off: D prefills instead, and the pair's breaker and risk are updated."""
        commitment.fall_back(now_s + self._hold_s)
        job = commitment.workload.transfer
        assert job is not None
        self.state.pairs.record(job.pair, False, now_s)
        self.state.costs.fell_back(job)
