"""Metrics of shadow decisions. Labels: parts of a decision, and configured shadows, whose number is bounded."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from proxy.shadow.shadows import Shadows

_SHADOW = ["part", "policy"]


class ShadowMetrics(Collector):
    """Registers itself as a collector; figures are read when scraped. A shadow's series go when it is removed."""

    def __init__(self, registry: CollectorRegistry, shadows: Shadows) -> None:
        self._shadows = shadows
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "warmroute_shadow_requests",
            "Live decisions that a shadow decided too, by agreement",
            labels=[*_SHADOW, "agreed"],
        )
        regret = CounterMetricFamily(
            "warmroute_shadow_regret_seconds",
            "Estimated extra cost of the worse choice, by which of the two that was",
            labels=[*_SHADOW, "worse"],
        )
        hits = CounterMetricFamily(
            "warmroute_shadow_hit_tokens_given_away",
            "Cached tokens on the other choice's instance in excess of its own, by who gave them away",
            labels=[*_SHADOW, "given_away_by"],
        )
        failures = CounterMetricFamily("warmroute_shadow_failures", "Failed decisions of a shadow", labels=_SHADOW)
        paused = GaugeMetricFamily(
            "warmroute_shadow_paused", "1 if a shadow was stopped after failures in a row", labels=_SHADOW
        )
        seconds = SummaryMetricFamily(
            "warmroute_shadow_decision_seconds", "Time of a shadow's decision and comparison", labels=_SHADOW
        )
        for label, figures in self._shadows.figures.items():
            names = [figures.part.value, label]
            requests.add_metric([*names, "true"], figures.agreed)
            requests.add_metric([*names, "false"], figures.differed)
            regret.add_metric([*names, "live"], figures.live_worse_s)
            regret.add_metric([*names, "shadow"], figures.live_better_s)
            hits.add_metric([*names, "live"], figures.given_away_by_live)
            hits.add_metric([*names, "shadow"], figures.given_away_by_shadow)
            failures.add_metric(names, figures.failures)
            paused.add_metric(names, float(figures.paused))
            seconds.add_metric(names, figures.decisions, figures.seconds)
        yield from (requests, regret, hits, failures, paused, seconds)
        yield CounterMetricFamily(
            "warmroute_shadow_skipped", "Live decisions that found the shadows' queue full", self._shadows.skipped
        )
