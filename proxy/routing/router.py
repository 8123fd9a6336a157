"""The live router: the fleet's state, the policy in force, and the one synchronous step that decides and counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from policies.decide import decide
from policies.holds import Hold
from policies.hotspots import HotspotTracker
from policies.ledger import Ledger
from policies.offload.base import OffloadPlanner
from policies.predict.prefix_index import PrefixIndex
from policies.registry import all_routing, make_planner, make_routing, offload_planners
from policies.routing.base import RoutingPolicy
from policies.sessions import SessionTable
from policies.state import Commitment, FleetState
from policies.types import Decision, FleetSnapshot, InstanceView, RequestView, Role
from proxy.request.parse import Endpoint, Parsed, parse_request, request_view, with_token_ids
from proxy.request.token_chunks import TokenChunks
from proxy.settings import Settings

_RATIO_WEIGHT = 0.1


class Routed(NamedTuple):
    """A decision that is already counted."""

    decision: Decision
    commitment: Commitment
    prefill_view: InstanceView | None
    """P as the decision saw it, when the prefill is offloaded."""


class LegTime(NamedTuple):
    """What a leg was predicted to take by the cost models, and what it took, in seconds."""

    predicted_s: float
    actual_s: float


class Router:
    """Owns the fleet's state. Switching the policy changes neither index nor sessions nor ledger."""

    def __init__(self, settings: Settings, is_base_model: Callable[[str], bool] = lambda _: False) -> None:
        """``is_base_model`` says of a model's name whether the fleet serves it without an adapter."""
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
        """Parse a body with the block sizes in force; raises RequestError."""
        text_block_bytes = self._settings.index.text_block_bytes
        return parse_request(
            endpoint, body, self.block_tokens, text_block_bytes, self._is_base_model, self._token_chunks
        )

    def tokenized(self, parsed: Parsed, ids: Sequence[int]) -> Parsed:
        """A text or chat request with the token ids of its prompt, so that its blocks are exact."""
        return with_token_ids(parsed, ids, self.block_tokens, self._is_base_model(parsed.fields.model))

    def view(self, parsed: Parsed, request_id: str, session_id: str | None) -> RequestView:
        """The request as policies see it."""
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
        """What every installed policy would decide now; nothing is counted.

        The policy in force answers with its parameters, the others with their defaults. Raises NoCandidateError.
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
        """Put another policy or planner in force; both are built before either is taken over."""
        policy = make_routing(name, params) if name is not None else self.policy
        offload = make_planner(planner, planner_params) if planner is not None else self.planner
        self.policy, self.planner = policy, offload

    def apply(self, settings: Settings) -> None:
        """Take over other settings. Policy and planner stay: ``switch`` changes those."""
        self._settings = settings
        self.thresholds = settings.classes.thresholds()
        self.state.sessions.set_bounds(settings.sessions.capacity, settings.sessions.ttl_s)
        self.state.ledger.set_half_life(settings.ledger.recent_half_life_s)

    def learn_ratio(self, text_bytes: int, prompt_tokens: int) -> None:
        """Correct the bytes-per-token ratio by what an engine counted (exponential average)."""
        if text_bytes and prompt_tokens:
            self.bytes_per_token += _RATIO_WEIGHT * (text_bytes / prompt_tokens - self.bytes_per_token)

    def prefilled(self, routed: Routed, seconds: float) -> LegTime:
        """Learn from D's first token of a request that ran co-located."""
        return LegTime(self.state.costs.prefilled(routed.commitment.workload.decode, seconds), seconds)

    def prefilled_on_p(self, routed: Routed, seconds: float) -> LegTime:
        """Learn from a P leg that went well; its KV waits for D from now on."""
        routed.commitment.end_prefill()
        assert routed.commitment.workload.prefill is not None
        return LegTime(self.state.costs.prefilled(routed.commitment.workload.prefill, seconds), seconds)

    def handed_over(self, routed: Routed, seconds: float) -> LegTime:
        """D answered ``seconds`` after it was sent its leg: the hand-off is over and went well."""
        routed.commitment.handed_over()
        job, now_s = routed.commitment.workload.transfer, time.monotonic()
        assert job is not None
        if not routed.commitment.pair_known:
            return LegTime(self.state.costs.transfer.predict(job, now_s).seconds, seconds)
        self.state.pairs.record(job.pair, True, now_s)
        return LegTime(self.state.costs.transferred(routed.commitment.workload, seconds, now_s), seconds)

    def handed_over_unseen(self, routed: Routed) -> None:
        """The hand-off went well, but its first token, and so its time, was not seen."""
        routed.commitment.handed_over()
        job = routed.commitment.workload.transfer
        assert job is not None
        if routed.commitment.pair_known:
            self.state.pairs.record(job.pair, True, time.monotonic())
            self.state.costs.handed_over(job)

    def hold_on_decode(self, routed: Routed) -> Hold:
        """Count the room that a pull which was given up takes on D until it ends."""
        return routed.commitment.hold_on_decode()

    def fell_back(self, routed: Routed) -> None:
        """The hand-off failed: D prefills after all, and the pair's breaker and risk hear of it."""
        now_s = time.monotonic()
        routed.commitment.fall_back(now_s + self._settings.offload.hold_s)
        job = routed.commitment.workload.transfer
        assert job is not None
        if routed.commitment.pair_known:
            self.state.pairs.record(job.pair, False, now_s)
            self.state.costs.fell_back(job)

    def set_block_tokens(self, block_tokens: int) -> None:
        """Take over the engines' block size; blocks of another size mean nothing any more."""
        if block_tokens != self.block_tokens:
            self.block_tokens = block_tokens
            for name in self.state.instances:
                self.state.restarted(name)
            self.state.predictor.exact.set_block_tokens(block_tokens)

    def _snapshot(self, request: RequestView, available: set[str], now_s: float) -> FleetSnapshot:
        decoders = {name for name in available if self.state.role(name) is not Role.KV_PRODUCER}
        return self.state.snapshot(request, now_s, decoders, available - decoders)
