"""Unified: affinity gate, overload, LMetric fallback."""

from __future__ import annotations

import pytest

from policies.routing.unified import Unified
from policies.types import InstanceView, Reason
from tests.policies.builders import ask, fleet_of, idle, score_of


def test_affinity_holds_while_the_prefix_is_worth_it() -> None:
    warm = InstanceView("warm", cached_tokens=501, pending_prefill_tokens=20_000, requests=9)
    choice = Unified().choose(ask(1_000), fleet_of(*idle(3), warm))
    assert (choice.instance, choice.reason) == ("warm", Reason.AFFINITY)


def test_at_the_gate_the_lowest_score_wins() -> None:
    a = InstanceView("a", cached_tokens=500, pending_prefill_tokens=1_000, decoding_tokens=20_000, requests=3)
    b = InstanceView("b", pending_prefill_tokens=2_000, recent_tokens=500.0, requests=0)
    choice = Unified().choose(ask(1_000), fleet_of(a, b))
    assert [score.score for score in choice.scores] == [(1_000 + 500 + 200) * 3, (2_000 + 1_000 + 50) * 1]
    assert score_of(choice, "a").inputs == {
        "pending_prefill_tokens": 1_000,
        "new_tokens": 500,
        "batch": 3,
        "decoding_tokens": 20_000,
        "recent_tokens": 0.0,
    }
    assert (choice.instance, choice.reason) == ("b", Reason.LOWEST_SCORE)


@pytest.mark.parametrize(
    ("pending", "reason"),
    [
        (20_000, Reason.AFFINITY),  # at the floor
        (20_001, Reason.AFFINITY_OVERLOADED),
    ],
)
def test_an_overloaded_holder_loses_its_affinity(pending: int, reason: Reason) -> None:
    warm = InstanceView("warm", cached_tokens=900, pending_prefill_tokens=pending, requests=1)
    choice = Unified().choose(ask(1_000), fleet_of(warm, *idle(3)))
    assert choice.reason is reason
    assert (choice.instance == "warm") is (reason is Reason.AFFINITY)


def test_overload_begins_above_a_third_more_than_the_mean() -> None:
    others = [view._replace(pending_prefill_tokens=90_000) for view in idle(3)]
    for pending, reason in ((129_900, Reason.AFFINITY), (135_000, Reason.AFFINITY_OVERLOADED)):
        # 1.3 x the mean is 129,967 and 131,625
        warm = InstanceView("warm", cached_tokens=900, pending_prefill_tokens=pending)
        assert Unified().choose(ask(1_000), fleet_of(warm, *others)).reason is reason


def test_a_holder_that_is_overloaded_may_still_score_lowest() -> None:
    warm = InstanceView("warm", cached_tokens=99_000, pending_prefill_tokens=20_001)
    choice = Unified().choose(ask(100_000), fleet_of(warm, *idle(3)))
    assert (choice.instance, choice.reason) == ("warm", Reason.AFFINITY_OVERLOADED)


def test_the_first_request_of_an_instance_does_not_multiply_by_zero() -> None:
    choice = Unified().choose(ask(1_000), fleet_of(*idle(2)))
    assert [score.score for score in choice.scores] == [1_000.0, 1_000.0]


def test_equal_prefixes_go_to_less_queued_prefill_then_to_the_session_then_take_turns() -> None:
    a, b, c = (view._replace(cached_tokens=900) for view in idle(3))
    behind = a._replace(pending_prefill_tokens=10)
    assert Unified().choose(ask(1_000), fleet_of(behind, b, pinned="inst-0")).instance == "inst-1"
    assert Unified().choose(ask(1_000), fleet_of(a, b, c, pinned="inst-2")).instance == "inst-2"
    taken = {Unified().choose(ask(1_000), fleet_of(a, b, c, sequence=s)).instance for s in range(3)}
    assert taken == {"inst-0", "inst-1", "inst-2"}
