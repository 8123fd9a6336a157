"""Metrics of the event loop. No labels."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.loop_lag import LoopLag

_WINDOW_S = 10.0


class LoopMetrics(Collector):
    """Registers itself as a collector; figures are read when scraped."""

    def __init__(self, registry: CollectorRegistry, lag: LoopLag) -> None:
        self._lag = lag
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "warmroute_event_loop_late_seconds",
            "Delays of the event loop within the last 10 s, without those below 50 ms",
            self._lag.late_s(_WINDOW_S),
        )
