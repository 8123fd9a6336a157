"""What all of the proxy shares while it runs, with one owner."""

from __future__ import annotations

import httpx

from proxy.abandoned import AbandonedPulls
from proxy.breakdown import Breakdown
from proxy.engine_client import EngineClient
from proxy.events.subscriber import EventSubscriber
from proxy.handoff import HandOff
from proxy.instances import Instances
from proxy.leaks import LeakWatch
from proxy.metrics import Metrics
from proxy.parse import Parsed
from proxy.router import Router
from proxy.settings import Settings
from proxy.tokens.service import Tokens
from proxy.upstream import Upstream

# Engines see these of a client's headers, and no others.
_FORWARDED = (b"x-session-id", b"traceparent", b"tracestate", b"authorization")


class Core:
    """Router, fleet, connections and records of one proxy. ``open`` and ``close`` bracket its life."""

    upstream: Upstream
    control: httpx.AsyncClient
    handoff: HandOff

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.instances = Instances(settings.instances, settings.health)
        self._base_models: set[str] = set()
        self.router = Router(settings, self.is_base_model)
        self.events = EventSubscriber(settings.instances, settings.events, self.router.state.predictor.exact)
        self.tokens = Tokens(settings.tokenizer)
        self.metrics = Metrics()
        self.breakdown = Breakdown(settings.breakdown.capacity, settings.breakdown.jsonl_path)
        self.session_headers = tuple(name.lower().encode("latin-1") for name in settings.sessions.headers)
        self.leaks = LeakWatch(self.instances, settings.offload.leak_share)
        self.abandoned = AbandonedPulls(self.leaks, settings.offload.abandoned_s)
        self.draining = False

    def open(self) -> None:
        """Open the connections; needs a running event loop."""
        self.upstream = EngineClient(self.settings.timeouts.connect_s)
        self.control = httpx.AsyncClient(timeout=self.settings.health.timeout_s, trust_env=False)
        self.handoff = HandOff(self.settings.offload, self.upstream, self.control)

    async def close(self) -> None:
        """Close connections and files."""
        try:
            await self.abandoned.close(self.settings.grace_s)
            await self.upstream.close()
        finally:
            try:
                await self.control.aclose()
            finally:
                self.tokens.close()
                self.breakdown.close()

    async def tokenized(self, parsed: Parsed) -> Parsed:
        """A text or chat request with exact blocks where the tokenizer is known, else as it is. The body stays."""
        ids = await self.tokens.tokens_of(parsed)
        return parsed if ids is None else self.router.tokenized(parsed, ids)

    def is_base_model(self, name: str) -> bool:
        """Whether an engine has listed ``name`` as a model of its own, not as an adapter (which names its parent)."""
        if name not in self._base_models:
            cards = [card for instance in self.instances for card in instance.models]
            self._base_models |= {str(card["id"]) for card in cards if card.get("parent") is None}
        return name in self._base_models

    def known_models(self) -> set[str]:
        """Names of the models and adapters the fleet serves; empty until an engine has listed its own."""
        return {str(model.get("id")) for instance in self.instances for model in instance.models}

    def forwarded_headers(self, headers: dict[bytes, bytes]) -> dict[str, str]:
        """Of a client's headers, those an engine may see."""
        return {name.decode("latin-1"): headers[name].decode("latin-1") for name in _FORWARDED if name in headers}
