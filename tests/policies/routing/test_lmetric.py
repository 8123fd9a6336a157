"""LMetric, worked by hand, and its hotspot detector end to end."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from policies.classes import ClassThresholds
from policies.decide import decide
from policies.offload.never import Never
from policies.routing.lmetric import LMetric
from policies.state import FleetState
from policies.types import Decision, HotspotView, InstanceView, Reason
from tests.policies.builders import ask, ask_ids, fleet_of, idle, score_of

ALARM = HotspotView(share=0.9, streak=2, window=100)
HOLDER = InstanceView("holder", cached_tokens=990, holds_class=True)


def test_the_score_is_prefill_to_do_times_batch_with_this_request_in_both() -> None:
    a = InstanceView("a", cached_tokens=600, pending_prefill_tokens=2_000, requests=2)
    b = InstanceView("b", pending_prefill_tokens=0, requests=3, decoding_tokens=50_000)
    choice = LMetric().choose(ask(1_000), fleet_of(a, b))
    assert [score.score for score in choice.scores] == [(2_000 + 400) * 3, 1_000 * 4]
    assert score_of(choice, "a").inputs == {"pending_prefill_tokens": 2_000, "new_tokens": 400, "batch": 3}
    assert (choice.instance, choice.reason) == ("b", Reason.LOWEST_SCORE)


def test_idle_instances_are_distinguished_by_the_cache_not_by_ties() -> None:
    warm = InstanceView("warm", cached_tokens=999)
    choice = LMetric().choose(ask(1_000), fleet_of(*idle(7), warm))
    assert choice.instance == "warm"
    assert [score.score for score in choice.scores] == [1_000.0] * 7 + [1.0]


def test_the_product_is_never_zero_even_with_nothing_to_compute() -> None:
    choice = LMetric().choose(ask(0), fleet_of(*idle(2), InstanceView("busy", requests=4)))
    assert [score.score for score in choice.scores] == [1.0, 1.0, 5.0]


def test_holders_of_a_hot_class_are_skipped_after_their_streak() -> None:
    choice = LMetric().choose(ask(), fleet_of(HOLDER, *idle(7), hotspot=ALARM))
    assert choice.reason is Reason.HOTSPOT_AVOIDED
    assert choice.instance != "holder"
    assert [score.instance for score in choice.scores if score.skipped] == ["holder"]
    assert score_of(choice, "holder").score == 10.0


@pytest.mark.parametrize(
    ("hotspot", "holders"),
    [
        (ALARM._replace(streak=1), 1),  # the streak is not yet 2 |M|
        (ALARM._replace(streak=5), 3),  # 2 |M| is 6
        (ALARM._replace(share=1 / 8), 1),  # a fair share
        (ALARM._replace(window=15), 1),  # too few requests for a meaningful share
        (ALARM, 0),  # no instance holds it
        (ALARM._replace(streak=100), 8),  # every instance holds it
    ],
)
def test_no_instance_is_skipped_without_an_alarm_and_a_full_streak(hotspot: HotspotView, holders: int) -> None:
    views = [view._replace(holds_class=i < holders) for i, view in enumerate(idle(8))]
    choice = LMetric().choose(ask(), fleet_of(*views, hotspot=hotspot))
    assert choice.reason is Reason.LOWEST_SCORE
    assert not any(score.skipped for score in choice.scores)


def test_the_window_at_which_alarms_begin_and_the_detector_itself_are_parameters() -> None:
    fleet = fleet_of(HOLDER, *idle(7), hotspot=ALARM._replace(window=16))
    assert LMetric().choose(ask(), fleet).reason is Reason.HOTSPOT_AVOIDED
    assert LMetric(min_window=17).choose(ask(), fleet).reason is Reason.LOWEST_SCORE
    assert LMetric(detect_hotspots=False).choose(ask(), fleet).instance == "holder"


def _run(policy: LMetric, requests: int, n: int = 4) -> list[Decision]:
    """A single class, each request with its own tail, one after the other on an idle fleet."""
    state = FleetState()
    for i in range(n):
        state.add_instance(f"inst-{i}")
    decisions = []
    for number in range(requests):
        request = ask_ids([*range(1_024), *range(10_000 * (number + 1), 10_000 * (number + 1) + 64)])
        fleet = state.snapshot(request, float(number), state.instances)
        decisions.append(decide(request, fleet, policy, Never(), ClassThresholds()))
        state.commit(request, fleet, decisions[-1], float(number)).release()
    return decisions


def test_a_single_hot_class_eventually_uses_other_holders() -> None:
    assert set(Counter(d.decode_on for d in _run(LMetric(detect_hotspots=False), 60))) == {"inst-0"}
    decisions = _run(LMetric(), 60)
    assert set(Counter(d.decode_on for d in decisions)) == {f"inst-{i}" for i in range(4)}
    skips = [number for number, d in enumerate(decisions) if d.reason is Reason.HOTSPOT_AVOIDED]
    assert len(skips) == 3, "once every instance holds the class there is nobody to skip to"
    assert skips[0] == 15, "the sixteenth request is the first with a window of 16"
    assert [later - earlier for earlier, later in pairwise(skips)] == [5, 7], "2 |M| + 1 requests"


def test_no_alarm_before_the_window_is_filled() -> None:
    assert all(d.reason is Reason.LOWEST_SCORE for d in _run(LMetric(), 15))
