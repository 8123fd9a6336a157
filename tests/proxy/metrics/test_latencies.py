"""Latency histograms: per instance, per output token, and under OpenTelemetry's names."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from policies.row import RequestOutcome, Row
from policies.types import Decision, OffloadPlan, OffloadReason, Reason, RequestClass
from proxy.metrics.exporter import Metrics
from proxy.metrics.latencies import LatencyHistograms
from tests.proxy.conftest import StartProxy

BODY = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}


def finished(endpoint: str = "/v1/completions", **fields: object) -> Row:
    row = Row("r", endpoint, 1.0, stream=True, outcome=RequestOutcome.OK, completion_tokens=11)
    row.stages_ms.update(first_byte=200.0, total=1200.0)
    for name, value in fields.items():
        setattr(row, name, value)
    return row


def sums(*rows: Row, forgotten: str | None = None) -> dict[str, float]:
    """Sum of every series after these requests on instance ``a``."""
    registry = CollectorRegistry()
    latencies = LatencyHistograms(registry)
    for row in rows:
        latencies.record(row, "a", RequestClass.WARM)
    if forgotten is not None:
        latencies.forget(forgotten)
    found = {}
    for line in generate_latest(registry).decode().splitlines():
        name, _, value = line.rpartition(" ")
        if "_sum" in name:
            found[name.replace("_seconds_sum", "")] = float(value)
    return found


def test_a_stream_counts_its_first_byte_and_its_time_per_output_token() -> None:
    assert sums(finished()) == {
        'warmroute_instance_first_byte{instance="a"}': 0.2,
        'warmroute_instance_request{instance="a"}': 1.2,
        'warmroute_output_token{request_class="WARM"}': 0.1,
        'gen_ai_server_time_to_first_token{gen_ai_operation_name="text_completion"}': 0.2,
        'gen_ai_server_time_per_output_token{gen_ai_operation_name="text_completion"}': 0.1,
        'gen_ai_server_request_duration{error_type="",gen_ai_operation_name="text_completion"}': 1.2,
    }


@pytest.mark.parametrize(
    "row", [finished(stream=False), finished(completion_tokens=1), finished(completion_tokens=None)]
)
def test_without_two_tokens_of_a_stream_there_is_no_time_per_token(row: Row) -> None:
    found = sums(row)
    assert 'warmroute_instance_request{instance="a"}' in found
    assert not [name for name in found if "output_token" in name]
    assert ('warmroute_instance_first_byte{instance="a"}' in found) is row.stream


def test_a_failed_request_has_a_duration_with_its_outcome_only() -> None:
    failed = finished("/v1/chat/completions", outcome=RequestOutcome.UPSTREAM_ERROR)
    assert sums(failed) == {
        'gen_ai_server_request_duration{error_type="upstream_error",gen_ai_operation_name="chat"}': 1.2
    }
    assert sums(finished(stages_ms={})) == {}


def test_series_of_an_instance_go_with_it() -> None:
    assert not [name for name in sums(finished(), forgotten="a") if "instance=" in name]
    assert [name for name in sums(finished(), forgotten="b") if "instance=" in name]


async def test_a_served_stream_is_in_all_of_them_and_the_process_has_its_own(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.status_code == 200
    text = (await proxy.client.get("/metrics")).text
    for series in (
        'warmroute_instance_first_byte_seconds_count{instance="inst-0"} 1.0',
        'warmroute_instance_request_seconds_count{instance="inst-0"} 1.0',
        'warmroute_output_token_seconds_count{request_class="WARM"} 1.0',
        'gen_ai_server_time_to_first_token_seconds_count{gen_ai_operation_name="text_completion"} 1.0',
        'gen_ai_server_time_per_output_token_seconds_count{gen_ai_operation_name="text_completion"} 1.0',
    ):
        assert series in text.splitlines()
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert f"\n{name} " in text


def ratios(*rows: Row) -> dict[str, float]:
    """Sum of the ratios to predicted first tokens by instance."""
    metrics = Metrics()
    for row in rows:
        metrics.record(row)
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "warmroute_instance_first_token_actual_to_predicted_ratio_sum":
                found[sample.labels["instance"]] = sample.value
    return found


def decided(decode_on: str) -> Decision:
    plan = OffloadPlan(None, OffloadReason.PLANNER_NEVER)
    return Decision("r", decode_on, None, RequestClass.WARM, Reason.LOWEST_SCORE, plan, (), "warm", 600, 512)


def timed(leg: str, predicted_s: float, actual_s: float, **fields: Any) -> Row:
    row = finished(decision=decided("d"), **fields)
    row.note_leg(leg, predicted_s, actual_s)
    return row


def test_first_tokens_are_compared_with_their_predictions_by_the_instance_that_prefilled() -> None:
    assert ratios(
        timed("first_token", 0.1, 5.0),
        timed("first_token", 0.1, 0.2),
        timed("prefill", 1.0, 3.0, prefill_instance="p"),
        timed("transfer", 1.0, 9.0, prefill_instance="p"),
    ) == pytest.approx({"d": 52.0, "p": 3.0})


def test_a_first_token_is_not_counted_where_its_instance_is_not_known() -> None:
    fell_back, continued = timed("prefill", 1.0, 3.0), timed("first_token", 1.0, 3.0, resume="resumed")
    assert ratios(fell_back, continued, timed("first_token", 0.0, 3.0)) == {}
