"""Metric families of several workers merged into one exposition.

Counters, histograms and summaries are sums. A gauge has a rule of its own (``GAUGES``), since some figures are parts of
a whole and others are the same fact, read by each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from types import MappingProxyType

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]


class GaugeRule(StrEnum):
    """Rule that makes one value of a gauge's values of the workers."""

    SUM = "sum"
    """Each worker has a part."""
    LARGEST = "largest"
    """Workers read the same fact; the largest figure is the newest, or the worst."""
    SMALLEST = "smallest"
    """A state is good if it is with every worker; a bound is the tightest."""
    MEAN = "mean"
    """A ratio that each worker has of its own requests."""


_RULES = {
    GaugeRule.SUM: (
        *("process_open_fds", "process_resident_memory_bytes", "process_virtual_memory_bytes"),
        *("warmroute_breakdown_subscribers", "warmroute_client_connections", "warmroute_compared_conversations"),
        *("warmroute_held_requests", "warmroute_in_flight", "warmroute_queue_requests", "warmroute_retry_budget"),
        *("warmroute_instance_decoding_tokens", "warmroute_instance_pending_prefill_tokens"),
        *("warmroute_instance_recent_tokens", "warmroute_instance_requests", "warmroute_request_body_bytes"),
        *("warmroute_tenant_in_flight_tokens", "warmroute_tenant_waiting_requests"),
    ),
    GaugeRule.LARGEST: (
        *("warmroute_breakdown_file_failing", "warmroute_discovery_instances", "warmroute_discovery_left_out"),
        *("warmroute_event_loop_late_seconds", "warmroute_exact_index_blocks", "warmroute_instance_breaker"),
        *("warmroute_instance_engine_running_requests", "warmroute_instance_engine_waiting_requests"),
        *("warmroute_instance_draining", "warmroute_instance_index_blocks", "warmroute_instance_kv_usage_ratio"),
        *("warmroute_instance_prediction_error_ratio", "warmroute_instance_recycle_wanted"),
        *("warmroute_instance_sessions", "warmroute_instance_transfer_error_ratio"),
        *("warmroute_kv_event_next_sequence", "warmroute_pool_tokens", "warmroute_recomputation_ratio"),
        *("warmroute_shadow_paused", "warmroute_shared_state_delay_seconds", "warmroute_shared_state_replicas"),
        *("warmroute_prefill_specialists", "warmroute_working_set_tokens"),
    ),
    GaugeRule.SMALLEST: (
        *("process_max_fds", "process_start_time_seconds", "warmroute_condition"),
        *("warmroute_discovery_last_read_timestamp_seconds", "warmroute_exact_index_trusted"),
        *("warmroute_instance_healthy", "warmroute_shared_state_linked"),
        "warmroute_tls_certificate_not_after_timestamp_seconds",
    ),
    GaugeRule.MEAN: (
        *("warmroute_hit_loss_ratio", "warmroute_hit_ratio", "warmroute_instance_slowness_ratio"),
        "warmroute_short_prefill_step_seconds",
    ),
}
GAUGES = MappingProxyType({name: rule for rule, names in _RULES.items() for name in names})
"""Name of a gauge -> its rule; every gauge of the proxy is here."""


class MetricFamily(msgspec.Struct, array_like=True):
    """One metric with its samples: name, labels and value of each."""

    name: str
    kind: str
    documentation: str
    samples: list[tuple[str, Labels, float]]

    @property
    def adds_up(self) -> bool:
        """True if its samples count what has happened, so that those of an ended process stay counted."""
        return self.kind in {"counter", "histogram", "summary"}


class ProcessFamilies(msgspec.Struct, array_like=True, frozen=True):
    """Families of one process."""

    pid: int
    families: list[MetricFamily]


MergedFamilies = dict[str, MetricFamily]
"""Families by name, in the order of the first worker."""

_decoder = msgspec.msgpack.Decoder(list[MetricFamily])
_part_decoder = msgspec.msgpack.Decoder(ProcessFamilies)


def families_of(metrics: Iterable[Metric]) -> Iterator[MetricFamily]:
    """Families as the client library collects them."""
    for metric in metrics:
        samples = [(each.name, tuple(each.labels.items()), float(each.value)) for each in metric.samples]
        yield MetricFamily(metric.name, metric.type, metric.documentation, samples)


def encode_families(families: Iterable[MetricFamily]) -> bytes:
    """Encode families for another process."""
    return msgspec.msgpack.encode(list(families))


def decode_families(raw: bytes) -> list[MetricFamily]:
    """Decode families; none for no bytes. Raises msgspec.MsgspecError."""
    return _decoder.decode(raw) if raw else []


def encode_part(pid: int, families: Iterable[MetricFamily]) -> bytes:
    """Encode the families of a process."""
    return msgspec.msgpack.encode(ProcessFamilies(pid, list(families)))


def decode_part(raw: bytes) -> ProcessFamilies:
    """Decode the families of a process. Raises msgspec.MsgspecError."""
    return _part_decoder.decode(raw)


def merged(parts: Sequence[Iterable[MetricFamily]]) -> MergedFamilies:
    """Merge the families of several processes; the order of ``parts`` decides that of families and samples only."""
    found: MergedFamilies = {}
    values: dict[str, dict[tuple[str, Labels], list[float]]] = {}
    for part in parts:
        for family in part:
            found.setdefault(family.name, MetricFamily(family.name, family.kind, family.documentation, []))
            of_family = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                of_family.setdefault((name, labels), []).append(value)
    for name, family in found.items():
        rule = GaugeRule.SUM if family.adds_up else GAUGES.get(name, GaugeRule.LARGEST)
        family.samples = [
            (sample, labels, _one(GaugeRule.SMALLEST if sample.endswith("_created") else rule, each))
            for (sample, labels), each in values[name].items()
        ]
    return found


def exposition(families: Iterable[MetricFamily]) -> bytes:
    """The text that Prometheus reads."""
    return generate_latest(_Merged(families))


class _Merged(Collector):
    """Stands for a registry: ``generate_latest`` uses its ``collect`` only."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


def _one(rule: GaugeRule, values: Sequence[float]) -> float:
    if rule is GaugeRule.SUM:
        return sum(values)
    if rule is GaugeRule.MEAN:
        return sum(values) / len(values)
    return max(values) if rule is GaugeRule.LARGEST else min(values)
