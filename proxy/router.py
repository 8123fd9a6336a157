"""Live router: the fleet's state, the active policy, and the synchronous step that decides and counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from policies.decide import decide
from policies.holds import Hold
from policies.hotspots import HotspotTracker
from policies.ledger import Ledger
from policies.offload.base import OffloadPlanner
from policies.prefix_index import PrefixIndex
from policies.registry import all_routing, make_planner, make_routing, offload_planners
from policies.routing.base import RoutingPolicy
from policies.sessions import SessionTable
from policies.state import Commitment, FleetState
from policies.types import Decision, FleetSnapshot, InstanceView, RequestView, Role
from proxy.parse import Endpoint, Parsed, parse_request, request_view, with_token_ids
from proxy.settings import Settings
from proxy.token_chunks import TokenChunks

_RATIO_WEIGHT = 0.1


class Routed(NamedTuple):
    """A decision that has been counted."""

    decision: Decision
    commitment: Commitment
    prefill_view: InstanceView | None
    """P's view at the decision if the prefill is offloaded."""


class LegTime(NamedTuple):
    """Predicted and actual seconds of a leg."""

    predicted_s: float
    actual_s: float


class Router:
    """Owner of the fleet's state. Switching the policy leaves index, sessions and ledger unchanged."""

    def __init__(self, settings: Settings, is_base_model: Callable[[str], bool] = lambda _: False) -> None:
        """``is_base_model`` returns True if the fleet serves a model name without an adapter."""
        self._settings = settings
        self._is_base_model = is_base_model
        self.thresholds = settings.classes.thresholds()
        self.policy: RoutingPolicy = make_routing(settings.policy.name, settings.policy.params)
        self.planner: OffloadPlanner = make_planner(settings.offload.planner, settings.offload.params)
        # Entry points are files on disk: read once, not on the event loop for every explanation.
        self.known_policies = all_routing()
        self.known_planners = offload_planners()
        self.block_tokens = settings.index.block_tokens
        self.bytes_per_token = settings.index.bytes_per_token
        self._token_chunks = TokenChunks()
        self.state = FleetState(
            PrefixIndex(settings.index.capacity_blocks),
            Ledger(settings.ledger.recent_half_life_s),
            SessionTable(settings.sessions.capacity, settings.sessions.ttl_s),
            HotspotTracker(),
        )
        self.state.predictor.exact.set_block_tokens(self.block_tokens)
        for instance in settings.instances:
            self.state.add_instance(instance.name, instance.role, instance.host, instance.transport, instance.connector)

    def parse(self, endpoint: Endpoint, body: bytes) -> Parsed:
        """Parse a body with the effective block sizes; raises RequestError."""
        text_block_bytes = self._settings.index.text_block_bytes
        return parse_request(
            endpoint, body, self.block_tokens, text_block_bytes, self._is_base_model, self._token_chunks
        )

    def tokenized(self, parsed: Parsed, ids: Sequence[int]) -> Parsed:
        """A text or chat request with the token ids of its prompt, so that its blocks are exact."""
        return with_token_ids(parsed, ids, self.block_tokens, self._is_base_model(parsed.fields.model))

    def view(self, parsed: Parsed, request_id: str, session_id: str | None) -> RequestView:
        """The request's view for policies."""
        return request_view(
            parsed,
            request_id,
            session_id,
            self.block_tokens,
            self._settings.index.text_block_bytes,
            self.bytes_per_token,
        )

    def route(self, request: RequestView, available: set[str]) -> Routed:
        """Decide and count, without an await in between. Raises NoCandidateError."""
        now_s = time.monotonic()
        fleet = self._snapshot(request, available, now_s)
        decision = decide(request, fleet, self.policy, self.planner, self.thresholds)
        commitment = self.state.commit(request, fleet, decision, now_s)
        prefill = fleet.prefill_view(decision.prefill_on) if decision.prefill_on is not None else None
        return Routed(decision, commitment, prefill)

    def explain(self, request: RequestView, available: set[str]) -> tuple[FleetSnapshot, dict[str, Decision]]:
        """Current decision of every installed policy, without counting it.

        The active policy uses its parameters, the others their defaults. Raises NoCandidateError.
        """
        fleet = self._snapshot(request, available, time.monotonic())
        policies = self.known_policies | {self.policy.name: self.policy}
        return fleet, {
            name: decide(request, fleet, policy, self.planner, self.thresholds) for name, policy in policies.items()
        }

    def switch(
        self,
        name: str | None,
        params: Mapping[str, Any] | None,
        planner: str | None,
        planner_params: Mapping[str, Any] | None,
    ) -> None:
        """Switch policy or planner; both are built before either is replaced. Raises ValueError if one is unknown."""
        policy = make_routing(name, params) if name is not None else self.policy
        offload = make_planner(planner, planner_params) if planner is not None else self.planner
        self.policy, self.planner = policy, offload

    def apply(self, settings: Settings) -> None:
        """Apply other settings. Policy and planner stay: ``switch`` changes those."""
        self._settings = settings
        self.thresholds = settings.classes.thresholds()
        self.state.sessions.set_bounds(settings.sessions.capacity, settings.sessions.ttl_s)
        self.state.ledger.set_half_life(settings.ledger.recent_half_life_s)

    def learn_ratio(self, text_bytes: int, prompt_tokens: int) -> None:
        """Update the bytes-per-token ratio from an engine's token count (exponential average)."""
        if text_bytes and prompt_tokens:
            self.bytes_per_token += _RATIO_WEIGHT * (text_bytes / prompt_tokens - self.bytes_per_token)

    def prefilled(self, routed: Routed, seconds: float) -> LegTime:
        """Learn from D's first token of a co-located request, after ``seconds``."""
        return LegTime(self.state.costs.prefilled(routed.commitment.workload.decode, seconds), seconds)

    def prefilled_on_p(self, routed: Routed, seconds: float) -> LegTime:
        """Learn from a successful P leg of ``seconds``; its KV waits for D from now on."""
        routed.commitment.end_prefill()
        assert routed.commitment.workload.prefill is not None
        return LegTime(self.state.costs.prefilled(routed.commitment.workload.prefill, seconds), seconds)

    def handed_over(self, routed: Routed, seconds: float) -> LegTime:
        """Learn from a successful hand-off: D answered ``seconds`` after its leg was sent."""
        routed.commitment.handed_over()
        job, now_s = routed.commitment.workload.transfer, time.monotonic()
        assert job is not None
        if not routed.commitment.pair_known:
            return LegTime(self.state.costs.transfer.predict(job, now_s).seconds, seconds)
        self.state.pairs.record(job.pair, True, now_s)
        return LegTime(self.state.costs.transferred(routed.commitment.workload, seconds, now_s), seconds)

    def handed_over_unseen(self, routed: Routed) -> None:
        """Count a successful hand-off whose first token, and therefore its time, was not observed."""
        routed.commitment.handed_over()
        job = routed.commitment.workload.transfer
        assert job is not None
        if routed.commitment.pair_known:
            self.state.pairs.record(job.pair, True, time.monotonic())
            self.state.costs.handed_over(job)

    def hold_on_decode(self, routed: Routed) -> Hold:
        """Count the room on D of an abandoned pull until it ends."""
        return routed.commitment.hold_on_decode()

    def fell_back(self, routed: Routed) -> None:
        """Count a failed hand-off: D prefills instead, and the pair's breaker and failure rate are updated."""
        now_s = time.monotonic()
        routed.commitment.fall_back(now_s + self._settings.offload.hold_s)
        job = routed.commitment.workload.transfer
        assert job is not None
        if routed.commitment.pair_known:
            self.state.pairs.record(job.pair, False, now_s)
            self.state.costs.fell_back(job)

    def set_block_tokens(self, block_tokens: int) -> None:
        """Set the engines' block size in tokens; index contents with another block size are dropped."""
        if block_tokens != self.block_tokens:
            self.block_tokens = block_tokens
            for name in self.state.instances:
                self.state.restarted(name)
            self.state.predictor.exact.set_block_tokens(block_tokens)

    def _snapshot(self, request: RequestView, available: set[str], now_s: float) -> FleetSnapshot:
        decoders = {name for name in available if self.state.role(name) is not Role.KV_PRODUCER}
        return self.state.snapshot(request, now_s, decoders, available - decoders)
