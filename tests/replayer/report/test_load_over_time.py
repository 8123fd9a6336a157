"""Load over time, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.records.runs import RequestRecord
from replayer.report.load_over_time import imbalance, load_over_time, mean_level, over_time


def record(
    instance: str | None, sent: float, first: float | None, finished: float | None, **more: Any
) -> RequestRecord:
    values: dict[str, Any] = {"prompt_tokens": 100, "cached_tokens": 40, "ok": True}
    return RequestRecord(
        request_id="r",
        session_id="s",
        turn=1,
        chat_id=0,
        trace_timestamp_s=0.0,
        scheduled_s=sent,
        sent_s=sent,
        first_token_s=first,
        finished_s=finished,
        instance=instance,
        **{**values, **more},
    )


def test_by_hand() -> None:
    found = load_over_time([record("a", 0, 5, 10), record("b", 5, 6, 10)], bins=2)
    assert found is not None
    assert found.instances == ["a", "b"]
    assert found.edges_s.tolist() == [0, 5, 10]
    assert found.bin_s == 5
    assert found.requests.tolist() == [[1, 1], [0, 1]]
    assert np.allclose(found.pending_tokens, [[60, 0], [0, 12]])
    largest, variation = over_time(found.requests)
    assert largest.tolist() == [2, 1]
    assert variation.tolist() == [1, 0]
    # Weights 1/2 and 1: the busy half counts twice.
    assert imbalance(found.requests).largest_over_mean == pytest.approx((2 * 0.5 + 1 * 1) / 1.5)
    assert imbalance(found.requests).coefficient_of_variation == pytest.approx((1 * 0.5 + 0 * 1) / 1.5)


def test_instances_that_served_nothing_make_it_uneven() -> None:
    found = load_over_time([record("a", 0, 1, 4)], instances=["a", "b", "c", "d"], bins=4)
    assert found is not None
    assert found.requests.shape == (4, 4)
    assert imbalance(found.requests).largest_over_mean == 4
    assert imbalance(found.requests).coefficient_of_variation == pytest.approx(np.sqrt(3))


def test_an_offloaded_prompt_is_pending_where_it_is_computed() -> None:
    found = load_over_time([record("d", 0, 2, 4, prefill_instance="p")], bins=2)
    assert found is not None
    assert found.instances == ["d", "p"]
    assert found.requests.tolist() == [[1, 1], [0, 0]]
    assert found.pending_tokens.tolist() == [[0, 0], [60, 0]]


def test_a_failed_request_is_in_flight_and_computes_nothing_known() -> None:
    failed = record("a", 0, None, 4, ok=False, prompt_tokens=None, cached_tokens=None)
    found = load_over_time([failed], bins=2)
    assert found is not None
    assert found.requests.tolist() == [[1, 1]]
    assert found.pending_tokens.tolist() == [[0, 0]]


def test_nothing_known_is_none_and_no_load_has_no_imbalance() -> None:
    assert load_over_time([record(None, 0, 1, 2), record("a", 0, 1, None)]) is None
    assert np.isnan(imbalance(np.zeros((3, 4))).largest_over_mean)


SPANS = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0, 1e5)), min_size=1, max_size=20)


@given(SPANS, st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_no_load_is_lost_between_bins(spans: list[tuple[float, float, float]], bins: int) -> None:
    spans = [(min(a, b), max(a, b), height) for a, b, height in spans]
    edges = np.linspace(0, 50, bins + 1)
    level = mean_level(spans, edges)
    area = sum((end - begin) * height for begin, end, height in spans)
    assert float(level.sum() * 50 / bins) == pytest.approx(area, rel=1e-6, abs=1e-3)
    assert (level >= 0).all()
