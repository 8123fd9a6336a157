"""Export of traces: a collector that fails, is slow or absent never affects requests, and every loss is counted."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from policies.row import RequestOutcome, Row
from proxy.settings import TracingSettings
from proxy.tracing.destination import destination
from proxy.tracing.exporter import TraceExporter, TraceResult
from proxy.tracing.request_trace import RequestTrace, trace_id
from tests.proxy.conftest import StartProxy
from tests.proxy.tracing.receiver import TraceReceiver, trace_receiver

BODY = {"model": "stub", "prompt": list(range(200)), "max_tokens": 4}


def exporter_to(url: str, **more: Any) -> TraceExporter:
    settings = TracingSettings(endpoint=url, **{"interval_s": 0.05, "timeout_s": 20.0, **more})
    return TraceExporter(settings, destination(settings, {}))


def finished() -> tuple[Row, RequestTrace]:
    row = Row("r", "/v1/completions", time.time(), outcome=RequestOutcome.OK)
    return row, RequestTrace(trace_id(), 1, None, time.perf_counter())


async def until(exporter: TraceExporter, result: TraceResult, count: int) -> None:
    for _ in range(1000):
        if exporter.results[result] >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(exporter.results)


async def test_headers_and_batches_reach_the_collector() -> None:
    async with trace_receiver() as receiver:
        settings = TracingSettings.model_validate({"endpoint": receiver.url, "headers": {"Api-Key": "k"}})
        exporter = TraceExporter(settings, destination(settings, {}))
        for _ in range(600):
            exporter.put(*finished())
        exporter.open()
        await exporter.close()
        assert exporter.results[TraceResult.EXPORTED] == len(receiver.spans) == 600
        assert receiver.posts == 3
        assert receiver.headers[0]["api-key"] == "k"
        assert receiver.headers[0]["content-type"] == "application/x-protobuf"


async def test_more_requests_than_the_queue_has_room_for_are_counted_as_lost() -> None:
    async with trace_receiver() as receiver:
        exporter = exporter_to(receiver.url, queue_size=5)
        for _ in range(8):
            exporter.put(*finished())
        exporter.open()
        await exporter.close()
    assert exporter.results[TraceResult.QUEUE_FULL] == 3
    assert exporter.results[TraceResult.EXPORTED] == len(receiver.spans) == 5


async def test_a_busy_collector_is_asked_again_and_one_that_refuses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.tracing.exporter._BACKOFF_S", (0.05, 0.05))
    async with trace_receiver(status=503) as receiver:
        exporter = exporter_to(receiver.url)
        exporter.open()
        exporter.put(*finished())
        await until(exporter, TraceResult.EXPORT_FAILED, 1)
        assert receiver.posts == 3
        receiver.status = 400
        exporter.put(*finished())
        await until(exporter, TraceResult.EXPORT_FAILED, 2)
        assert receiver.posts == 4
        receiver.status = 200
        exporter.put(*finished())
        await until(exporter, TraceResult.EXPORTED, 1)
        await exporter.close()


@pytest.mark.parametrize("hangs", [False, True])
async def test_closing_is_bounded_and_counts_what_is_lost(hangs: bool) -> None:
    async with trace_receiver(hangs=hangs, status=503) as receiver:
        exporter = exporter_to(receiver.url, timeout_s=0.3, queue_size=2000)
        for _ in range(700):
            exporter.put(*finished())
        exporter.open()
        async with asyncio.timeout(20):
            await exporter.close()
    assert exporter.results[TraceResult.EXPORT_FAILED] == 700


async def test_a_request_whose_spans_cannot_be_made_is_lost_alone() -> None:
    async with trace_receiver() as receiver:
        exporter = exporter_to(receiver.url)
        row, trace = finished()
        trace.model = 7  # type: ignore[assignment]
        exporter.put(row, trace)
        exporter.put(*finished())
        exporter.open()
        await exporter.close()
    assert (exporter.results[TraceResult.NOT_ENCODED], exporter.results[TraceResult.EXPORTED]) == (1, 1)


async def test_requests_are_served_without_a_collector_and_the_loss_is_a_metric(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.tracing.exporter._BACKOFF_S", (0.01, 0.01))
    async with trace_receiver() as gone:
        url = gone.url
    tracing = {"enabled": True, "endpoint": url, "sample_ratio": 1, "interval_s": 0.05}
    proxy = await start_proxy(1, tracing=tracing)
    for _ in range(3):
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    await proxy.until(lambda: proxy.core.tracing.results[TraceResult.EXPORT_FAILED] == 3)
    text = (await proxy.client.get("/metrics")).text
    assert re.search(r'^warmroute_traces_total\{result="export_failed"\} 3\.0$', text, re.MULTILINE)


async def test_a_trace_that_waits_at_shutdown_is_exported(start_proxy: StartProxy) -> None:
    async with trace_receiver() as receiver:
        tracing = {"enabled": True, "endpoint": receiver.url, "sample_ratio": 1, "interval_s": 60}
        proxy = await start_proxy(1, tracing=tracing)
        await proxy.client.post("/v1/completions", json=BODY)
        await proxy.settled()
        assert receiver.spans == []
        await proxy.core.tracing.close()
        assert_received(receiver)


def assert_received(receiver: TraceReceiver) -> None:
    assert receiver.root().attributes["warmroute.outcome"] == "ok"
