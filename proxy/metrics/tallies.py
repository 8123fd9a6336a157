"""Low-overhead Prometheus counters and histograms: one dictionary entry per update, converted when scraped.

The client library's own types take a lock, look up the child by its labels and check the value with every update, which
takes longer than the routing decision. Here one event loop both counts and renders, so plain numbers are exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
"""Values of the labels, in the order of their names."""


class Tally(Collector):
    """A counter: ``tally.values[labels] += amount``."""

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str, labels: Sequence[str]) -> None:
        self.values: defaultdict[Labels, float] = defaultdict(float)
        self._what = (name, documentation)
        self._labels = labels
        registry.register(self)

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The family without samples."""
        return [CounterMetricFamily(*self._what, labels=self._labels)]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The family with its current values."""
        family = CounterMetricFamily(*self._what, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return [family]

    def forget(self, label: str, value: str) -> None:
        """Drop the series whose ``label`` has this value; no effect on a counter without that label."""
        _forget(self.values, self._labels, label, value)


class _Series:
    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0


class Spread(Collector):
    """A histogram: ``spread.observe(labels, value)``. Without label names its one series exists from the start."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        documentation: str,
        labels: Sequence[str],
        bounds: Sequence[float],
    ) -> None:
        self._what = (name, documentation)
        self._labels = labels
        self._bounds = tuple(bounds)
        self._series: dict[Labels, _Series] = {} if labels else {(): _Series(len(bounds) + 1)}
        registry.register(self)

    def observe(self, labels: Labels, value: float) -> None:
        """Count one value in the first bucket whose bound is not below it."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series(len(self._bounds) + 1)
        series.counts[bisect_left(self._bounds, value)] += 1
        series.total += value

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """The family without samples."""
        return [HistogramMetricFamily(*self._what, labels=self._labels)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The family with its current values."""
        family = HistogramMetricFamily(*self._what, labels=self._labels)
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        for labels, series in self._series.items():
            reached, buckets = 0, []
            for bound, count in zip(bounds, series.counts, strict=True):
                reached += count
                buckets.append((bound, float(reached)))
            family.add_metric(labels, buckets, series.total)
        return [family]

    def forget(self, label: str, value: str) -> None:
        """Drop the series whose ``label`` has this value; no effect on a histogram without that label."""
        _forget(self._series, self._labels, label, value)


def _forget(series: dict[Labels, float] | dict[Labels, _Series], names: Sequence[str], label: str, value: str) -> None:
    if label in names:
        place = names.index(label)
        for labels in [labels for labels in series if labels[place] == value]:
            del series[labels]
