"""Prometheus metrics with bounded labels: instances, classes, reasons and outcomes are all closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from proxy.breakdown import Row
from proxy.instances import Instances
from proxy.router import Router

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_MILLISECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Metrics:
    """One registry per proxy, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "warmroute_requests", "Requests by how they ended", ["instance", "outcome"], registry=self.registry
        )
        self._decisions = Counter(
            "warmroute_decisions",
            "Decisions by class and reason",
            ["policy", "request_class", "reason"],
            registry=self.registry,
        )
        self._offloads = Counter(
            "warmroute_offloads", "What the planner said or became of an offload", ["reason"], registry=self.registry
        )
        self._prompt = Counter("warmroute_prompt_tokens", "Prompt tokens", ["instance"], registry=self.registry)
        self._cached = Counter(
            "warmroute_cached_tokens", "Prompt tokens served from cache", ["instance", "kind"], registry=self.registry
        )
        self._error = Counter(
            "warmroute_cache_prediction_error_tokens",
            "Sum of |predicted - actual| cached tokens",
            ["instance"],
            registry=self.registry,
        )
        self._first_byte = Histogram(
            "warmroute_first_byte_seconds",
            "Arrival to first byte",
            ["request_class"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._total = Histogram(
            "warmroute_request_seconds",
            "Arrival to last byte",
            ["request_class"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._deciding = Histogram(
            "warmroute_decide_milliseconds", "Index lookup and decision", buckets=_MILLISECONDS, registry=self.registry
        )
        self._load = Gauge(
            "warmroute_instance_load", "Ledger and index readings", ["instance", "what"], registry=self.registry
        )
        self._healthy = Gauge("warmroute_instance_healthy", "1 when routable", ["instance"], registry=self.registry)

    def record(self, row: Row) -> None:
        """Count one finished request."""
        decision = row.decision
        instance = decision.decode_on if decision else ""
        self._requests.labels(instance, row.outcome.value).inc()
        if decision is None:
            return
        self._decisions.labels(decision.policy, decision.request_class.value, decision.reason.value).inc()
        if row.offload_reason:
            self._offloads.labels(row.offload_reason).inc()
        if row.prompt_tokens:
            self._prompt.labels(instance).inc(row.prompt_tokens)
        if row.actual_cached_tokens is not None and row.predicted_cached_tokens is not None:
            self._cached.labels(instance, "actual").inc(row.actual_cached_tokens)
            self._cached.labels(instance, "predicted").inc(row.predicted_cached_tokens)
            self._error.labels(instance).inc(abs(row.actual_cached_tokens - row.predicted_cached_tokens))
        stages = row.stages_ms
        if "decide" in stages:
            self._deciding.observe(stages["decide"])
        if "first_byte" in stages:
            self._first_byte.labels(decision.request_class.value).observe(stages["first_byte"] / 1e3)
        if "total" in stages:
            self._total.labels(decision.request_class.value).observe(stages["total"] / 1e3)

    def render(self, router: Router, instances: Instances, now_s: float) -> bytes:
        """The exposition text, with gauges read at this moment."""
        for instance in instances:
            name = instance.name
            load = router.state.ledger.load(name, now_s)
            self._healthy.labels(name).set(instance.healthy)
            for what, value in (
                ("requests", load.requests),
                ("pending_prefill_tokens", load.pending_prefill_tokens),
                ("decoding_tokens", load.decoding_tokens),
                ("recent_tokens", load.recent_tokens),
                ("index_blocks", router.state.index.blocks(name)),
                ("sessions", router.state.sessions.count(name)),
                ("kv_usage", instance.kv_usage),
            ):
                self._load.labels(name, what).set(value)
        return generate_latest(self.registry)
