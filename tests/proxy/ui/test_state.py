"""Figures of the dashboard: seconds, windows, hand-offs, samples."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.ui.state import (
    INSTANCE_WINDOW_S,
    KEPT_S,
    SMOOTHING_S,
    FinishedRequest,
    RecentRequests,
    decisions,
    percentile,
    sample,
)


def finished(
    ended_s: float, *, first_ms: float | None = 100.0, total_ms: float = 1000.0, **more: Any
) -> FinishedRequest:
    stages = {"total": total_ms} | ({} if first_ms is None else {"first_byte": first_ms})
    fields: dict[str, Any] = {
        **{"request_id": f"r-{ended_s}", "outcome": "ok", "status": 200, "instance": "a", "request_class": "WARM"},
        **{"prompt_tokens": 1000, "actual_cached_tokens": 500, "stages_ms": stages},
        **more,
    }
    return FinishedRequest(arrived_unix_s=ended_s - total_ms / 1e3, **fields)


def test_a_second_is_charted_once_it_is_over() -> None:
    recent = RecentRequests()
    recent.add([finished(100.2), finished(100.9, first_ms=300.0), finished(101.1)])
    assert [(point["unix_s"], point["requests"]) for point in recent.advance(101.5)] == [(100, 2)]
    assert recent.advance(101.9) == []
    (point,) = recent.advance(102.0, {"in_flight": 7})
    assert point == {
        **{"unix_s": 101, "requests": 1, "failed": 0, "hit_rate": 0.5, "in_flight": 7},
        **{"first_byte_p50_ms": 100.0, "first_byte_p95_ms": 300.0, "total_p50_ms": 1000.0},
    }
    assert [point["unix_s"] for point in recent.points] == [100, 101]


def test_a_request_reported_late_counts_in_the_next_second() -> None:
    recent = RecentRequests()
    recent.add([finished(100.5)])
    recent.advance(101.0)
    recent.add([finished(100.7)])
    assert [(point["unix_s"], point["requests"]) for point in recent.advance(102.0)] == [(101, 1)]


def test_seconds_without_requests_are_charted_too() -> None:
    recent = RecentRequests()
    recent.add([finished(100.5)])
    points = recent.advance(100.0 + SMOOTHING_S + 3)
    assert [point["unix_s"] for point in points] == list(range(100, 100 + SMOOTHING_S + 3))
    assert points[SMOOTHING_S - 1]["first_byte_p50_ms"] == 100.0
    assert points[SMOOTHING_S]["first_byte_p50_ms"] is None
    assert points[SMOOTHING_S]["hit_rate"] is None


def test_memory_is_bounded_by_the_charts_length() -> None:
    recent = RecentRequests()
    recent.add([finished(100.5), finished(10_000.5)])
    recent.advance(10_001.0)
    assert len(recent.points) == KEPT_S
    for second in range(10_001, 10_001 + 2 * INSTANCE_WINDOW_S):
        recent.add([finished(second + 0.5)])
        recent.advance(second + 1.0)
    assert len(recent._seconds) <= INSTANCE_WINDOW_S
    assert len(recent.points) == KEPT_S


def test_instances_and_hand_offs_are_those_of_the_last_minute() -> None:
    recent = RecentRequests()
    recent.add(
        [
            finished(100.5, prefill_instance="b"),
            finished(100.6, outcome="upstream_error", first_ms=None, actual_cached_tokens=None),
            finished(101.5, prefill_instance="b", prompt_tokens=3000),
            finished(101.6, prefill_instance="c"),
            finished(101.7, instance=None, outcome="rejected", first_ms=None),
        ]
    )
    recent.advance(102.0)
    assert recent.flows() == [
        {"from": "b", "to": "a", "requests": 2, "tokens": 4000},
        {"from": "c", "to": "a", "requests": 1, "tokens": 1000},
    ]
    assert recent.by_instance() == {"a": {"finished": 4, "failed": 1, "hit_rate": 0.3, "first_byte_ms": 100.0}}
    recent.advance(101.0 + INSTANCE_WINDOW_S)
    assert recent.by_instance()["a"]["finished"] == 2
    assert recent.flows()[0] == {"from": "b", "to": "a", "requests": 1, "tokens": 3000}
    recent.advance(102.0 + INSTANCE_WINDOW_S)
    assert (recent.by_instance(), recent.flows()) == ({}, [])


def test_rows_may_come_in_any_order() -> None:
    recent = RecentRequests()
    recent.add([finished(103.0), finished(101.0)])
    recent.add([finished(102.0), finished(100.0)])
    assert [point["requests"] for point in recent.advance(104.0)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.95, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0), ([1.0, 2.0, 3.0, 4.0], 0.95, 4.0)],
)
def test_percentiles_are_values_that_occurred(values: list[float], share: float, expected: float | None) -> None:
    assert percentile(values, share) == expected


def test_a_sample_keeps_failures_order_and_its_limit() -> None:
    rows = [finished(float(at), outcome="upstream_error" if at in {3, 77} else "ok") for at in range(100)]
    chosen = sample(rows, 20)
    assert len(chosen) == 20
    assert [row.ended_unix_s for row in chosen] == sorted(row.ended_unix_s for row in chosen)
    assert [row.ended_unix_s for row in chosen if row.failed] == [3.0, 77.0]
    assert chosen[-1].ended_unix_s > 90
    failing = [finished(float(at), outcome="no_instance") for at in range(100)]
    assert [row.ended_unix_s for row in sample([*failing, *rows[:3]], 20)][-3:] == [0.0, 1.0, 2.0]
    assert sample(rows[:5], 20) == rows[:5]


def test_a_client_that_left_is_no_failure() -> None:
    assert not finished(1.0, outcome="client_gone").failed
    assert finished(1.0, outcome="upstream_error").failed


def test_decisions_have_what_the_stream_shows() -> None:
    (shown,) = decisions([finished(100.0, session_id="s", prefill_instance="b", reason="lowest_score")])
    assert (shown["session_id"], shown["class"], shown["prefill_instance"], shown["instance"]) == (
        "s",
        "WARM",
        "b",
        "a",
    )
    assert (shown["ended_unix_s"], shown["first_byte_ms"], shown["total_ms"]) == (100.0, 100.0, 1000.0)


def test_mistakes_of_clients_are_no_failures() -> None:
    outcomes = ("ok", "rejected", "engine_refused", "client_gone", "shutdown", "stream_broken", "no_instance")
    assert [each for each in outcomes if finished(1.0, outcome=each).failed] == ["stream_broken", "no_instance"]
