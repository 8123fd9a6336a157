"""Metrics of traces. Labels: results."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.tracing.tracing import NoTracing


class TraceMetrics(Collector):
    """Registers itself as a collector; figures are read when scraped."""

    def __init__(self, registry: CollectorRegistry, tracing: NoTracing) -> None:
        self._tracing = tracing
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        traces = CounterMetricFamily(
            "warmroute_traces", "Recorded requests, by the end of their traces: exported or lost", labels=["result"]
        )
        for result, count in self._tracing.results.items():
            traces.add_metric([result.value], count)
        yield traces
