"""Prometheus metrics with bounded labels: instances, classes, reasons and outcomes are closed sets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from policies.row import Row
from proxy.events.subscriber import EventSubscriber
from proxy.fleet.instances import Instances
from proxy.metrics.fleet.instances import Readings, instance_families
from proxy.metrics.latencies import LatencyHistograms
from proxy.metrics.predictions import PredictionErrors
from proxy.metrics.tallies import Spread, Tally
from proxy.metrics.tenants import TenantTallies
from proxy.records.batch import RecordBatch
from proxy.routing.router import Router

log = logging.getLogger("warmroute.metrics")

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 10)
# Factors of 1.4 around 1, so that the medians of two instances can be compared; few, because every instance has them.
_INSTANCE_RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8, 16, 50)
_DECIDE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


class _First(Collector):
    """A collector without metrics; the registry calls ``settle`` by it before it reads any other."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self._settle()
        return ()


def _prefilled_on(row: Row, leg: str) -> str | None:
    """Instance whose prefill the leg timed; None: none, or not known any more."""
    if row.resume is not None:  # the decision is that of the continuation
        return None
    if leg == "first_token":
        return row.instance
    return row.prefill_instance if leg == "prefill" else None


class Metrics:
    """Metrics of one proxy in a registry of its own, so that several proxies can share a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._batch = RecordBatch(self._count, log, lambda row: f"request {row.request_id} could not be counted")
        """Finished requests that are not counted yet. Everything that reads the counts counts them first."""
        self._batch.open(None)
        self.record: Callable[[Row], None] = self._batch.add
        """Count one finished request, which must not change any more."""
        self.registry.register(_First(self._batch.settle))
        self._requests = Tally(
            self.registry, "warmroute_requests", "Finished requests, by outcome", ["instance", "outcome"]
        )
        self._decisions = Tally(
            self.registry,
            "warmroute_decisions",
            "Routing decisions, by policy, class and reason",
            ["policy", "request_class", "reason"],
        )
        self._admissions = Tally(
            self.registry, "warmroute_admissions", "Requests that admission sent, by reason", ["reason"]
        )
        self._offloads = Tally(
            self.registry,
            "warmroute_offloads",
            "Results of the offload planner and of attempted offloads, by reason",
            ["reason"],
        )
        self._normalized = Tally(
            self.registry, "warmroute_normalized_requests", "Requests with a prompt made constant, by rule", ["rule"]
        )
        self._resumes = Tally(self.registry, "warmroute_resumes", "Broken streams, by result of resuming", ["result"])
        self._prompt = Tally(self.registry, "warmroute_prompt_tokens", "Prompt tokens", ["instance"])
        self._reported = Tally(
            self.registry,
            "warmroute_reported_prompt_tokens",
            "Prompt tokens of requests whose engine reported its cached tokens",
            ["instance"],
        )
        self._cached = Tally(
            self.registry, "warmroute_cached_tokens", "Prompt tokens served from the prefix cache", ["instance", "kind"]
        )
        self._error = Tally(
            self.registry,
            "warmroute_cache_prediction_error_tokens",
            "Sum of |predicted - actual| cached tokens",
            ["instance"],
        )
        self._errors = PredictionErrors()
        self._index_error = Tally(
            self.registry,
            "warmroute_index_error_tokens",
            "Sum of |predicted - actual| cached tokens of each index, used or not",
            ["instance", "source"],
        )
        self._index_predictions = Tally(
            self.registry,
            "warmroute_index_predictions",
            "Predictions compared with an engine's report",
            ["instance", "source"],
        )
        self._first_byte = Spread(
            self.registry,
            "warmroute_first_byte_seconds",
            "Time from arrival to first byte",
            ["request_class"],
            _SECONDS,
        )
        self._total = Spread(
            self.registry, "warmroute_request_seconds", "Time from arrival to last byte", ["request_class"], _SECONDS
        )
        self._deciding = Spread(
            self.registry, "warmroute_decide_seconds", "Time of index lookup and decision", [], _DECIDE_SECONDS
        )
        self._leg_ratio = Spread(
            self.registry,
            "warmroute_leg_actual_to_predicted_ratio",
            "Actual over predicted time of a leg; 1 is an exact prediction",
            ["leg"],
            _RATIOS,
        )
        self._first_token_ratio = Spread(
            self.registry,
            "warmroute_instance_first_token_actual_to_predicted_ratio",
            "Actual over predicted time to the first token of streams and P legs, by the instance that prefilled",
            ["instance"],
            _INSTANCE_RATIOS,
        )
        self._leg_error = Tally(
            self.registry,
            "warmroute_leg_prediction_error_seconds",
            "Sum of |predicted - actual| seconds of legs",
            ["leg"],
        )
        self._latencies = LatencyHistograms(self.registry)
        self.tenants = TenantTallies(self.registry)
        self._readings = Readings()
        self.registry.register(self._readings)
        ProcessCollector(registry=self.registry)

    @property
    def errors(self) -> PredictionErrors:
        """Errors of the predicted cached tokens."""
        self._batch.settle()
        return self._errors

    def _count(self, row: Row) -> None:
        decision = row.decision
        instance = row.instance or ""
        self._requests.values[instance, row.outcome] += 1
        for rule in row.normalized:
            self._normalized.values[(rule,)] += 1
        if row.admission is not None:
            self._admissions.values[(row.admission,)] += 1
        if row.tenant is not None:
            self.tenants.record(row.tenant, row)
        if decision is None:
            return
        request_class = decision.request_class
        self._decisions.values[decision.policy, request_class, decision.reason] += 1
        if row.offload_reason:
            self._offloads.values[(row.offload_reason,)] += 1
        if row.resume:
            self._resumes.values[(row.resume,)] += 1
        if row.prompt_tokens:
            self._prompt.values[(instance,)] += row.prompt_tokens
        actual, predicted = row.actual_cached_tokens, row.predicted_cached_tokens
        if actual is not None and predicted is not None:
            self._reported.values[(instance,)] += row.prompt_tokens or 0
            self._cached.values[instance, "actual"] += actual
            self._cached.values[instance, "predicted"] += predicted
            self._error.values[(instance,)] += abs(actual - predicted)
        prediction = row.prediction
        if prediction is not None and actual is not None:
            self._errors.record(row.prefill_instance or decision.decode_on, prediction, actual)
        for leg, times in row.legs.items():
            self._leg_error.values[(leg,)] += abs(times["predicted_s"] - times["actual_s"])
            if times["predicted_s"] > 0:
                ratio = times["actual_s"] / times["predicted_s"]
                self._leg_ratio.observe((leg,), ratio)
                prefilled_on = _prefilled_on(row, leg)
                if prefilled_on is not None:
                    self._first_token_ratio.observe((prefilled_on,), ratio)
        stages = row.stages_ms
        if "decide" in stages:
            self._deciding.observe((), stages["decide"] / 1e3)
        if "first_byte" in stages:
            self._first_byte.observe((request_class,), stages["first_byte"] / 1e3)
        if "total" in stages:
            self._total.observe((request_class,), stages["total"] / 1e3)
        self._latencies.record(row, instance, request_class)

    def forget(self, instance: str) -> None:
        """Remove the series of an instance that left the fleet."""
        self._batch.settle()
        for metric in vars(self).values():
            if isinstance(metric, Tally | Spread):
                metric.forget("instance", instance)
        self._errors.forget(instance)
        self._latencies.forget(instance)

    def render(self, router: Router, instances: Instances, events: EventSubscriber, now_s: float) -> bytes:
        """The exposition text; gauges are read at this moment."""
        self._read(router, instances, events, now_s)
        return generate_latest(self.registry)

    def collect(self, router: Router, instances: Instances, events: EventSubscriber, now_s: float) -> Iterable[Metric]:
        """The families, to be merged with those of other workers; gauges are read at this moment."""
        self._read(router, instances, events, now_s)
        return self.registry.collect()

    def _read(self, router: Router, instances: Instances, events: EventSubscriber, now_s: float) -> None:
        self._batch.settle()
        for (name, source), error in self._errors.by_source.items():
            self._index_error.values[name, source] = error.absolute_error_tokens
            self._index_predictions.values[name, source] = error.requests
        self._readings.families = list(instance_families(router, instances, events, now_s))
