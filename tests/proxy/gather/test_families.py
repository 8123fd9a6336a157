"""Metric families of several workers become one exposition."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from proxy.gather.families import (
    GAUGES,
    GaugeRule,
    MetricFamily,
    decode_families,
    encode_families,
    exposition,
    families_of,
    merged,
)
from proxy.gather.restarts import restarts
from proxy.sharing.frames import WorkerStanding
from tests.proxy.metrics.reference import families, proxy_registry


def test_every_gauge_has_a_rule_and_every_rule_a_gauge() -> None:
    gauges = {family.name for family, _ in families(proxy_registry()) if family.type == "gauge"}
    assert gauges == set(GAUGES)


def test_every_other_metric_adds_up() -> None:
    kinds = {family.type for family, _ in families(proxy_registry())}
    assert kinds == {"gauge", "counter", "histogram", "summary"}
    assert all(MetricFamily("x", kind, "", []).adds_up for kind in kinds - {"gauge"})


def registry(requests: int, healthy: int, seconds: float) -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("warmroute_requests", "requests", ["instance"], registry=made).labels("a").inc(requests)
    Gauge("warmroute_in_flight", "in flight", registry=made).set(requests)
    Gauge("warmroute_instance_healthy", "healthy", ["instance"], registry=made).labels("a").set(healthy)
    Gauge("warmroute_instance_sessions", "sessions", ["instance"], registry=made).labels("a").set(7)
    Histogram("warmroute_request_seconds", "seconds", buckets=(1, 10), registry=made).observe(seconds)
    return made


def test_counters_and_histograms_are_summed_and_gauges_follow_their_rule() -> None:
    parts = [list(families_of(each.collect())) for each in (registry(3, 1, 0.5), registry(4, 0, 5.0))]
    text = exposition(merged([decode_families(encode_families(part)) for part in parts]).values()).decode()
    values = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["warmroute_requests_total", None] == 7
    assert values["warmroute_in_flight", None] == 7
    assert values["warmroute_instance_healthy", None] == 0
    assert values["warmroute_instance_sessions", None] == 7
    assert values["warmroute_request_seconds_bucket", "1.0"] == 1
    assert values["warmroute_request_seconds_bucket", "+Inf"] == 2
    assert values["warmroute_request_seconds_sum", None] == 5.5


@pytest.mark.parametrize(
    ("rule", "value"),
    [(GaugeRule.SUM, 4.0), (GaugeRule.LARGEST, 3.0), (GaugeRule.SMALLEST, 1.0), (GaugeRule.MEAN, 2.0)],
)
def test_a_gauge_rule_makes_one_value(rule: GaugeRule, value: float) -> None:
    name = next(name for name, of_name in GAUGES.items() if of_name is rule)
    parts = [[MetricFamily(name, "gauge", "", [(name, (), each)])] for each in (1.0, 3.0)]
    assert merged(parts)[name].samples == [(name, (), value)]


def test_a_series_of_one_worker_alone_is_kept() -> None:
    one = MetricFamily("warmroute_requests", "counter", "", [("warmroute_requests_total", (("instance", "a"),), 1.0)])
    other = MetricFamily("warmroute_requests", "counter", "", [("warmroute_requests_total", (("instance", "b"),), 2.0)])
    samples = merged([[one], [other]])["warmroute_requests"].samples
    assert {labels: value for _, labels, value in samples} == {(("instance", "a"),): 1.0, (("instance", "b"),): 2.0}


def test_restarts_are_counted_by_worker_and_reason() -> None:
    roster = [
        WorkerStanding(0, 11, True, True, 0, 0.0, None),
        WorkerStanding(1, 12, True, True, 3, 0.0, "(process 9) showed no life for 60 s and was killed", 2),
    ]
    text = exposition(families_of([restarts(roster)])).decode()
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'warmroute_worker_restarts_total{reason="hung",worker="0"} 0.0',
        'warmroute_worker_restarts_total{reason="ended",worker="0"} 0.0',
        'warmroute_worker_restarts_total{reason="hung",worker="1"} 2.0',
        'warmroute_worker_restarts_total{reason="ended",worker="1"} 1.0',
    ]
