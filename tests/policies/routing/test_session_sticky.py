"""Session-sticky: the pin, its override, and requests without a session."""

from __future__ import annotations

import pytest

from policies.routing.session_sticky import SessionSticky
from policies.types import InstanceView, Reason
from tests.policies.builders import ask, fleet_of, idle, score_of

TURN = ask(1_000, session_id="s")


def loaded(*pending: int) -> list[InstanceView]:
    return [view._replace(pending_prefill_tokens=p) for view, p in zip(idle(len(pending)), pending, strict=True)]


def test_a_session_stays_where_it_is_though_others_are_idle() -> None:
    choice = SessionSticky().choose(TURN, fleet_of(*loaded(20_000, 0, 0), pinned="inst-0"))
    assert (choice.instance, choice.reason) == ("inst-0", Reason.SESSION_PINNED)
    assert [score.score for score in choice.scores] == [21_000, 1_000, 1_000]


def test_a_first_turn_goes_to_least_pending_plus_new_plus_recent() -> None:
    views = [
        InstanceView("a", pending_prefill_tokens=500, recent_tokens=600.0),
        InstanceView("b", recent_tokens=1_000.0, cached_tokens=900),
        InstanceView("c", pending_prefill_tokens=1_200),
    ]
    choice = SessionSticky().choose(TURN, fleet_of(*views))
    assert [score.score for score in choice.scores] == [2_100, 1_100, 2_200]
    assert score_of(choice, "a").inputs == {
        "pending_prefill_tokens": 500,
        "recent_tokens": 600.0,
        "new_tokens": 1_000,
        "cached_tokens": 0,
    }
    assert (choice.instance, choice.reason) == ("b", Reason.SESSION_PLACED)


@pytest.mark.parametrize(
    ("pending", "stays"),
    [
        ((40_000, 10_000, 10_000), True),  # mean 20,000: exactly twice is not above
        ((40_001, 10_000, 10_000), False),
        ((20_000, 0, 0), True),  # at the floor
        ((20_001, 0, 0), False),
        ((90_000, 90_000, 90_000), True),  # all are equally busy
    ],
)
def test_a_pin_is_overridden_above_twice_the_mean_and_above_the_floor(pending: tuple[int, ...], stays: bool) -> None:
    choice = SessionSticky().choose(TURN, fleet_of(*loaded(*pending), pinned="inst-0"))
    assert (choice.instance == "inst-0") is stays
    assert choice.reason is (Reason.SESSION_PINNED if stays else Reason.SESSION_OVERLOADED)
    assert [score.skipped for score in choice.scores] == [not stays, False, False]


@pytest.mark.parametrize(
    ("cached_here", "cached_there", "stays"),
    [
        (20_000, 0, True),  # a queue shorter by 40,000 for 20,000 tokens lost: exactly the margin of 2
        (19_999, 0, False),
        (30_000, 10_001, False),  # tokens that the other instance holds are not lost
        (0, 0, False),
    ],
)
def test_a_pin_is_overridden_only_when_moving_pays(cached_here: int, cached_there: int, stays: bool) -> None:
    views = [
        InstanceView("home", cached_tokens=cached_here, pending_prefill_tokens=45_000),
        InstanceView("near", cached_tokens=cached_there, pending_prefill_tokens=5_000),
        InstanceView("busy", pending_prefill_tokens=15_000),
    ]
    choice = SessionSticky().choose(ask(50_000, session_id="s"), fleet_of(*views, pinned="home"))
    assert (choice.instance == "home") is stays
    assert choice.reason is (Reason.SESSION_PINNED if stays else Reason.SESSION_OVERLOADED)


def test_twice_the_mean_cannot_be_exceeded_by_one_of_two_instances() -> None:
    """The mean includes the instance itself, as in the source: two instances need a factor below 2."""
    fleet = fleet_of(*loaded(10**6, 0), pinned="inst-0")
    assert SessionSticky().choose(TURN, fleet).reason is Reason.SESSION_PINNED
    assert SessionSticky(overload_factor=1.5).choose(TURN, fleet).reason is Reason.SESSION_OVERLOADED


def test_a_session_whose_instance_is_gone_is_placed_again() -> None:
    choice = SessionSticky().choose(TURN, fleet_of(*loaded(9, 5, 7), pinned="departed"))
    assert (choice.instance, choice.reason) == ("inst-1", Reason.SESSION_INSTANCE_GONE)


def test_without_a_session_the_longest_prefix_is_followed_above_the_gate() -> None:
    views = [InstanceView("a", cached_tokens=501), InstanceView("b", cached_tokens=400), InstanceView("c")]
    choice = SessionSticky().choose(ask(1_000), fleet_of(*views))
    assert (choice.instance, choice.reason) == ("a", Reason.AFFINITY)


def test_without_a_session_a_prefix_at_the_gate_is_not_worth_following() -> None:
    views = [InstanceView("a", cached_tokens=500, recent_tokens=501.0), InstanceView("b")]
    choice = SessionSticky().choose(ask(1_000), fleet_of(*views))
    assert (choice.instance, choice.reason) == ("b", Reason.LEAST_LOADED)


def test_without_a_session_an_overloaded_holder_is_left_for_affinity_reasons_not_session_ones() -> None:
    views = [InstanceView("a", cached_tokens=900, pending_prefill_tokens=50_000), *idle(3)]
    choice = SessionSticky().choose(ask(1_000), fleet_of(*views))
    assert choice.reason is Reason.AFFINITY_OVERLOADED
    assert choice.instance != "a"


def test_equal_holders_without_a_session_take_turns() -> None:
    views = [view._replace(cached_tokens=900) for view in idle(4)]
    chosen = {SessionSticky().choose(ask(1_000), fleet_of(*views, sequence=s)).instance for s in range(4)}
    assert chosen == {"inst-0", "inst-1", "inst-2", "inst-3"}


def test_the_only_instance_is_never_overloaded() -> None:
    choice = SessionSticky(overload_factor=1.0).choose(TURN, fleet_of(*loaded(10**6), pinned="inst-0"))
    assert (choice.instance, choice.reason) == ("inst-0", Reason.SESSION_PINNED)
