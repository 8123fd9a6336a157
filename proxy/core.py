"""What all of the proxy shares while it runs, with one owner."""

from __future__ import annotations

import time

import httpx

from proxy.breakdown import Breakdown
from proxy.handoff import HandOff
from proxy.instances import Instances
from proxy.metrics import Metrics
from proxy.router import Router
from proxy.settings import Settings
from proxy.upstream import AiohttpUpstream, Upstream

# Engines see these of a client's headers, and no others.
_FORWARDED = (b"x-session-id", b"traceparent", b"tracestate", b"authorization")


class Core:
    """Router, fleet, connections and records of one proxy. ``open`` and ``close`` bracket its life."""

    upstream: Upstream
    control: httpx.AsyncClient
    handoff: HandOff

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.router = Router(settings)
        self.instances = Instances(settings.instances, settings.health)
        self.metrics = Metrics()
        self.breakdown = Breakdown(settings.breakdown.capacity, settings.breakdown.jsonl_path)
        self.session_headers = tuple(name.lower().encode("latin-1") for name in settings.sessions.headers)
        self.draining = False

    def open(self) -> None:
        """Open the connections; needs a running event loop."""
        timeouts = self.settings.timeouts
        self.upstream = AiohttpUpstream(timeouts.connect_s, timeouts.total_s)
        self.control = httpx.AsyncClient(timeout=self.settings.health.timeout_s, trust_env=False)
        self.handoff = HandOff(self.settings.offload, self.upstream, self.control)

    async def close(self) -> None:
        """Close connections and files."""
        try:
            await self.upstream.close()
        finally:
            try:
                await self.control.aclose()
            finally:
                self.breakdown.close()

    def settle_offload(self, prefill: str, decode: str, *, ok: bool) -> None:
        """Count how a hand-off ended, for the breaker of its pair."""
        self.router.state.pairs.record((prefill, decode), ok, time.monotonic())

    def forwarded_headers(self, headers: dict[bytes, bytes]) -> dict[str, str]:
        """Of a client's headers, those an engine may see."""
        return {name.decode("latin-1"): headers[name].decode("latin-1") for name in _FORWARDED if name in headers}
