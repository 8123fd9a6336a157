"""Requests left out at the start and the end: by the plan, the same in every arm."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replayer.compare.runs import compare
from replayer.compare.window import COLD_SHARE, DRAIN_SHARE, choose_window, planned_times
from tests.replayer.constructed_runs import make_run


def test_the_automatic_rule_by_hand() -> None:
    # Ten sessions arrive at 0, 10, ..., 90 s; the first five have another turn at 100, 101, ... s.
    planned = np.array([*range(0, 100, 10), 100.0, 101.0, 102.0, 103.0, 104.0])
    sessions = np.array([*range(10), 0, 1, 2, 3, 4])
    window, inside = choose_window(planned, np.full(15, 1000.0), sessions, skip_first_s=None, skip_last_s=None)
    # A tenth of 15,000 tokens is due with the second request, which counts; one is left out.
    assert (window.first_s, window.cold) == (10.0, 1)
    # Five come after the last arrival, but only a tenth of 15 requests may go.
    assert window.drain == 1
    assert window.last_s == 103.0
    assert inside.tolist() == [False, *[True] * 13, False]
    assert window.automatic


def test_nothing_is_drained_while_sessions_arrive() -> None:
    planned = np.arange(50.0)
    window, inside = choose_window(planned, np.ones(50), np.arange(50), skip_first_s=0.0, skip_last_s=None)
    assert inside.all()
    assert window.describe() == ""


def test_the_cold_start_is_over_when_a_tenth_of_the_tokens_was_due() -> None:
    tokens = np.array([100.0, 800.0, 100.0, 4000.0, 5000.0])
    window, inside = choose_window(np.arange(5.0), tokens, np.arange(5), skip_first_s=None, skip_last_s=0.0)
    assert window.first_s == 2.0
    assert inside.tolist() == [False, False, True, True, True]


def test_explicit_seconds_are_taken_as_said() -> None:
    planned = np.arange(10.0)
    window, inside = choose_window(
        planned, np.ones(10), np.zeros(10, dtype=np.int64), skip_first_s=2.0, skip_last_s=3.0
    )
    assert np.flatnonzero(inside).tolist() == [2, 3, 4, 5, 6]
    assert (window.cold, window.drain, window.automatic) == (2, 3, False)
    assert "as asked" in window.describe()


@given(
    times=st.lists(st.floats(0, 1e5), min_size=1, max_size=60),
    data=st.data(),
)
def test_the_automatic_rule_leaves_most_of_the_plan(times: list[float], data: st.DataObject) -> None:
    planned = planned_times(np.array(times), 2.0)
    sessions = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(times), max_size=len(times))))
    _, inside = choose_window(planned, np.ones(len(times)), sessions, skip_first_s=None, skip_last_s=None)
    assert inside.sum() >= np.floor(len(times) * (1 - COLD_SHARE - DRAIN_SHARE))
    assert inside.any()


def test_a_plan_without_times_or_tokens_is_kept() -> None:
    _, inside = choose_window(np.zeros(8), np.zeros(8), np.arange(8), skip_first_s=None, skip_last_s=None)
    assert inside.all()


def test_a_slow_arm_is_cut_like_the_other() -> None:
    baseline, candidate = make_run(), make_run("late")
    for record in candidate.records:
        record.scheduled_s += 500.0
        record.sent_s = (record.sent_s or 0.0) + 500.0
    swapped = [
        compare(*pair, skip_first_s=None, skip_last_s=None) for pair in ((baseline, candidate), (candidate, baseline))
    ]
    assert swapped[0].pairing.keys == swapped[1].pairing.keys
    assert 0 < swapped[0].pairing.skipped < 0.25 * len(baseline.records)
    assert any("--keep-all" in note for note in swapped[0].notes)
