"""The hotspot detector: shares, the alarm's condition, streaks."""

from __future__ import annotations

import pytest

from policies.hotspots import HotspotTracker, is_hotspot
from policies.types import HotspotView

HOT, COLD = [1, 2, 3, 4, 5], [9, 8, 7, 6, 5]


@pytest.mark.parametrize(
    ("share", "holders", "others", "alarmed"),
    [
        (0.5, 1, 7, True),  # 1 > 1/7
        (0.125, 1, 7, False),  # 1/7 > 1/7 does not hold: a fair share is not a hotspot
        (0.2, 1, 7, True),  # 1/4 > 1/7
        (0.5, 4, 4, False),  # 1 > 1 does not hold
        (0.51, 4, 4, True),
        (0.74, 6, 2, False),  # 2.85 > 3 does not hold
        (0.76, 6, 2, True),  # 3.17 > 3
        (1.0, 7, 1, True),  # x / (1 - x) is infinite
        (0.0, 1, 7, False),
        (1.0, 0, 8, False),  # no instance to skip
        (1.0, 8, 0, False),  # no other instance
    ],
)
def test_a_class_is_hot_when_its_share_outgrows_its_holders(
    share: float, holders: int, others: int, alarmed: bool
) -> None:
    assert is_hotspot(share, holders, others) is alarmed


def test_the_share_counts_the_request_that_just_arrived() -> None:
    tracker = HotspotTracker()
    assert tracker.view(HOT) == HotspotView(1.0, 0, 1)
    for hashes in (HOT, HOT, COLD):
        tracker.record(hashes, to_holder=True, alarmed=False)
    assert tracker.view(HOT) == HotspotView(3 / 4, 0, 4)
    assert tracker.view(COLD) == HotspotView(2 / 4, 0, 4)


def test_a_class_is_the_first_few_blocks() -> None:
    tracker = HotspotTracker(class_blocks=4)
    assert tracker.class_of(HOT) == tracker.class_of([1, 2, 3, 4, 99, 100]) == 4
    assert tracker.class_of([1, 2]) == 2
    assert tracker.class_of([]) is None


def test_a_prompt_without_blocks_has_no_class_and_is_not_counted() -> None:
    tracker = HotspotTracker()
    tracker.record([], to_holder=True, alarmed=True)
    assert tracker.view([]) == HotspotView()
    assert tracker.view(HOT).window == 1


def test_a_streak_grows_only_while_alarmed_requests_go_to_holders() -> None:
    tracker = HotspotTracker()
    for expected in (1, 2, 3):
        tracker.record(HOT, to_holder=True, alarmed=True)
        assert tracker.view(HOT).streak == expected
    tracker.record(COLD, to_holder=False, alarmed=False)
    assert tracker.view(HOT).streak == 3


@pytest.mark.parametrize(("to_holder", "alarmed"), [(False, True), (True, False), (False, False)])
def test_a_streak_ends_with_a_request_elsewhere_or_with_the_alarm(to_holder: bool, alarmed: bool) -> None:
    tracker = HotspotTracker()
    for _ in range(5):
        tracker.record(HOT, to_holder=True, alarmed=True)
    tracker.record(HOT, to_holder=to_holder, alarmed=alarmed)
    assert tracker.view(HOT).streak == 0


def test_the_window_bounds_what_is_remembered() -> None:
    tracker = HotspotTracker(class_blocks=1, window=10)
    for number in range(1_000):
        tracker.record([number], to_holder=True, alarmed=True)
    assert len(tracker._recent) == len(tracker._counts) == len(tracker._streaks) == 10
    assert tracker.view([0]) == HotspotView(1 / 11, 0, 11)
    assert tracker.view([999]) == HotspotView(2 / 11, 1, 11)


@pytest.mark.parametrize(("class_blocks", "window"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(class_blocks: int, window: int) -> None:
    with pytest.raises(ValueError, match="class_blocks and window must be at least 1"):
        HotspotTracker(class_blocks, window)
