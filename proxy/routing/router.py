"""Live router: the fleet's state, the active policy, and the synchronous step that decides and counts."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

from policies.admission.base import NO_INSTANCES, Admit, Hold
from policies.admission.room import Parts
from policies.hotspots import HotspotTracker
from policies.ledger import Ledger
from policies.offload.base import OffloadPlanner
from policies.predict.prefix_index import PrefixIndex
from policies.registry import (
    admission_rules,
    all_routing,
    make_planner,
    make_routing,
    offload_planners,
)
from policies.routing.base import RoutingPolicy
from policies.session import Routed, RoutingSession
from policies.sessions import SessionTable
from policies.snapshot import FleetSnapshot
from policies.state import Commitment, FleetState
from policies.types import NO_TENANT, Decision, PolicyFailure, PolicyPart, RequestView, Tenant
from proxy.request.addressed import Addressed, AddressRules, address_steps
from proxy.request.aliases import ModelAliases
from proxy.request.parse import (
    AT_ONCE_BYTES,
    Endpoint,
    Parsed,
    ParseRules,
    parse_steps,
    request_view,
    with_token_ids,
)
from proxy.request.steps import Lane, Steps, at_once
from proxy.request.token_chunks import TokenChunks
from proxy.request.usage import Usage
from proxy.routing.policy_watch import PolicyWatch
from proxy.routing.text_ratio import TextRatios
from proxy.settings import InstanceSettings, Settings
from proxy.settings.routing import admission_rule, hardware_constants

log = logging.getLogger("warmroute.policy")

_PRIORITY = frozenset({"priority"})
_NO_PRODUCERS: frozenset[str] = frozenset()


class Router:
    """Owner of the fleet's state. Switching the policy leaves index, sessions and ledger unchanged."""

    def __init__(
        self,
        settings: Settings,
        is_base_model: Callable[[str], bool] = lambda _: False,
        sole_model: Callable[[], str | None] = lambda: None,
        is_served: Callable[[str], bool] = lambda _: False,
        longest_context: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        """``is_base_model``: True if the fleet serves a model name without an adapter; ``sole_model``: its only one;
        ``is_served``: True if an engine lists the name; ``longest_context``: most tokens that an engine accepts for it.
        """
        self._longest_context = longest_context
        self._is_served = is_served
        self.aliases = ModelAliases(settings.models.aliases, is_served)
        """Further names of models."""
        self._sole_model = sole_model
        self.seed = secrets.randbits(64)
        """Secret seed of the block hashes: clients must not be able to construct colliding prompts."""
        self._settings = settings
        self._is_base_model = is_base_model
        # Entry points are files on disk: read once, not on the event loop for every explanation.
        installed = all_routing()
        self.known_policies = installed.usable
        self.broken_policies = installed.broken
        """Name -> reason, of installed policies that cannot be used."""
        for error in installed.broken.values():
            log.warning("%s", error)
        self.watch = PolicyWatch()
        self._slow_s = settings.limits.slow_decision_s
        self.known_planners = offload_planners()
        self.known_rules = admission_rules()
        self.block_tokens = settings.index.block_tokens
        self.text_ratios = TextRatios(settings.index.bytes_per_token)
        self._token_chunks = TokenChunks()
        self._allowed_fields = frozenset(settings.fields.allow)
        self._rules: ParseRules | None = None
        """Rules of the next request; None: something that they have was changed."""
        self.large_bodies = Lane()
        self.state = FleetState(
            PrefixIndex(settings.index.capacity_blocks),
            Ledger(settings.ledger.recent_half_life_s),
            SessionTable(settings.sessions.capacity, settings.sessions.ttl_s),
            HotspotTracker(),
            self.seed,
            None if settings.hardware is None else hardware_constants(settings.hardware).book(),
        )
        self.state.predictor.exact.set_block_tokens(self.block_tokens)
        self.routing = RoutingSession(
            self.state,
            make_routing(settings.policy.name, settings.policy.params),
            make_planner(settings.offload.planner, settings.offload.params),
            settings.classes.thresholds(),
            settings.offload.hold_s,
            guarded=True,
            admission=admission_rule(settings.admission.name, settings.admission.params),
            max_hold_s=settings.admission.max_hold_s,
        )
        self.routing.gate.guard.on_failure = self._rule_failed
        for instance in settings.instances:
            self.register(instance)

    def register(self, instance: InstanceSettings) -> None:
        """Add an instance to the fleet's state, or change these properties of a known one."""
        self.state.add_instance(
            instance.name,
            instance.role,
            instance.host,
            instance.transport,
            instance.connector,
            ordered=instance.priority_scheduling,
        )

    @property
    def policy(self) -> RoutingPolicy:
        """The routing policy that decides now."""
        return self.routing.policy

    @property
    def planner(self) -> OffloadPlanner:
        """The offload planner that decides now."""
        return self.routing.planner

    @property
    def deciding(self) -> tuple[tuple[PolicyPart, str], ...]:
        """Names of the policy, the planner and the admission rule that decide now."""
        return (
            (PolicyPart.POLICY, self.policy.name),
            (PolicyPart.PLANNER, self.planner.name),
            (PolicyPart.ADMISSION, self.routing.gate.rule.name),
        )

    def parse(self, endpoint: Endpoint, body: bytes, *, allow_priority: bool = False) -> Parsed:
        """Parse a body at once with the effective block sizes; raises RequestError.

        ``allow_priority``: its client may set ``priority``, whatever ``fields.allow`` says.
        """
        return at_once(self._parse_steps(endpoint, body, self._allowed_fields | _PRIORITY if allow_priority else None))

    async def parse_fairly(self, endpoint: Endpoint, body: bytes, *, allow_priority: bool = False) -> Parsed:
        """As ``parse``; a large body in steps, after those before it."""
        steps = self._parse_steps(endpoint, body, self._allowed_fields | _PRIORITY if allow_priority else None)
        return at_once(steps) if len(body) <= AT_ONCE_BYTES else await self.large_bodies.run(steps)

    async def addressed(
        self, body: bytes, content_type: bytes, *, allow_priority: bool = False, model_required: bool = True
    ) -> Addressed:
        """The model that a body to pass on is for, and the body; a large one is read as in ``parse_fairly``.

        Raises:
            RequestError: 400; with ``model_required`` also if JSON names no model and several are served.
        """
        allowed = self._allowed_fields | _PRIORITY if allow_priority else self._allowed_fields
        rules = AddressRules(allowed, self.aliases, self._sole_model, model_required)
        steps = address_steps(body, content_type, rules)
        return at_once(steps) if len(body) <= AT_ONCE_BYTES else await self.large_bodies.run(steps)

    def tokenized(self, parsed: Parsed, ids: Sequence[int]) -> Parsed:
        """A text or chat request with the token ids of its prompt, so that its blocks are exact."""
        base_model = self._is_base_model(parsed.fields.model)
        return with_token_ids(parsed, ids, self.block_tokens, base_model, self.seed)

    def view(
        self,
        parsed: Parsed,
        request_id: str,
        session_id: str | None,
        tenant: Tenant = NO_TENANT,
        agent: str | None = None,
        parent_session_id: str | None = None,
    ) -> RequestView:
        """The request's view for policies."""
        request = request_view(
            parsed,
            request_id,
            session_id,
            self.block_tokens,
            self._settings.index.text_block_bytes,
            self.text_ratios.of(parsed.endpoint),
            tenant,
            agent,
            parent_session_id,
        )
        if not (request.may_offload and request.exact):
            return request
        longest = self._longest_context(parsed.fields.model)
        if longest is None or parsed.context_tokens(request.prompt_tokens) <= longest:
            return request
        # Every D refuses it with 400. P, which makes one token, may not, and would hold the KV until its abort timeout.
        return request._replace(may_offload=False)

    def route(self, request: RequestView, available: set[str], room_on: frozenset[str] = NO_INSTANCES) -> Routed:
        """Decide and count, without an await in between. Raises NoCandidateError.

        ``room_on``: instances that the admission rule found room on; empty: all.
        """
        decoders, producers = self._by_role(available)
        now_s = time.monotonic()
        routed = self.routing.route(request, decoders, producers, now_s, room_on)
        if routed.decision.failures:
            self.watch.failed(routed.decision.failures, routed.decision.policy)
        self.watch.times[self.policy.name].decided.add(now_s)
        took_s = time.monotonic() - now_s
        if took_s > self._slow_s:
            self.watch.was_slow(self.policy.name, took_s, now_s)
        return routed

    def explain(
        self, request: RequestView, available: set[str], room_on: frozenset[str] = NO_INSTANCES
    ) -> tuple[FleetSnapshot, dict[str, Decision]]:
        """Current decision of every installed policy, without counting it; ``room_on``: as in ``route``.

        The active policy uses its parameters, the others their defaults. Raises NoCandidateError.
        """
        decoders, producers = self._by_role(available)
        policies = self.known_policies | {self.policy.name: self.policy}
        return self.routing.explain(request, policies, decoders, producers, time.monotonic(), room_on)

    def would_admit(self, request: RequestView, decoders: Collection[str], parts: Parts) -> Admit | Hold:
        """The admission rule's answer to a new request; nothing is counted, not even a failure of the rule."""
        gate, state = self.routing.gate, self.state
        gate.guard.on_failure = _ignore_failure
        try:
            return gate.answer(request, state.room(decoders, parts), time.monotonic())
        finally:
            gate.guard.on_failure = self._rule_failed

    def switch_admission(self, name: str | None, params: Mapping[str, Any], max_hold_s: float | None) -> None:
        """Switch the admission rule or its bound, also for held requests; None: as it is. Raises ValueError."""
        gate = self.routing.gate
        rule = gate.rule if name is None and not params else admission_rule(name or gate.rule.name, params)
        self.routing.set_admission(rule, max_hold_s or gate.max_hold_s, time.monotonic())

    def switch(
        self,
        name: str | None,
        params: Mapping[str, Any] | None,
        planner: str | None,
        planner_params: Mapping[str, Any] | None,
    ) -> None:
        """Switch policy or planner; both are built before either is replaced. Parameters alone are the active one's.

        Raises:
            ValueError: one is unknown, or its parameters are invalid.
        """
        routing = self.routing
        policy, offload = routing.policy, routing.planner
        if name is not None or params:
            policy = make_routing(name or policy.name, params)
        if planner is not None or planner_params:
            offload = make_planner(planner or offload.name, planner_params)
        routing.policy, routing.planner = policy, offload

    def apply(self, settings: Settings) -> None:
        """Apply other settings. Policy and planner stay: ``switch`` changes those."""
        self._settings = settings
        self.aliases = ModelAliases(settings.models.aliases, self._is_served)
        self._allowed_fields = frozenset(settings.fields.allow)
        self._rules = None
        self.routing.thresholds = settings.classes.thresholds()
        self.routing.hold_s = settings.offload.hold_s
        self._slow_s = settings.limits.slow_decision_s
        self.state.sessions.set_bounds(settings.sessions.capacity, settings.sessions.ttl_s)
        if self.state.shared is not None:
            self.state.shared.set_capacity(settings.sessions.capacity)
        self.state.ledger.set_half_life(settings.ledger.recent_half_life_s)

    def learn(self, parsed: Parsed, usage: Usage, commitment: Commitment | None) -> None:
        """Learn the bytes-per-token ratio and how slow D is from an engine's counts of one whole prompt of text or ids.

        ``commitment``: that of the only engine that computed it; None: there were several.
        """
        prompt, tokens = parsed.prompt, usage.prompt_tokens
        if prompt.media or prompt.continued or prompt.prompts != 1 or not tokens:
            return
        self.text_ratios.learn(parsed.endpoint, prompt.text_bytes, tokens)
        if commitment is not None:
            self.routing.compare(commitment, tokens, usage.cached_tokens or 0, time.monotonic())

    def set_seed(self, seed: int) -> None:
        """Take over the seed of an earlier process, before the first request."""
        self.state.predictor.exact.set_seed(seed)
        self.seed = seed
        self._rules = None

    def set_block_tokens(self, block_tokens: int) -> None:
        """Set the engines' block size in tokens; index contents with another block size are dropped."""
        if block_tokens != self.block_tokens:
            self.block_tokens = block_tokens
            self._rules = None
            for name in self.state.instances:
                self.state.restarted(name)
            self.state.predictor.exact.set_block_tokens(block_tokens)

    def _rule_failed(self, failure: PolicyFailure) -> None:
        self.watch.failed((failure,), "")

    def _parse_steps(self, endpoint: Endpoint, body: bytes, allowed: frozenset[str] | None = None) -> Steps[Parsed]:
        rules = self._rules or self._make_rules()
        if allowed is not None:
            rules = rules._replace(allowed_fields=allowed)
        return parse_steps(endpoint, body, rules, self._is_base_model, self._token_chunks)

    def _make_rules(self) -> ParseRules:
        settings = self._settings
        self._rules = ParseRules(
            self.block_tokens,
            settings.index.text_block_bytes,
            settings.limits.prompts,
            self._allowed_fields,
            self.seed,
            self.aliases,
            self._sole_model,
        )
        return self._rules

    def _by_role(self, available: Set[str]) -> tuple[Set[str], Set[str]]:
        """Instances that may decode, and those that may only prefill for another."""
        producers = self.state.producers
        return (available - producers, available & producers) if producers else (available, _NO_PRODUCERS)


def _ignore_failure(_: PolicyFailure) -> None:
    """Observer of failures in explanations."""
