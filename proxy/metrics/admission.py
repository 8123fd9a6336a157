"""Metrics of admission: held requests, and the working set against the KV pools. Labels: states, reasons, ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from policies.admission.accounts import SessionAccounts
from proxy.metrics.tallies import Spread
from proxy.routing.holding import HoldEnd, HoldingLine

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 300, 600)


class AdmissionMetrics(Collector):
    """Registers itself as a collector; figures are read when scraped."""

    def __init__(self, registry: CollectorRegistry, accounts: SessionAccounts, holding: HoldingLine) -> None:
        self._accounts = accounts
        self._holding = holding
        self._holds = Spread(
            registry, "warmroute_hold_seconds", "Time for which admission held requests, by end", ["end"], _SECONDS
        )
        holding.on_ended = self._ended
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        accounts, holding = self._accounts, self._holding
        accounts.expire(time.monotonic())
        yield GaugeMetricFamily("warmroute_held_requests", "Requests that admission holds", len(holding))
        yield CounterMetricFamily(
            "warmroute_hold_refused", "Requests answered 429 because of admission.reject_above_s", holding.refused
        )
        contexts = GaugeMetricFamily(
            "warmroute_working_set_tokens",
            "Contexts of sessions in flight (active), or idle and likely to return (kept)",
            labels=["state"],
        )
        contexts.add_metric(["active"], accounts.active_tokens)
        contexts.add_metric(["kept"], accounts.kept_tokens)
        yield contexts
        yield GaugeMetricFamily(
            "warmroute_pool_tokens", "KV pools of the instances that may answer; 0: unknown", holding.pool_tokens()
        )
        yield GaugeMetricFamily(
            "warmroute_recomputation_ratio",
            "Share of the fleet's time spent on recomputing prefixes that no instance holds any more, lately",
            holding.lost_share(),
        )
        yield CounterMetricFamily(
            "warmroute_lost_tokens",
            "Tokens recomputed that the fleet had computed and no instance holds any more",
            accounts.losses.tokens,
        )

    def _ended(self, end: HoldEnd, seconds: float) -> None:
        self._holds.observe((end,), seconds)
