"""Prometheus metrics with bounded labels: instances, classes, reasons and outcomes are all closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from proxy.breakdown import Row
from proxy.events.subscriber import EventSubscriber
from proxy.instances import Instances
from proxy.predictions import PredictionErrors
from proxy.router import Router

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 10)
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
        self.errors = PredictionErrors()
        self._index_error = Counter(
            "warmroute_index_error_tokens",
            "Sum of |predicted - actual| cached tokens of either index, used or not",
            ["instance", "source"],
            registry=self.registry,
        )
        self._index_predictions = Counter(
            "warmroute_index_predictions",
            "Predictions that an engine's report was compared with",
            ["instance", "source"],
            registry=self.registry,
        )
        self._events = Gauge(
            "warmroute_kv_events",
            "KV events of an instance since the start, and whether its exact index is trusted now",
            ["instance", "what"],
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
        self._leg_ratio = Histogram(
            "warmroute_leg_actual_to_predicted_ratio",
            "Time a leg took over what the cost models predicted: 1 is right",
            ["leg"],
            buckets=_RATIOS,
            registry=self.registry,
        )
        self._leg_error = Counter(
            "warmroute_leg_prediction_error_seconds",
            "Sum of |predicted - actual| seconds of legs",
            ["leg"],
            registry=self.registry,
        )
        self._recycle = Gauge(
            "warmroute_instance_recycle_wanted", "1 when it should be restarted", ["instance"], registry=self.registry
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
        self._record_prediction(row)
        for leg, times in row.legs.items():
            self._leg_error.labels(leg).inc(abs(times["predicted_s"] - times["actual_s"]))
            if times["predicted_s"] > 0:
                self._leg_ratio.labels(leg).observe(times["actual_s"] / times["predicted_s"])
        stages = row.stages_ms
        if "decide" in stages:
            self._deciding.observe(stages["decide"])
        if "first_byte" in stages:
            self._first_byte.labels(decision.request_class.value).observe(stages["first_byte"] / 1e3)
        if "total" in stages:
            self._total.labels(decision.request_class.value).observe(stages["total"] / 1e3)

    def _record_prediction(self, row: Row) -> None:
        prediction, actual = row.prediction, row.actual_cached_tokens
        if prediction is None or actual is None or row.decision is None:
            return
        self.errors.record(row)
        instance = row.prefill_instance or row.decision.decode_on
        for source, predicted in (("shadow", prediction.shadow_tokens), ("exact", prediction.exact_tokens)):
            if predicted is not None:
                self._index_predictions.labels(instance, source).inc()
                self._index_error.labels(instance, source).inc(abs(predicted - actual))

    def render(self, router: Router, instances: Instances, events: EventSubscriber, now_s: float) -> bytes:
        """The exposition text, with gauges read at this moment."""
        for name in events.streams:
            for what, number in events.figures(name).items():
                self._events.labels(name, what).set(number)
        for instance in instances:
            name = instance.name
            load = router.state.ledger.load(name, now_s)
            self._healthy.labels(name).set(instance.healthy)
            self._recycle.labels(name).set(instance.recycle_wanted is not None)
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
