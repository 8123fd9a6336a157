"""Metrics of the state that replicas share."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.sharing.sharing import Sharing


class SharingMetrics(Collector):
    """Registers itself as a collector; without sharing its metrics have no samples."""

    def __init__(self, registry: CollectorRegistry, sharing: Sharing | None) -> None:
        self._sharing = sharing
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        linked = GaugeMetricFamily("warmroute_shared_state_linked", "1 while state is exchanged with the store")
        others = GaugeMetricFamily("warmroute_shared_state_replicas", "Other replicas that were heard within the TTL")
        delay = GaugeMetricFamily(
            "warmroute_shared_state_delay_seconds", "Time of the last own message through the store and back"
        )
        links = CounterMetricFamily("warmroute_shared_state_links", "Connections to the store since the start")
        messages = CounterMetricFamily(
            "warmroute_shared_state_messages", "Messages to and from the store", labels=["direction"]
        )
        sharing = self._sharing
        if sharing is not None:
            linked.add_metric([], float(sharing.linked))
            others.add_metric([], len(sharing.others))
            delay.add_metric([], sharing.delay_s)
            links.add_metric([], sharing.links)
            messages.add_metric(["sent"], sharing.sent)
            messages.add_metric(["received"], sharing.received)
        yield from (linked, others, delay, links, messages)
