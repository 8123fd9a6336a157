"""Metrics of breakers, queue and retry budget, read when they are scraped. Labels: instances, states, reasons."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.fleet.breaker import BreakerState
from proxy.fleet.instances import Instances
from proxy.routing.admission import Admission
from proxy.routing.retries import RetryBudget

_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class LimitMetrics(Collector):
    """Registers itself; instances that leave the fleet take their series with them."""

    def __init__(
        self, registry: CollectorRegistry, instances: Instances, admission: Admission, retries: RetryBudget
    ) -> None:
        self._instances = instances
        self._admission = admission
        self._retries = retries
        waits = Histogram(
            "warmroute_queue_wait_seconds",
            "Time that requests waited for a place, however it ended",
            buckets=_SECONDS,
            registry=registry,
        )
        admission.on_waited = waits.observe
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """See ``prometheus_client.registry.Collector``."""
        breaker = GaugeMetricFamily(
            "warmroute_instance_breaker", "1 for the state that its breaker is in", labels=["instance", "state"]
        )
        openings = CounterMetricFamily(
            "warmroute_instance_breaker_openings", "How often its breaker opened", labels=["instance"]
        )
        for instance in self._instances:
            for state in BreakerState:
                breaker.add_metric([instance.name, state.value], float(instance.breaker.state is state))
            openings.add_metric([instance.name], instance.breaker.openings)
        yield breaker
        yield openings
        admission = self._admission
        yield GaugeMetricFamily(
            "warmroute_in_flight", "Requests admitted and not over, retries and legs not counted", admission.in_flight
        )
        yield GaugeMetricFamily("warmroute_queue_requests", "Requests waiting for a place", admission.waiting)
        refused = CounterMetricFamily(
            "warmroute_queue_refused", "Requests that got no place, by why", labels=["reason"]
        )
        refused.add_metric(["queue_full"], admission.refused_full)
        refused.add_metric(["queue_timeout"], admission.refused_late)
        refused.add_metric(["client_gone"], admission.left)
        yield refused
        retries = CounterMetricFamily("warmroute_retries", "Failed attempts by what followed", labels=["result"])
        retries.add_metric(["retried"], self._retries.made)
        retries.add_metric(["retried_unseen"], self._retries.unbudgeted)
        retries.add_metric(["budget_exhausted"], self._retries.exhausted)
        yield retries
        yield GaugeMetricFamily(
            "warmroute_retry_budget", "Retries that may be made at this moment", self._retries.left(time.monotonic())
        )
