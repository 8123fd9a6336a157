"""Shared components of the running proxy, with one owner."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from heapq import nsmallest
from itertools import chain

import httpx

from proxy.access.forwarding import Forwarding
from proxy.access.keys import Keys
from proxy.access.rules import Access
from proxy.access.tenants import Tenants
from proxy.access_log import AccessLog
from proxy.breakdown import Breakdown
from proxy.clients.bounds import ClientBounds
from proxy.clients.certificate import ListenerCertificate
from proxy.clients.cors import Cors
from proxy.clip import clip
from proxy.discovery.status import DiscoveryStatus
from proxy.engines.client import EngineClient
from proxy.engines.control import Control
from proxy.engines.upstream import Upstream
from proxy.errors import RequestError, no_instance_error
from proxy.events.subscriber import EventSubscriber
from proxy.fleet.common_failures import CommonFailures
from proxy.fleet.instances import Instance, Instances
from proxy.fleet.model_lists import ModelLists
from proxy.fleet.reachability import outage
from proxy.fleet.stalls import StallWatch
from proxy.fleet.versions import EngineVersions
from proxy.handoff.abandoned import AbandonedPulls
from proxy.handoff.leaks import LeakWatch
from proxy.handoff.legs import HandOff
from proxy.logs import LimitedLog
from proxy.loop_lag import LoopLag
from proxy.meters.meters import Meters
from proxy.metrics.access_log import AccessLogMetrics
from proxy.metrics.admission import AdmissionMetrics
from proxy.metrics.cache_killers import CacheKillerMetrics
from proxy.metrics.certificate import CertificateMetrics
from proxy.metrics.exporter import Metrics
from proxy.metrics.fleet.discovery import DiscoveryMetrics
from proxy.metrics.fleet.sharing import SharingMetrics
from proxy.metrics.limits import LimitMetrics
from proxy.metrics.loop import LoopMetrics
from proxy.metrics.meters import MeterMetrics
from proxy.metrics.records import RecordMetrics
from proxy.metrics.shadows import ShadowMetrics
from proxy.metrics.tenants import TenantMetrics
from proxy.metrics.traces import TraceMetrics
from proxy.paths import OtherPaths
from proxy.records.numbers import WorkerNumbers
from proxy.request.parse import Endpoint, Parsed
from proxy.resolver import Resolver
from proxy.routing.admission import Admission
from proxy.routing.holding import HoldingLine
from proxy.routing.retries import RetryBudget
from proxy.routing.router import Router
from proxy.routing.short_load import ShortLoad
from proxy.routing.stored_responses import StoredResponses
from proxy.sessions.cache_killers import CacheKillers
from proxy.sessions.identity import CHAIN_SOURCE, SessionIdentity, SessionSources
from proxy.sessions.normalize import Normalizer
from proxy.sessions.prefix_chain import PREFIX_SOURCE, PrefixChains
from proxy.sessions.turn_texts import chat_turn
from proxy.settings import Settings, SettingsError
from proxy.shadow.shadows import Shadows
from proxy.sharing.line import WorkerIdentity
from proxy.sharing.local_store import LocalStore
from proxy.sharing.sharing import Sharing
from proxy.tokens.service import Tokens
from proxy.tracing.tracing import tracing_of

_SHOWN_CHARACTERS = 100
_SHOWN_MODELS = 20


class Core:
    """Router, fleet, connections and records of one proxy. ``open`` and ``close`` bracket its lifetime."""

    upstream: Upstream
    control: Control
    handoff: HandOff

    def __init__(self, settings: Settings, worker: WorkerIdentity | None = None) -> None:
        """Open nothing yet.

        Args:
            settings: those of the proxy.
            worker: this worker among several, which share their state through their parent unless through a store;
                None: it is the only one.
        """
        self.settings = settings
        self.worker = None if worker is None else worker.number
        """Number of this worker among several."""
        self.keys = Keys(settings.keys)
        self.tenants = Tenants(settings.fairness, self.keys)
        self.access = Access(settings, self.keys)
        self.rejections = LimitedLog(logging.getLogger("warmroute.proxy"))
        """Log of rejected generation requests; others are in ``access.refusals``."""
        self.failures = LimitedLog(logging.getLogger("warmroute.proxy"))
        """Log of generation requests that failed in serving."""
        self.port: int | None = None
        """Port of the main listener, once it listens."""
        self.admin_port: int | None = None
        """Port of the admin listener, once it listens."""
        self.forwarding = Forwarding(settings, self.keys)
        self.instances = Instances(settings.instances, settings.health)
        self.discovery = DiscoveryStatus(settings.discovery.source)
        self.model_lists = ModelLists(self.instances, self.get)
        self.router = Router(settings, self.is_base_model, self._sole_model, self._is_served, self._longest_context)
        self.events = EventSubscriber(settings.instances, settings.events, self.router.state.predictor.exact)
        self.tokens = Tokens(settings.tokenizer)
        self.metrics = Metrics()
        self.meters = Meters(settings.meters, self.router.state, self.instances, self.events)
        rows = settings.breakdown
        try:
            self.breakdown = Breakdown(
                rows.capacity,
                rows.jsonl_path,
                rejected_capacity=rows.rejected_capacity,
                rejected_to_file=rows.rejected_to_jsonl,
                jsonl_max_bytes=rows.jsonl_max_bytes,
                jsonl_files=rows.jsonl_files,
                numbers=None if worker is None else WorkerNumbers(worker.number, worker.clock_offset_s),
            )
        except OSError as error:
            raise SettingsError(f"breakdown.jsonl_path: {rows.jsonl_path} cannot be written: {error}") from error
        self.access_log = AccessLog(settings.logs.access, settings.logs.access_buffer)
        AccessLogMetrics(self.metrics.registry, self.access_log)
        self.session_sources = SessionSources(settings.sessions)
        self.prefix_chains = PrefixChains(settings.sessions.prefix_bound)
        self.normalizer = Normalizer(settings.normalize)
        self.cache_killers = CacheKillers(settings.cache_killers, settings.index.text_block_bytes)
        self.leaks = LeakWatch(self.instances, settings.offload.leak_share)
        self.stalls = StallWatch(self.instances, settings.health.stalled_after_s, self._cut)
        self.abandoned = AbandonedPulls(self.leaks, settings.offload.abandoned_s)
        state, shares = self.router.state, self.router.routing.gate.shares
        self.admission = Admission(settings.limits, self.instances, self.router, state.ledger, shares)
        self.holding = HoldingLine(settings.admission, self.router, self.instances, self.admission)
        self.short_load = ShortLoad(state.ledger)
        self.shadows = Shadows(settings.shadow, self.router.routing)
        self.responses = StoredResponses(settings.responses, self.instances, settings.index.text_block_bytes)
        self.sharing: Sharing | None = None
        """State shared with other replicas; None: this proxy is the only one."""
        if settings.sharing.url is not None or worker is not None:
            local = worker is not None and settings.sharing.url is None
            make_store = partial(LocalStore, worker.line) if worker is not None and local else None
            self.sharing = Sharing(settings, self.router.routing, self.instances, self.keys, self.responses, make_store)
            self.sharing.others.on_load = self.admission.wake
        self.retries = RetryBudget(settings.limits)
        self.common_failures = CommonFailures()
        self.clients = ClientBounds(settings)
        self.certificate = ListenerCertificate(settings.tls)
        CertificateMetrics(self.metrics.registry, self.certificate)
        self.cors = Cors(settings.cors)
        self.other_paths = OtherPaths(settings.pass_through.paths)
        self.versions = EngineVersions(self.instances, self.get)
        LimitMetrics(self.metrics.registry, self.instances, self.admission, self.retries, self.router, self.clients)
        DiscoveryMetrics(self.metrics.registry, self.discovery)
        CacheKillerMetrics(self.metrics.registry, self.cache_killers)
        RecordMetrics(self.metrics.registry, self.breakdown)
        AdmissionMetrics(self.metrics.registry, self.router.state.accounts, self.holding)
        MeterMetrics(self.metrics.registry, self.meters, self.instances)
        ShadowMetrics(self.metrics.registry, self.shadows)
        SharingMetrics(self.metrics.registry, self.sharing)
        TenantMetrics(self.metrics.registry, self.metrics.tenants, shares, self.keys)
        self.tracing = tracing_of(settings.tracing)
        TraceMetrics(self.metrics.registry, self.tracing)
        self.lag = LoopLag()
        LoopMetrics(self.metrics.registry, self.lag)
        self.draining = False
        """Not ready, as the proxy is about to stop; requests that come anyway are served while it listens."""
        self.ends_s: float | None = None
        """End of the grace period of running requests, on the event loop's clock; set when the proxy shuts down."""

    def open(self) -> None:
        """Open the connections; needs a running event loop."""
        self.lag.open()
        self.access_log.open()
        self.breakdown.open(asyncio.get_running_loop())
        resolver = Resolver()
        self.upstream = EngineClient(self.settings.timeouts.connect_s, resolver)
        self.control = Control(self.settings.health.timeout_s, resolver)
        self.tracing.open()
        self.handoff = HandOff(self.settings.offload, self.upstream, self.control, self.forwarding)

    async def close(self) -> None:
        """Close connections and files."""
        self.lag.close()
        self.holding.close()
        try:
            grace_s = self.settings.grace_s
            if self.ends_s is not None:
                grace_s = max(0.0, self.ends_s - asyncio.get_running_loop().time())
            await self.model_lists.close()
            await self.abandoned.close(grace_s)
            await self.upstream.close()
        finally:
            try:
                await self.control.aclose()
            finally:
                try:
                    await self.tracing.close()
                finally:
                    self.tokens.close()
                    self.breakdown.close()
                    self.access_log.close()

    def identify(self, headers: dict[bytes, bytes], parsed: Parsed, *, keep: bool = True) -> SessionIdentity:
        """The session of a request: named by it, else recognised by its prompt; ``keep``: it is the next turn."""
        named = self.session_sources.identify(headers, parsed.fields)
        if named.session_id is None and parsed.chain is not None:
            return SessionIdentity(parsed.chain, CHAIN_SOURCE)
        if named.session_id is not None or parsed.endpoint is not Endpoint.CHAT or not self.prefix_chains.enabled:
            return named
        turn = chat_turn(parsed, self.settings.index.text_block_bytes)
        if turn is None:
            return named
        found = self.prefix_chains.session_of(turn) if keep else self.prefix_chains.known(turn)
        return SessionIdentity(found, PREFIX_SOURCE) if found is not None else named

    async def tokenized(self, parsed: Parsed) -> Parsed:
        """A text or chat request with exact blocks if the tokenizer is known, else unchanged. Keeps the body."""
        ids = await self.tokens.tokens_of(parsed)
        return parsed if ids is None else self.router.tokenized(parsed, ids)

    def _sole_model(self) -> str | None:
        """The model of requests that name none. Raises RequestError (503) if none is known for lack of an engine."""
        served = self.instances.served
        if not served.names and (reason := outage(self.instances)):
            raise no_instance_error(self.settings.health.interval_s, reason)
        return served.sole_model

    def is_base_model(self, name: str) -> bool:
        """True if the engines that list ``name`` list it as a base model, not as an adapter."""
        return self.instances.served.is_base(name)

    def _cut(self, url: str, why: str) -> None:
        self.upstream.cut(url, why)

    def _is_served(self, name: str) -> bool:
        """True if an engine lists a model by this name."""
        return name in self.instances.served.names

    def _longest_context(self, model: str) -> int | None:
        """Longest context in tokens that an engine accepts for a model; None: unknown."""
        return self.instances.served.longest(model)

    def context_tokens(self, model: str) -> int | None:
        """Context length of a model in tokens, the smallest its engines report; None if none reports it."""
        cards = [card for instance in self.instances for card in instance.cards if card.get("id") == model]
        lengths = [tokens for card in cards if isinstance(tokens := card.get("max_model_len"), int)]
        return min(lengths, default=None)

    def check_model(self, model: str) -> None:
        """Raise RequestError (404) for a model that no engine serves, if every engine listed its models recently.

        Otherwise an engine whose list is unknown or old may serve it, and routing decides.
        """
        known, health = self.instances.served.names, self.settings.health
        if model in known or not self.instances.all_listed(2 * health.interval_s + health.timeout_s):
            return
        aliases = self.router.aliases.exact.items()
        served = (name for name, stands_for in aliases if stands_for in known and name not in known)
        names = nsmallest(_SHOWN_MODELS + 1, chain(known, served))
        listed = ", ".join(names[:_SHOWN_MODELS]) + (", …" if len(names) > _SHOWN_MODELS else "")
        raise RequestError(
            404,
            f"the model {clip(model, _SHOWN_CHARACTERS)!r} does not exist; available: {listed or 'none'}",
            kind="not_found_error",
            code="model_not_found",
            param="model",
        )

    async def get(self, instance: Instance, path: str) -> httpx.Response:
        """GET of an engine's path, as probes do it. Raises httpx.HTTPError."""
        return await self.control.get(instance.url + path, self.forwarding.probe_headers(instance.settings))

    def forwarded_headers(self, headers: dict[bytes, bytes], instance: Instance) -> dict[str, str]:
        """Headers for an engine: the allowed ones of the client's, and the engine's key."""
        return self.forwarding.headers(headers, instance.settings)
