"""Metrics of the instances, collected at scrape time: the series of a removed instance disappear."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.events.subscriber import EventSubscriber
from proxy.fleet.instances import Instances
from proxy.routing.router import Router

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
    """Exports the families set by the last scrape."""

    def __init__(self) -> None:
        self.families: Iterable[Metric] = tuple(empty_families())

    def collect(self) -> Iterable[Metric]:
        """Return ``families``."""
        return self.families


_GAUGES = {
    "healthy": "1 if probes and breaker let the instance be sent requests; draining is apart",
    "draining": "1 while it is drained: it gets no new requests because an operator asked for that",
    "recycle_wanted": "1 if the instance should be restarted",
    "requests": "Requests in flight, P legs included",
    "pending_prefill_tokens": "New tokens of requests without a first token",
    "decoding_tokens": "Context tokens of requests past their first token",
    "recent_tokens": "New tokens assigned recently, decayed",
    "sessions": "Sessions pinned to the instance",
    "index_blocks": "Blocks in the shadow index of the instance",
    "kv_usage_ratio": "Share of the KV pool in use, as last reported",
    "slowness_ratio": "Learned time of a prefill over that on the middle instance; no sample while all count as equal",
}


def empty_families() -> Iterator[Metric]:
    """Every family without samples."""
    yield from _gauges().values()
    yield _specialists()
    gauges, counters = _event_families()
    yield from (*gauges.values(), *counters.values(), _short_step())


def instance_families(router: Router, instances: Instances, events: EventSubscriber, now_s: float) -> Iterator[Metric]:
    """Health, load and KV events of every instance, one family for each figure."""
    gauges = _gauges()
    for instance in instances:
        name = instance.name
        load = router.state.ledger.load(name, now_s)
        for figure, value in (
            ("healthy", instance.healthy),
            ("draining", instance.draining),
            ("recycle_wanted", instance.recycle_wanted is not None),
            ("requests", load.requests),
            ("pending_prefill_tokens", load.pending_prefill_tokens),
            ("decoding_tokens", load.decoding_tokens),
            ("recent_tokens", load.recent_tokens),
            ("sessions", router.state.sessions.count(name)),
            ("index_blocks", router.state.index.blocks(name)),
            ("kv_usage_ratio", instance.reported.kv_usage),
            ("slowness_ratio", router.state.costs.slowness.measured.get(name)),
        ):
            if value is not None:
                gauges[figure].add_metric([name], float(value))
    yield from gauges.values()
    specialists = _specialists()
    specialists.add_metric([], len(router.state.specialists.names))
    yield specialists
    short_step, learned = _short_step(), router.state.costs.steps.short_step
    if learned.known:
        short_step.add_metric([], learned.seconds)
    yield short_step
    readings, counters = _event_families()
    for name in events.streams:
        figures = events.figures(name)
        for figure, gauge in readings.items():
            gauge.add_metric([name], figures[figure])
        for figure, counter in counters.items():
            counter.add_metric([name], figures[figure])
    yield from (*readings.values(), *counters.values())


def _gauges() -> dict[str, GaugeMetricFamily]:
    return {
        figure: GaugeMetricFamily(f"warmroute_instance_{figure}", text, labels=["instance"])
        for figure, text in _GAUGES.items()
    }


def _specialists() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "warmroute_prefill_specialists", "Instances designated for long prefills; only joint sends requests by it"
    )


def _short_step() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "warmroute_short_prefill_step_seconds",
        "Learned time that a step with a short prefill takes longer than one without; no sample until it is known",
    )


def _event_families() -> tuple[dict[str, GaugeMetricFamily], dict[str, CounterMetricFamily]]:
    gauges = {
        "trusted": ("warmroute_exact_index_trusted", "1 while the exact index of the instance is used"),
        "blocks": ("warmroute_exact_index_blocks", "Blocks in the exact index of the instance"),
        "next_sequence": ("warmroute_kv_event_next_sequence", "Number of the next expected batch; -1: unknown"),
    }
    return (
        {figure: GaugeMetricFamily(name, text, labels=["instance"]) for figure, (name, text) in gauges.items()},
        {
            figure: CounterMetricFamily(name, text, labels=["instance"])
            for figure, (name, text) in EVENT_COUNTERS.items()
        },
    )
