"""Metrics of cache killers and of normalised prompts. Labels: rules."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.sessions.cache_killers import CacheKillers


class CacheKillerMetrics(Collector):
    """Registers itself as a collector; figures are read when scraped."""

    def __init__(self, registry: CollectorRegistry, killers: CacheKillers) -> None:
        self._killers = killers
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        killers = self._killers
        turns = CounterMetricFamily(
            "warmroute_cache_killers",
            "Turns whose prompt parted from the turn before, by kind of change",
            labels=["rule"],
        )
        lost = CounterMetricFamily(
            "warmroute_cache_killer_lost_tokens",
            "Tokens of the history computed again because of that",
            labels=["rule"],
        )
        for rule, count in killers.turns.items():
            turns.add_metric([rule.value], count)
            lost.add_metric([rule.value], killers.lost_tokens[rule])
        yield turns
        yield lost
        yield CounterMetricFamily(
            "warmroute_compared_turns", "Turns compared with an earlier one of their session", killers.compared
        )
        yield GaugeMetricFamily(
            "warmroute_compared_conversations", "Conversations whose last turn is remembered", len(killers)
        )
