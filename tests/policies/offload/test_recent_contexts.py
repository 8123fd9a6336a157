"""Recent contexts: the window, the share that returns, and the first minutes."""

from __future__ import annotations

import pytest

from policies.offload import recent_contexts
from policies.offload.recent_contexts import EXTRAPOLATED_S, WINDOW_S, RecentContexts

MEMORY = 4


def test_a_context_counts_once_and_for_the_window() -> None:
    recent = RecentContexts()
    assert recent.working_set_tokens(7, 0.0) == 7
    recent.sent("a", "inst-0", 100, 0.0, MEMORY)
    recent.sent("b", "inst-0", 50, WINDOW_S / 2, MEMORY)
    recent.sent("a", "inst-0", 120, WINDOW_S - 1, MEMORY)
    assert recent.return_share == 1.0
    assert recent.working_set_tokens(0, WINDOW_S) == 170
    recent.sent("c", "inst-0", 30, 1.5 * WINDOW_S, MEMORY)
    assert len(recent) == 2
    assert recent.return_share == 0.75
    assert recent.working_set_tokens(0, 2 * WINDOW_S) == int(0.75 * 150)


def test_what_is_in_flight_counts_whole_and_the_rest_by_the_share_that_returns() -> None:
    recent = RecentContexts()
    for number in range(200):
        recent.sent(f"once-{number}", "inst-0", 1_000, 10.0 * number, MEMORY)
    assert recent.return_share < 0.01
    assert recent.working_set_tokens(5_000, 1_990.0) == 5_000 + int(recent.return_share * 90_000)


def test_the_first_minutes_are_extrapolated() -> None:
    recent = RecentContexts()
    recent.sent("a", "inst-0", 600, 1_000.0, MEMORY)
    assert recent.working_set_tokens(0, 1_000.0 + EXTRAPOLATED_S) == 600
    assert recent.working_set_tokens(0, 1_060.0) == 5_000
    assert recent.working_set_tokens(600, 1_060.0) == 600
    assert recent.working_set_tokens(0, 990.0) == 600 * EXTRAPOLATED_S


def test_a_further_attempt_at_a_request_moves_its_context_and_is_no_return() -> None:
    recent = RecentContexts()
    recent.return_share = 0.5
    assert not recent.sent("a", "inst-0", 100, 0.0, MEMORY, "first")
    assert recent.sent("a", "inst-1", 100, 1.0, MEMORY, "first", heavy=True), "the first attempt was not"
    assert not recent.sent("a", "inst-2", 100, 2.0, MEMORY, "first")
    assert not recent.sent("a", "inst-2", 100, 3.0, MEMORY, "first", heavy=True)
    assert recent.return_share == 0.5
    assert recent.by_instance("new") == {"inst-0": 0, "inst-1": 0, "inst-2": 100}
    assert recent.sent("a", "inst-2", 120, 4.0, MEMORY, "second", heavy=True)
    assert recent.return_share == 0.625


def test_the_number_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_contexts, "CAPACITY", 3)
    recent = RecentContexts()
    for number in range(10):
        recent.sent(f"s-{number}", "inst-0", 10, WINDOW_S + number, MEMORY)
    assert len(recent) == 3
    assert recent.working_set_tokens(0, 3 * WINDOW_S) == 30


def test_contexts_are_counted_where_the_last_request_of_each_was_sent() -> None:
    recent = RecentContexts()
    recent.sent("a", "inst-0", 100, 0.0, MEMORY)
    recent.sent("b", "inst-0", 50, 1.0, MEMORY)
    recent.sent("c", "inst-1", 30, 2.0, MEMORY)
    assert recent.by_instance("new") == {"inst-0": 150, "inst-1": 30}
    assert recent.by_instance("a") == {"inst-0": 50, "inst-1": 30}
    recent.sent("a", "inst-1", 120, 3.0, MEMORY)
    assert recent.by_instance("new") == {"inst-0": 50, "inst-1": 150}
    recent.sent("d", "inst-1", 10, 2.5 + WINDOW_S, MEMORY)
    assert recent.by_instance("new") == {"inst-0": 0, "inst-1": 130}


def test_an_instance_that_lost_its_kv_holds_no_context() -> None:
    recent = RecentContexts()
    recent.sent("a", "inst-0", 100, 0.0, MEMORY)
    recent.sent("b", "inst-1", 50, 1.0, MEMORY)
    recent.lost("inst-0")
    recent.lost("inst-2")
    assert recent.by_instance("new") == recent.by_instance("a") == {"inst-1": 50}
    assert recent.working_set_tokens(0, EXTRAPOLATED_S) == 150
    recent.sent("c", "inst-0", 10, 2.0, MEMORY)
    recent.sent("a", "inst-0", 110, 3.0, MEMORY)
    assert recent.by_instance("new") == {"inst-0": 120, "inst-1": 50}
