"""The order of prefills: due times, and the share of a queue that a prefill overtakes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.costs.formulas import PrefillModel
from policies.costs.order import FIRST_S, PrefillOrder, overtaken_share, wait_s
from policies.types import QueuedPrefill

MODEL = PrefillModel(fixed_s=0.5, s_per_token=1e-3, s_per_token_squared=0.0)
QUEUES = st.lists(st.builds(QueuedPrefill, st.floats(-1e4, 1e4), st.floats(0, 1e3)), min_size=1, max_size=8)
DUE_S = st.floats(-2e4, 2e4)


def test_a_prefill_is_due_by_the_square_of_its_own_seconds() -> None:
    order = PrefillOrder(MODEL, 100.0, 10.0)
    assert order.queued(500, 0, ordered=True) == (pytest.approx(110.0), pytest.approx(1.0))
    assert order.queued(1_500, 0, ordered=True) == (pytest.approx(140.0), pytest.approx(2.0))
    assert (wait_s(1.0, 10.0), wait_s(2.0, 10.0), wait_s(2.0, 0.0)) == (10.0, 40.0, 0.0)


def test_a_request_without_a_priority_is_due_before_all_others() -> None:
    found = PrefillOrder(MODEL, 100.0, 10.0, has_priority=False).queued(1_500, 0, ordered=True)
    assert found == (FIRST_S, pytest.approx(2.0))
    assert json.dumps(found, allow_nan=False) == "[-1000000000000.0, 2.0]"


def test_attention_over_cached_tokens_counts_for_the_due_time() -> None:
    order = PrefillOrder(PrefillModel(fixed_s=0.5, s_per_token=1e-3, s_per_token_squared=1e-6), 0.0, 10.0)
    cold, warm = order.queued(500, 0, ordered=True), order.queued(500, 10_000, ordered=True)
    assert cold is not None
    assert warm is not None
    assert warm.seconds == pytest.approx(cold.seconds + 1e-6 * 500 * 10_000)
    assert warm.due_s > cold.due_s


def test_nothing_to_compute_is_due_at_once() -> None:
    assert PrefillOrder(MODEL, 7.0, 10.0).queued(0, 9_000, ordered=True) == QueuedPrefill(7.0, 0.0)


@pytest.mark.parametrize(("slowdown", "ordered"), [(10.0, False), (0.0, True), (0.0, False)])
def test_without_an_ordering_engine_or_a_slowdown_there_is_no_place(slowdown: float, ordered: bool) -> None:
    assert PrefillOrder(MODEL, 7.0, slowdown).queued(500, 0, ordered=ordered) is None


def test_the_share_is_by_time_with_half_of_the_first_left() -> None:
    queue = (QueuedPrefill(50.0, 4.0), QueuedPrefill(10.0, 1.0), QueuedPrefill(30.0, 5.0))
    assert overtaken_share(queue, 20.0) == pytest.approx(5 / 8)
    assert overtaken_share(queue, 5.0) == pytest.approx(6 / 8)
    assert overtaken_share(queue, 30.0) == 0.0  # of two that are due at once, the earlier one goes first


def test_the_first_is_never_overtaken() -> None:
    assert overtaken_share((QueuedPrefill(1e9, 4.0),), 0.0) == 0.0
    assert overtaken_share((QueuedPrefill(1e9, 4.0), QueuedPrefill(1.0, 2.0)), 2.0) == 0.0


def test_an_empty_queue_has_nothing_to_overtake() -> None:
    assert overtaken_share((), 0.0) == 0.0


@given(queue=QUEUES, due_s=DUE_S)
def test_the_share_is_one_at_most_and_only_all_of_an_instant_first(queue: list[QueuedPrefill], due_s: float) -> None:
    share = overtaken_share(queue, due_s)
    assert 0.0 <= share <= 1.0 + 1e-9
    if queue[0].seconds > 1e-3:
        assert share < 1.0


@given(queue=QUEUES, due_s=DUE_S, later_s=st.floats(0, 1e4))
def test_who_is_due_later_overtakes_no_more(queue: list[QueuedPrefill], due_s: float, later_s: float) -> None:
    assert overtaken_share(queue, due_s + later_s) <= overtaken_share(queue, due_s)


@given(queue=QUEUES, first_due_s=DUE_S, due_s=DUE_S)
def test_the_due_time_of_the_first_makes_no_difference(
    queue: list[QueuedPrefill], first_due_s: float, due_s: float
) -> None:
    changed = [queue[0]._replace(due_s=first_due_s), *queue[1:]]
    assert overtaken_share(changed, due_s) == overtaken_share(queue, due_s)
