"""Metric of the access log."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from proxy.access_log import AccessLog


class AccessLogMetrics(Collector):
    """Counts the requests that the access log lacks."""

    def __init__(self, registry: CollectorRegistry, access_log: AccessLog) -> None:
        self._access_log = access_log
        registry.register(self)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The family with its current value."""
        text = "Requests without a line in the access log: too many waited to be written, or writing failed"
        family = CounterMetricFamily("warmroute_access_log_dropped", text, labels=())
        family.add_metric((), self._access_log.dropped)
        return [family]
