"""Metric of the named conditions of ``GET /ready?verbose``. Label: the condition, from a closed set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ConditionMetrics(Collector):
    """Registers itself as a collector; ``read`` gives names and states when scraped."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Iterable[tuple[str, bool]]]) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "warmroute_condition", "1 while a named condition is ok, else 0", labels=["condition"]
        )
        for name, ok in self._read():
            family.add_metric([name], float(ok))
        yield family
