"""Metrics of the meters. Labels: instances, kinds of hits, causes of loss."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.fleet.instances import Instances
from proxy.meters.meters import Meters

_COUNTERS = {
    "prefix_query_tokens": ("warmroute_engine_prefix_query_tokens", "Prompt tokens looked up, by the engine's counter"),
    "prefix_hit_tokens": ("warmroute_engine_prefix_hit_tokens", "Prompt tokens found cached, by the engine's counter"),
    "external_query_tokens": (
        "warmroute_engine_external_query_tokens",
        "Prompt tokens looked up in an external cache, by the engine's counter",
    ),
    "external_hit_tokens": (
        "warmroute_engine_external_hit_tokens",
        "Prompt tokens whose KV came from outside, by the engine's counter",
    ),
}
_KINDS = ("prompt", "achieved", "reachable", "ceiling")
_CAUSES = ("routing", "eviction", "prediction")


class MeterMetrics(Collector):
    """Registers itself as a collector; figures are read when scraped."""

    def __init__(self, registry: CollectorRegistry, meters: Meters, instances: Instances) -> None:
        self._meters = meters
        self._instances = instances
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        now_s = time.monotonic()
        yield from self._fleet(now_s)
        yield from self._engines(now_s)

    def _fleet(self, now_s: float) -> Iterator[Metric]:
        total, hits = self._meters.total(), self._meters.hits(now_s)
        tokens = CounterMetricFamily(
            "warmroute_hit_tokens", "Prompt tokens, and those achieved, reachable and ceiling hits", labels=["kind"]
        )
        for kind in _KINDS:
            tokens.add_metric([kind], getattr(total, kind))
        yield tokens
        lost = CounterMetricFamily(
            "warmroute_hit_loss_tokens", "Prompt tokens between ceiling and achieved hits, by cause", labels=["cause"]
        )
        for cause in _CAUSES:
            lost.add_metric([cause], getattr(total, cause))
        yield lost
        ratio = GaugeMetricFamily(
            "warmroute_hit_ratio", "Hits as a share of the prompt tokens in the window", labels=["kind"]
        )
        for kind, share in hits.shares().items():
            if share is not None:
                ratio.add_metric([kind], share)
        yield ratio
        loss = GaugeMetricFamily(
            "warmroute_hit_loss_ratio", "Lost hits as a share of the prompt tokens in the window", labels=["cause"]
        )
        for cause, share in hits.losses().items():
            loss.add_metric([cause], share)
        yield loss

    def _engines(self, now_s: float) -> Iterator[Metric]:
        gauges = {
            figure: GaugeMetricFamily(f"warmroute_instance_{figure}", text, labels=["instance"])
            for figure, text in (
                ("engine_running_requests", "Running requests, as the engine last reported them"),
                ("engine_waiting_requests", "Waiting requests, as the engine last reported them"),
                ("prediction_error_ratio", "Prompt tokens predicted wrongly, as a share, in the window"),
                ("transfer_error_ratio", "Error of predicted hand-off times, as a share, in the window"),
            )
        }
        counters = {key: CounterMetricFamily(*what, labels=["instance"]) for key, what in _COUNTERS.items()}
        for instance in self._instances:
            meter = self._meters.of(instance.name)
            sums = meter.sums(now_s)
            for figure, value in (
                ("engine_running_requests", instance.reported.running),
                ("engine_waiting_requests", instance.reported.waiting),
                ("prediction_error_ratio", sums.prediction_error()),
                ("transfer_error_ratio", sums.transfer_error()),
            ):
                if value is not None:
                    gauges[figure].add_metric([instance.name], value)
            for key, counted in meter.counted.items():
                counters[key].add_metric([instance.name], counted)
        yield from (*gauges.values(), *counters.values())
