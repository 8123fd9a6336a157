"""Hit-rate anatomy on traces made by hand, every loss alone, and that the parts always add up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.records.runs import RequestRecord
from replayer.report.anatomy import Anatomy, TracePaths, anatomy, total
from replayer.traces.trace import Trace, TraceRequest

BLOCK = 10


def trace_of(prompts: list[str]) -> Trace:
    """A request for each word: a block of ten tokens for each letter."""
    ids: dict[str, int] = {}
    return Trace(
        block_tokens=BLOCK,
        requests=[
            TraceRequest(
                chat_id=number,
                session_id=f"s{number}",
                timestamp_s=float(number),
                input_length=BLOCK * len(word),
                output_length=1,
                hash_ids=[ids.setdefault(word[: end + 1], len(ids)) for end in range(len(word))],
            )
            for number, word in enumerate(prompts)
        ],
    )


def record(number: int, word: str, instance: str | None, cached: int | None, **more: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": f"r{number}",
        "session_id": f"s{number}",
        "turn": 1,
        "chat_id": number,
        "trace_timestamp_s": float(number),
        "scheduled_s": float(number),
        "sent_s": float(number),
        "prompt_tokens": BLOCK * len(word),
        "cached_tokens": cached,
        "instance": instance,
        "ok": True,
    }
    return RequestRecord(**{**values, **more})


def anatomy_of(*requests: tuple[str, str, int], **options: Any) -> Anatomy:
    """(word, instance, cached tokens reported) in the order in which they were sent."""
    records = [record(number, word, place, cached) for number, (word, place, cached) in enumerate(requests)]
    return anatomy(TracePaths(trace_of([word for word, _, _ in requests])), records, **options)


def losses(found: Anatomy) -> dict[str, int]:
    return {part.name: part.tokens for part in found.losses}


def test_nothing_is_lost_where_a_prompt_comes_back_to_its_instance() -> None:
    found = anatomy_of(("abcd", "i0", 0), ("abcd", "i0", 40), capacity_tokens=1000)
    assert losses(found) == {"eviction": 0, "routing": 0, "not delivered": 0}
    assert found.tokens.prompt == 80
    assert found.tokens.ideal_infinite == found.tokens.routed_finite == found.tokens.actual == 40


def test_routing_alone() -> None:
    found = anatomy_of(("abcd", "i0", 0), ("abcx", "i1", 0), capacity_tokens=1000)
    assert losses(found) == {"eviction": 0, "routing": 30, "not delivered": 0}
    tokens = found.tokens
    assert (tokens.ideal_infinite, tokens.best_placed, tokens.routed_infinite, tokens.routed_finite) == (30, 30, 0, 0)
    assert tokens.ideal_finite == 30


def test_eviction_alone() -> None:
    found = anatomy_of(("ab", "i0", 0), ("cd", "i0", 0), ("ab", "i0", 0), capacity_tokens=2 * BLOCK)
    assert losses(found) == {"eviction": 20, "routing": 0, "not delivered": 0}
    assert (found.tokens.routed_infinite, found.tokens.ideal_finite) == (20, 0)


def test_an_idle_instance_counts_for_the_capacity_of_the_fleet() -> None:
    requests = (("ab", "i0", 0), ("cd", "i0", 0), ("ab", "i0", 0))
    found = anatomy_of(*requests, capacity_tokens=2 * BLOCK, instances=["i0", "i1"])
    assert losses(found)["eviction"] == 20
    assert found.tokens.ideal_finite == 20
    assert found.instances == 2


def test_eviction_forgets_the_end_of_a_prompt_first() -> None:
    found = anatomy_of(("abcd", "i0", 0), ("x", "i0", 0), ("abcd", "i0", 30), capacity_tokens=4 * BLOCK)
    assert losses(found) == {"eviction": 10, "routing": 0, "not delivered": 0}


def test_not_delivered_alone_and_more_delivered_than_the_model_holds() -> None:
    short = anatomy_of(("abcd", "i0", 0), ("abcd", "i0", 5), capacity_tokens=1000)
    assert losses(short) == {"eviction": 0, "routing": 0, "not delivered": 35}
    more = anatomy_of(("abcd", "i0", 0), ("abcx", "i0", 36), capacity_tokens=1000)
    assert losses(more) == {"eviction": 0, "routing": 0, "not delivered": -6}


@pytest.mark.parametrize(
    ("believed", "known", "unknown"),
    [
        ({"i0": 40, "i1": 0}, 40, 0),
        ({"i0": 0, "i1": 0}, 0, 40),
        ({"i0": 15, "i1": 5}, 10, 30),
        ({"i0": 40, "i1": 40}, 0, 40),
        ({"i0": 500, "i1": 0}, 40, 0),
    ],
)
def test_what_the_router_predicted_divides_the_routing_loss(
    believed: dict[str, float], known: int, unknown: int
) -> None:
    beliefs = {"r0": {"i0": 0.0, "i1": 0.0}, "r1": believed}
    found = anatomy_of(("abcd", "i0", 0), ("abcd", "i1", 0), capacity_tokens=1000, beliefs=beliefs)
    assert losses(found) == {
        "eviction": 0,
        "routing, knowingly": known,
        "routing, prediction error": unknown,
        "not delivered": 0,
    }


def test_a_request_without_predictions_is_distinguished() -> None:
    beliefs = {"r0": {"i0": 0.0, "i1": 0.0}}
    found = anatomy_of(("abcd", "i0", 0), ("abcd", "i1", 0), capacity_tokens=1000, beliefs=beliefs)
    assert losses(found)["routing, belief not recorded"] == 40
    assert any("the split" in why for why in anatomy_of(("a", "i0", 0)).left_out)


def test_what_was_promised_and_not_there_is_counted_beside_the_loss() -> None:
    paths = TracePaths(trace_of(["abcd", "abcd"]))
    records = [
        record(0, "abcd", "i0", 0, predicted_cached_tokens=12),
        record(1, "abcd", "i0", 40, predicted_cached_tokens=33),
    ]
    found = anatomy(paths, records, capacity_tokens=1000)
    assert (found.tokens.overpredicted, found.tokens.underpredicted) == (12, 7)


def test_without_a_capacity_eviction_and_delivery_are_one_figure() -> None:
    found = anatomy_of(("abcd", "i0", 0), ("abcd", "i0", 10), ("abcd", "i1", 0))
    assert losses(found) == {"routing": 40, "eviction and not delivered": 30}
    assert found.tokens.ideal_finite is None
    assert any("capacity" in why for why in found.left_out)


def test_an_offloaded_prompt_is_looked_for_where_it_is_computed_and_left_on_both() -> None:
    words = ["abcd", "abcd", "abcd", "abcd"]
    records = [
        record(0, "abcd", "i0", 0),
        record(1, "abcd", "i1", 40, prefill_instance="i0"),
        record(2, "abcd", "i1", 40),
        record(3, "abcd", "i0", 0, prefill_instance="i2"),
    ]
    found = anatomy(TracePaths(trace_of(words)), records, capacity_tokens=1000)
    assert losses(found) == {"eviction": 0, "routing": 40, "not delivered": 0}


def test_requests_count_in_the_order_in_which_they_were_sent() -> None:
    records = [record(0, "ab", "i0", 20, sent_s=5.0), record(1, "ab", "i0", 0, sent_s=1.0)]
    found = anatomy(TracePaths(trace_of(["ab", "ab"])), records, capacity_tokens=1000)
    assert losses(found) == {"eviction": 0, "routing": 0, "not delivered": 0}


def test_what_cannot_count_is_left_out_and_reported() -> None:
    records = [
        record(0, "ab", "i0", 0),
        record(1, "ab", "i0", None, ok=False),
        record(2, "ab", None, 20),
        record(3, "ab", "i0", 20, chat_id=99),
    ]
    found = anatomy(TracePaths(trace_of(["ab"] * 4)), records, capacity_tokens=1000)
    assert found.requests == 1
    reasons = " ".join(found.left_out)
    assert "1 of 4 requests: they failed" in reasons
    assert "which instance" in reasons
    assert "not in the trace" in reasons


def test_an_engine_that_reports_no_cached_tokens_leaves_no_actual() -> None:
    records = [record(0, "ab", "i0", None), record(1, "ab", "i1", None)]
    found = anatomy(TracePaths(trace_of(["ab", "ab"])), records, capacity_tokens=1000)
    assert found.tokens.actual is None
    assert losses(found) == {"eviction": 0, "routing": 20}
    assert any("no cached tokens for 2 of 2" in why for why in found.left_out)


def test_cached_tokens_of_a_prompt_counted_otherwise_are_scaled() -> None:
    records = [record(0, "abcd", "i0", 0), record(1, "abcd", "i0", 10, prompt_tokens=20)]
    assert anatomy(TracePaths(trace_of(["abcd", "abcd"])), records).tokens.actual == 20


def test_repeats_add_up_and_begin_with_empty_caches() -> None:
    once = anatomy_of(("abcd", "i0", 0), ("abcd", "i1", 0), capacity_tokens=1000)
    both = total([once, once])
    assert both.requests == 4
    assert losses(both) == {"eviction": 0, "routing": 80, "not delivered": 0}
    unknown = total([once, anatomy_of(("abcd", "i0", 0), ("abcd", "i1", 0))])
    assert losses(unknown) == {"routing": 80, "eviction and not delivered": 0}


REQUESTS = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=6), st.sampled_from(["i0", "i1", "i2"]), st.integers(0, 60)),
    min_size=1,
    max_size=12,
)


@given(REQUESTS, st.none() | st.integers(0, 120), st.none() | st.lists(st.floats(0, 80), min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_the_parts_add_up_exactly(
    requests: list[tuple[str, str, int]], capacity: int | None, believed: list[float] | None
) -> None:
    every_other = (
        {} if believed is None else {f"r{n}": dict(zip(("i0", "i1", "i2"), believed, strict=True)) for n in (0, 2, 4)}
    )
    found = anatomy_of(*requests, capacity_tokens=capacity, beliefs=every_other)
    tokens = found.tokens
    assert tokens.actual is not None
    assert sum(losses(found).values()) == tokens.ideal_infinite - tokens.actual
    assert all(lost >= 0 for name, lost in losses(found).items() if "not delivered" not in name)
    assert tokens.ideal_infinite >= tokens.routed_infinite
    if capacity is not None:
        assert tokens.best_placed is not None
        assert tokens.routed_finite is not None
        assert tokens.ideal_finite is not None
        assert tokens.ideal_infinite >= tokens.best_placed >= tokens.routed_finite
        assert tokens.ideal_infinite >= tokens.ideal_finite
        assert tokens.routed_infinite >= tokens.routed_finite
