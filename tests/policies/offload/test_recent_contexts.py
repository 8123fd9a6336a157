"""Recent contexts: the window, the share that returns, and the first minutes."""

from __future__ import annotations

import pytest

from policies.offload import recent_contexts
from policies.offload.recent_contexts import EXTRAPOLATED_S, WINDOW_S, RecentContexts

MEMORY = 4


def test_a_context_counts_once_and_for_the_window() -> None:
    recent = RecentContexts()
    assert recent.working_set_tokens(7, 0.0) == 7
    recent.sent("a", 100, 0.0, MEMORY)
    recent.sent("b", 50, WINDOW_S / 2, MEMORY)
    recent.sent("a", 120, WINDOW_S - 1, MEMORY)
    assert recent.return_share == 1.0
    assert recent.working_set_tokens(0, WINDOW_S) == 170
    recent.sent("c", 30, 1.5 * WINDOW_S, MEMORY)
    assert len(recent) == 2
    assert recent.return_share == 0.75
    assert recent.working_set_tokens(0, 2 * WINDOW_S) == int(0.75 * 150)


def test_what_is_in_flight_counts_whole_and_the_rest_by_the_share_that_returns() -> None:
    recent = RecentContexts()
    for number in range(200):
        recent.sent(f"once-{number}", 1_000, 10.0 * number, MEMORY)
    assert recent.return_share < 0.01
    assert recent.working_set_tokens(5_000, 1_990.0) == 5_000 + int(recent.return_share * 90_000)


def test_the_first_minutes_are_extrapolated() -> None:
    recent = RecentContexts()
    recent.sent("a", 600, 1_000.0, MEMORY)
    assert recent.working_set_tokens(0, 1_000.0 + EXTRAPOLATED_S) == 600
    assert recent.working_set_tokens(0, 1_060.0) == 5_000
    assert recent.working_set_tokens(600, 1_060.0) == 600
    assert recent.working_set_tokens(0, 990.0) == 600 * EXTRAPOLATED_S


def test_the_number_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_contexts, "CAPACITY", 3)
    recent = RecentContexts()
    for number in range(10):
        recent.sent(f"s-{number}", 10, WINDOW_S + number, MEMORY)
    assert len(recent) == 3
    assert recent.working_set_tokens(0, 3 * WINDOW_S) == 30
