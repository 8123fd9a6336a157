"""Metrics of tenants. Labels: tenants, of which the first hundred have series of their own, kinds of tokens, limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from policies.fairness import TenantShares
from policies.row import Row
from proxy.access.keys import Keys
from proxy.metrics.tallies import Tally

MAX_NAMED = 100
"""Tenants with series of their own, in the order in which they first appear."""
OTHERS = "(others)"
"""Label of all further tenants; no tenant can have this name."""


class TenantTallies:
    """Counters of finished requests by tenant; requests without a tenant are not counted here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._named: set[str] = set()
        self._requests = Tally(registry, "warmroute_tenant_requests", "Finished requests, by tenant", ["tenant"])
        self._tokens = Tally(
            registry,
            "warmroute_tenant_tokens",
            "Tokens of finished requests, by tenant: prompt, cached (those of the prompt, as reported), completion",
            ["tenant", "kind"],
        )
        self._waits = Tally(registry, "warmroute_tenant_wait_seconds", "Time held and queued, by tenant", ["tenant"])

    def label_of(self, tenant: str) -> str:
        """The tenant's name, or the label of all others."""
        if tenant in self._named:
            return tenant
        if len(self._named) >= MAX_NAMED:
            return OTHERS
        self._named.add(tenant)
        return tenant

    def record(self, tenant: str, row: Row) -> None:
        """Count one finished request of a tenant."""
        label = self.label_of(tenant)
        self._requests.values[(label,)] += 1
        tokens = self._tokens.values
        for kind, count in (
            ("prompt", row.prompt_tokens),
            ("cached", row.actual_cached_tokens),
            ("completion", row.completion_tokens),
        ):
            if count:
                tokens[label, kind] += count
        waited_s = row.held_s + row.stages_ms.get("queued", 0.0) / 1e3
        if waited_s:
            self._waits.values[(label,)] += waited_s


class TenantMetrics(Collector):
    """Registers itself as a collector; figures are read when scraped."""

    def __init__(self, registry: CollectorRegistry, tallies: TenantTallies, shares: TenantShares, keys: Keys) -> None:
        self._tallies = tallies
        self._shares = shares
        self._keys = keys
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        label_of = self._tallies.label_of
        for name, text, figures in (
            ("warmroute_tenant_waiting_requests", "Requests held or queued, by tenant", self._shares.waiting),
            (
                "warmroute_tenant_in_flight_tokens",
                "Prompt tokens that requests in flight had to compute, by tenant",
                self._shares.in_flight_tokens,
            ),
        ):
            sums: Counter[str] = Counter()
            for tenant, value in figures.items():
                if tenant:
                    sums[label_of(tenant)] += value
            gauge = GaugeMetricFamily(name, text, labels=["tenant"])
            for label, value in sums.items():
                gauge.add_metric([label], value)
            yield gauge
        refused: Counter[tuple[str, str]] = Counter()
        for key, quota in self._keys.quotas().items():
            for limit, count in quota.refused.items():
                refused[label_of(key), limit.value] += count
        family = CounterMetricFamily(
            "warmroute_key_limit_refused", "Requests answered 429, by key and its limit", labels=["tenant", "limit"]
        )
        for labels, count in refused.items():
            family.add_metric(labels, count)
        yield family
