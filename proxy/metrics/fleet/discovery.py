"""Metrics of discovery. Labels: results of readings, from a closed set."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.discovery.status import DiscoveryStatus


class DiscoveryMetrics(Collector):
    """Registers itself as a collector; figures are read when scraped."""

    def __init__(self, registry: CollectorRegistry, status: DiscoveryStatus) -> None:
        self._status = status
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield GaugeMetricFamily(
            "warmroute_discovery_instances", "Instances in the set that discovery applies", status.instances
        )
        yield GaugeMetricFamily(
            "warmroute_discovery_left_out", "Instances of that set that are not in the fleet", len(status.problems)
        )
        yield GaugeMetricFamily(
            "warmroute_discovery_last_read_timestamp_seconds",
            "Time of the last successful reading of the source; 0: none",
            status.read_unix_s or 0,
        )
        readings = CounterMetricFamily(
            "warmroute_discovery_readings",
            "Readings of the source: applied, unchanged, empty (the last set was kept), failed (likewise)",
            labels=["result"],
        )
        for reading, count in status.readings.items():
            readings.add_metric([reading.value], count)
        yield readings
