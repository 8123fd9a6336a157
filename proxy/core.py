"""Shared components of the running proxy, with one owner."""

from __future__ import annotations

import asyncio
import logging

from proxy.access.forwarding import Forwarding
from proxy.access.keys import Keys
from proxy.access.rules import Access
from proxy.breakdown import Breakdown
from proxy.clients.bounds import ClientBounds
from proxy.engines.client import EngineClient
from proxy.engines.control import Control
from proxy.engines.upstream import Upstream
from proxy.events.subscriber import EventSubscriber
from proxy.fleet.instances import Instance, Instances
from proxy.handoff.abandoned import AbandonedPulls
from proxy.handoff.leaks import LeakWatch
from proxy.handoff.legs import HandOff
from proxy.logs import LimitedLog
from proxy.loop_lag import LoopLag
from proxy.metrics.exporter import Metrics
from proxy.metrics.limits import LimitMetrics
from proxy.request.parse import Parsed
from proxy.routing.admission import Admission
from proxy.routing.retries import RetryBudget
from proxy.routing.router import Router
from proxy.settings import Settings
from proxy.tokens.service import Tokens


class Core:
    """Router, fleet, connections and records of one proxy. ``open`` and ``close`` bracket its lifetime."""

    upstream: Upstream
    control: Control
    handoff: HandOff

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keys = Keys(settings.keys)
        self.access = Access(settings, self.keys)
        self.rejections = LimitedLog(logging.getLogger("warmroute.proxy"))
        """Log of rejected generation requests; others are in ``access.refusals``."""
        self.port: int | None = None
        """Port of the main listener, once it listens."""
        self.admin_port: int | None = None
        """Port of the admin listener, once it listens."""
        self.forwarding = Forwarding(settings, self.keys)
        self.instances = Instances(settings.instances, settings.health)
        self._base_models: set[str] = set()
        self.router = Router(settings, self.is_base_model)
        self.events = EventSubscriber(settings.instances, settings.events, self.router.state.predictor.exact)
        self.tokens = Tokens(settings.tokenizer)
        self.metrics = Metrics()
        rows = settings.breakdown
        self.breakdown = Breakdown(
            rows.capacity,
            rows.jsonl_path,
            rejected_capacity=rows.rejected_capacity,
            rejected_to_file=rows.rejected_to_jsonl,
        )
        self.session_headers = tuple(name.lower().encode("latin-1") for name in settings.sessions.headers)
        self.leaks = LeakWatch(self.instances, settings.offload.leak_share)
        self.abandoned = AbandonedPulls(self.leaks, settings.offload.abandoned_s)
        self.admission = Admission(settings.limits, self.instances, self.router, self.router.state.ledger)
        self.retries = RetryBudget(settings.limits)
        self.clients = ClientBounds(settings)
        LimitMetrics(
            self.metrics.registry, self.instances, self.admission, self.retries, self.router.watch, self.clients
        )
        self.lag = LoopLag()
        self.draining = False
        self.ends_s: float | None = None
        """End of the grace period of running requests, on the event loop's clock; set when the proxy shuts down."""

    def open(self) -> None:
        """Open the connections; needs a running event loop."""
        self.lag.open()
        self.upstream = EngineClient(self.settings.timeouts.connect_s)
        self.control = Control(self.settings.health.timeout_s)
        self.handoff = HandOff(self.settings.offload, self.upstream, self.control, self.forwarding)

    async def close(self) -> None:
        """Close connections and files."""
        self.lag.close()
        try:
            grace_s = self.settings.grace_s
            if self.ends_s is not None:
                grace_s = max(0.0, self.ends_s - asyncio.get_running_loop().time())
            await self.abandoned.close(grace_s)
            await self.upstream.close()
        finally:
            try:
                await self.control.aclose()
            finally:
                self.tokens.close()
                self.breakdown.close()

    async def tokenized(self, parsed: Parsed) -> Parsed:
        """A text or chat request with exact blocks if the tokenizer is known, else unchanged. Keeps the body."""
        ids = await self.tokens.tokens_of(parsed)
        return parsed if ids is None else self.router.tokenized(parsed, ids)

    def is_base_model(self, name: str) -> bool:
        """True if an engine lists ``name`` as a base model, not as an adapter (which names its parent)."""
        if name not in self._base_models:
            cards = [card for instance in self.instances for card in instance.models]
            self._base_models |= {str(card["id"]) for card in cards if card.get("parent") is None}
        return name in self._base_models

    def context_tokens(self, model: str) -> int | None:
        """Context length of a model in tokens, the smallest its engines report; None if none reports it."""
        cards = [card for instance in self.instances for card in instance.models if card.get("id") == model]
        lengths = [tokens for card in cards if isinstance(tokens := card.get("max_model_len"), int)]
        return min(lengths, default=None)

    def forget_models(self) -> None:
        """Clear the known base models after a fleet change; they are read again from the remaining engines."""
        self._base_models.clear()

    def known_models(self) -> set[str]:
        """Names of the models and adapters the fleet serves; empty until an engine has listed its models."""
        return {str(model.get("id")) for instance in self.instances for model in instance.models}

    def forwarded_headers(self, headers: dict[bytes, bytes], instance: Instance) -> dict[str, str]:
        """Headers for an engine: the allowed ones of the client's, and the engine's key."""
        return self.forwarding.headers(headers, instance.settings)
