"""Finished requests wait to be encoded and counted; whoever reads them gets all that have ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from policies.row import RequestOutcome, Row
from proxy.breakdown import Breakdown
from proxy.metrics.exporter import Metrics
from proxy.records.filters import RowFilter
from proxy.tracing.request_trace import RequestTrace, trace_id


def ended(request_id: str, **fields: Any) -> Row:
    return Row(request_id, "/v1/completions", 1.0, outcome=RequestOutcome.OK, status=200, prompt_tokens=5, **fields)


def opened(path: Path | None = None, loop: asyncio.AbstractEventLoop | None = None) -> Breakdown:
    breakdown = Breakdown(100, path)
    breakdown.open(loop or asyncio.get_running_loop())
    return breakdown


def end(breakdown: Breakdown, request_id: str, **fields: Any) -> None:
    breakdown.close_row(breakdown.open_row(ended(request_id, **fields)))


async def test_every_reader_gets_rows_that_have_just_ended() -> None:
    breakdown = opened()
    end(breakdown, "r1")
    assert [row["request_id"] for row in breakdown.select(10)] == ["r1"]
    end(breakdown, "r2")
    assert [number for number, _ in breakdown.after(1, 10)] == [2]
    end(breakdown, "r3")
    assert [number for number, _ in (await breakdown.page(10, RowFilter({}))).rows] == [1, 2, 3]
    assert breakdown.outcomes == {"ok": 3}
    breakdown.close()


async def test_rows_reach_the_file_although_no_other_request_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    breakdown = opened(path)
    end(breakdown, "r1")
    for _ in range(400):
        if path.read_bytes():
            break
        await asyncio.sleep(0.02)
    assert json.loads(path.read_bytes())["request_id"] == "r1"
    breakdown.close()


async def test_the_last_rows_are_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    breakdown = opened(path)
    for number in range(3):
        end(breakdown, f"r{number}")
    breakdown.close()
    assert len(path.read_bytes().splitlines()) == 3


async def test_the_row_of_a_trace_is_encoded_before_its_spans() -> None:
    breakdown, trace = opened(), RequestTrace(trace_id(), 1, None, 0.0)
    end(breakdown, "r1", trace=trace)
    assert trace.scores == b"[]"
    breakdown.close()


async def test_a_subscriber_gets_no_row_that_ended_before_and_later_ones_at_once() -> None:
    breakdown = opened()
    end(breakdown, "before")
    async with breakdown.subscribe() as rows:
        end(breakdown, "after")
        assert [json.loads(line)["request_id"] for _, line in rows.take()] == ["after"]
    breakdown.close()


def test_without_an_event_loop_no_row_waits_and_a_lost_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    breakdown = Breakdown(100)
    breakdown.open()
    end(breakdown, "bad", stages_ms={"total": "no number"})
    assert "the row of request bad is lost" in caplog.text


def test_metrics_have_every_request_that_has_ended() -> None:
    metrics = Metrics()
    for number in range(1, 40):
        metrics.record(ended(f"r{number}"))
        labels = {"instance": "", "outcome": "ok"}
        assert metrics.registry.get_sample_value("warmroute_requests_total", labels) == number


def test_a_request_that_cannot_be_counted_is_logged_when_the_metrics_are_read(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.record(ended("bad", tenant=["no name"]))
    assert metrics.registry.get_sample_value("warmroute_requests_total", {"instance": "", "outcome": "ok"}) == 1
    assert "request bad could not be counted" in caplog.text
