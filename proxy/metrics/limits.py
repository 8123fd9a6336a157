"""Metrics of breakers, queue, retry budget, failing policies and clients' connections, collected at scrape time.

Labels: instances, states, reasons, installed policies, limits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.clients.bounds import ClientBounds
from proxy.fleet.breaker import BreakerState
from proxy.fleet.instances import Instances
from proxy.routing.admission import Admission
from proxy.routing.retries import RetryBudget
from proxy.routing.router import Router

_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class LimitMetrics(Collector):
    """Registers itself as a collector; series of removed instances disappear."""

    def __init__(
        self,
        registry: CollectorRegistry,
        instances: Instances,
        admission: Admission,
        retries: RetryBudget,
        router: Router,
        clients: ClientBounds,
    ) -> None:
        self._instances = instances
        self._admission = admission
        self._retries = retries
        self._router = router
        self._policies = router.watch
        self._clients = clients
        waits = Histogram(
            "warmroute_queue_wait_seconds",
            "Time requests spent in the queue, for all outcomes",
            buckets=_SECONDS,
            registry=registry,
        )
        admission.on_waited = waits.observe
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        breaker = GaugeMetricFamily(
            "warmroute_instance_breaker", "1 for the current state of its circuit breaker", labels=["instance", "state"]
        )
        openings = CounterMetricFamily(
            "warmroute_instance_breaker_openings", "Times the instance's circuit breaker opened", labels=["instance"]
        )
        for instance in self._instances:
            for state in BreakerState:
                breaker.add_metric([instance.name, state.value], float(instance.breaker.state is state))
            openings.add_metric([instance.name], instance.breaker.openings)
        yield breaker
        yield openings
        admission = self._admission
        yield GaugeMetricFamily(
            "warmroute_in_flight", "Admitted requests in flight, without counting retries and legs", admission.in_flight
        )
        yield GaugeMetricFamily("warmroute_queue_requests", "Requests waiting in the queue", admission.waiting)
        refused = CounterMetricFamily(
            "warmroute_queue_refused", "Requests that were not admitted, by reason", labels=["reason"]
        )
        refused.add_metric(["queue_full"], admission.refused_full)
        refused.add_metric(["queue_timeout"], admission.refused_late)
        refused.add_metric(["client_gone"], admission.left)
        yield refused
        retries = CounterMetricFamily(
            "warmroute_retries", "Failed attempts, by the resulting action", labels=["result"]
        )
        retries.add_metric(["retried"], self._retries.made)
        retries.add_metric(["retried_unseen"], self._retries.unbudgeted)
        retries.add_metric(["budget_exhausted"], self._retries.exhausted)
        yield retries
        yield GaugeMetricFamily(
            "warmroute_retry_budget", "Retries currently permitted by the budget", self._retries.left(time.monotonic())
        )
        failures = CounterMetricFamily(
            "warmroute_policy_failures",
            "Decisions that a built-in policy took because the policy or planner failed",
            labels=["part", "name"],
        )
        # From 0 on for what decides now: an increase from no series to 1 is none to Prometheus.
        counts = dict.fromkeys(self._router.deciding, 0)
        counts |= {key: trouble.count for key, trouble in self._policies.failures.items()}
        for (part, name), count in counts.items():
            failures.add_metric([part.value, name], count)
        yield failures
        slow = CounterMetricFamily(
            "warmroute_slow_decisions",
            "Routing decisions that took longer than limits.slow_decision_s",
            labels=["policy"],
        )
        for name, trouble in self._policies.slow.items():
            slow.add_metric([name], trouble.count)
        yield slow
        clients = self._clients
        yield GaugeMetricFamily("warmroute_client_connections", "Open connections of clients", clients.open)
        yield GaugeMetricFamily(
            "warmroute_request_body_bytes", "Size of all request bodies in memory", clients.held_bytes
        )
        turned_away = CounterMetricFamily(
            "warmroute_clients_refused", "Requests and connections refused with 503, by limit", labels=["limit"]
        )
        turned_away.add_metric(["connections"], clients.refused_connections)
        turned_away.add_metric(["buffered_bytes"], clients.refused_bodies)
        yield turned_away
        invalid = CounterMetricFamily(
            "warmroute_client_errors",
            "Refusals of data that became no row of the records, TLS handshakes included, by error code",
            labels=["code"],
        )
        for code, count in sorted(clients.turned_away.items()):
            invalid.add_metric([code], count)
        yield invalid
