"""Metrics of the instances, read when they are scraped: those of an instance that left go with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.events.subscriber import EventSubscriber
from proxy.instances import Instances
from proxy.router import Router

EVENT_COUNTERS = {
    "batches": ("warmroute_kv_event_batches", "Batches of KV events applied to the exact index"),
    "replayed": ("warmroute_kv_event_replayed_batches", "Of these, batches that a replay brought"),
    "gaps": ("warmroute_kv_event_gaps", "Gaps in an instance's sequence of batches"),
    "malformed": ("warmroute_kv_event_malformed", "Messages or events that could not be read"),
    "stored": ("warmroute_kv_event_stored_blocks", "Blocks reported as stored"),
    "removed": ("warmroute_kv_event_removed_blocks", "Blocks reported as removed"),
    "cleared": ("warmroute_kv_event_clears", "Reports that a whole cache was cleared"),
    "foreign": ("warmroute_kv_event_foreign_blocks", "Stored blocks of adapters, cache salts or multimodal prompts"),
    "unknown_parent": ("warmroute_kv_event_unknown_parents", "Stored blocks whose parent had not been reported"),
    "unknown_removed": ("warmroute_kv_event_unknown_removed_blocks", "Removed blocks that had not been reported"),
    "distrusted": ("warmroute_exact_index_distrusts", "Times an instance's exact index was no longer trusted"),
}
"""Figure of ``EventSubscriber.figures`` -> the counter's name and help text."""


class Readings(Collector):
    """Shows the families that were read last."""

    def __init__(self) -> None:
        self.families: Iterable[Metric] = ()

    def collect(self) -> Iterable[Metric]:
        """Return ``families``."""
        return self.families


def instance_families(router: Router, instances: Instances, events: EventSubscriber, now_s: float) -> Iterator[Metric]:
    """Health, load and KV events of every instance, one family for each figure."""
    gauges = {
        name: GaugeMetricFamily(f"warmroute_instance_{name}", text, labels=["instance"])
        for name, text in (
            ("healthy", "1 when routable"),
            ("recycle_wanted", "1 when it should be restarted"),
            ("requests", "Requests in flight, P legs included"),
            ("pending_prefill_tokens", "New tokens of requests without a first token"),
            ("decoding_tokens", "Context tokens of requests past their first token"),
            ("recent_tokens", "New tokens assigned lately, decayed"),
            ("sessions", "Sessions pinned to it"),
            ("index_blocks", "Blocks in its shadow index"),
            ("kv_usage_ratio", "Share of its KV pool in use, as last reported"),
        )
    }
    for instance in instances:
        name = instance.name
        load = router.state.ledger.load(name, now_s)
        for figure, value in (
            ("healthy", instance.healthy),
            ("recycle_wanted", instance.recycle_wanted is not None),
            ("requests", load.requests),
            ("pending_prefill_tokens", load.pending_prefill_tokens),
            ("decoding_tokens", load.decoding_tokens),
            ("recent_tokens", load.recent_tokens),
            ("sessions", router.state.sessions.count(name)),
            ("index_blocks", router.state.index.blocks(name)),
            ("kv_usage_ratio", instance.kv_usage),
        ):
            gauges[figure].add_metric([name], float(value))
    yield from gauges.values()
    yield from _event_families(events)


def _event_families(events: EventSubscriber) -> Iterator[Metric]:
    trusted = GaugeMetricFamily(
        "warmroute_exact_index_trusted", "1 while an instance's exact index is trusted", labels=["instance"]
    )
    blocks = GaugeMetricFamily("warmroute_exact_index_blocks", "Blocks in its exact index", labels=["instance"])
    following = GaugeMetricFamily(
        "warmroute_kv_event_next_sequence", "Number of the batch expected next; -1: not known", labels=["instance"]
    )
    counters = {
        figure: CounterMetricFamily(name, text, labels=["instance"]) for figure, (name, text) in EVENT_COUNTERS.items()
    }
    for name in events.streams:
        figures = events.figures(name)
        trusted.add_metric([name], figures["trusted"])
        blocks.add_metric([name], figures["blocks"])
        following.add_metric([name], figures["next_sequence"])
        for figure, family in counters.items():
            family.add_metric([name], figures[figure])
    yield from (trusted, blocks, following, *counters.values())
