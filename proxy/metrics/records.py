"""Metrics of the rows that are recorded: those that the file or a reader lost."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.breakdown import Breakdown


class RecordMetrics(Collector):
    """Registers itself as a collector; figures are read when scraped."""

    def __init__(self, registry: CollectorRegistry, breakdown: Breakdown) -> None:
        self._breakdown = breakdown
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        breakdown = self._breakdown
        lost = CounterMetricFamily(
            "warmroute_breakdown_dropped_rows",
            "Rows that were not written to the file, or that a slow subscriber did not receive",
            labels=["reader"],
        )
        lost.add_metric(["file"], breakdown.file_dropped)
        lost.add_metric(["subscriber"], breakdown.feed_dropped)
        yield lost
        yield GaugeMetricFamily(
            "warmroute_breakdown_file_failing",
            "1 while rows cannot be written to the file",
            float(breakdown.file_error is not None),
        )
        yield GaugeMetricFamily("warmroute_breakdown_subscribers", "Readers of rows as they end", breakdown.subscribers)
