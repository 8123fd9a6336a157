"""``SessionAccounts``: contexts in use, each session once, and the time lost by recomputation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.turns import REMEMBERED_TURNS
from policies.types import RequestView
from tests.policies.admission.sessions import Sessions


def test_a_session_counts_once_with_its_longest_prompt_in_flight() -> None:
    accounts = Sessions()
    accounts.begin("a", 1_000, 0.0)
    accounts.begin("a", 3_000, 1.0)
    accounts.begin("a", 2_000, 1.0)
    accounts.begin("b", 500, 1.0)
    assert (accounts.active_sessions, accounts.active_tokens) == (2, 3_500)
    assert accounts.view("a", 2.0).in_flight == 3
    for _ in range(3):
        accounts.end("a", 2.0)
    assert (accounts.active_tokens, accounts.kept_tokens, accounts.kept_sessions) == (500, 3_000, 1)


def test_a_session_is_kept_for_the_given_time_and_then_remembered() -> None:
    accounts = Sessions(keep_s=10.0)
    accounts.begin("a", 1_000, 0.0)
    accounts.end("a", 5.0)
    accounts.expire(14.9)
    assert accounts.kept_tokens == 1_000
    accounts.expire(15.0)
    assert (accounts.kept_tokens, accounts.kept_sessions) == (0, 0)
    view = accounts.view("a", 20.0)
    assert (view.turns, view.context_tokens, view.idle_s) == (1, 1_000, 15.0)
    accounts.begin("a", 1_200, 21.0)
    assert accounts.view("a", 21.0).turns == 2


def test_another_time_to_keep_applies_to_idle_sessions_too() -> None:
    accounts = Sessions(keep_s=10.0)
    for number, name in enumerate("abc"):
        accounts.begin(name, 100, float(number))
        accounts.end(name, float(number))
    accounts.expire(11.5)  # a and b
    assert accounts.kept_tokens == 100
    accounts.set_keep(11.0, 11.5)
    assert accounts.kept_tokens == 200
    accounts.set_keep(1.0, 11.5)
    assert accounts.kept_tokens == 0


def test_another_time_to_keep_counts_no_session_twice() -> None:
    accounts = Sessions(keep_s=10.0)
    for number in range(100):
        accounts.begin(str(number), 100, 0.0)
        accounts.end(str(number), 0.0)
    accounts.expire(50.0)
    share = accounts.gaps.return_share
    assert share < 0.1
    for keep_s in (100.0, 10.0, 10.0, 20.0):
        accounts.set_keep(keep_s, 50.0)
    assert accounts.gaps.return_share == share
    accounts.set_keep(100.0, 50.0)
    accounts.begin("7", 100, 51.0)  # had not returned in time when it was counted
    assert accounts.gaps.return_share == share


def test_a_request_without_a_session_counts_while_it_is_in_flight_only() -> None:
    accounts = Sessions(keep_s=10.0)
    accounts.begin("req-1", 700, 0.0, single=True)
    assert (accounts.active_sessions, accounts.active_tokens) == (1, 700)
    accounts.end("req-1", 1.0)
    accounts.expire(100.0)
    assert (accounts.active_tokens, accounts.kept_tokens) == (0, 0)
    assert accounts.view("req-1", 100.0).turns == 0


def test_the_share_of_turns_that_others_follow_is_what_sessions_do() -> None:
    accounts = Sessions(keep_s=10.0)
    for turn in range(1_000):
        accounts.begin("agent", 100, float(turn))
        accounts.end("agent", turn + 0.5)
    assert accounts.gaps.return_share == 1.0
    for number in range(1_000):  # that do not return
        accounts.begin(f"once-{number}", 100, 2_000.0 + number)
        accounts.end(f"once-{number}", 2_000.0 + number)
    assert accounts.gaps.return_share < 0.02
    for turn in range(1_000):
        accounts.begin("agent", 100, 4_000.0 + turn)
        accounts.end("agent", 4_000.5 + turn)
    assert accounts.gaps.return_share > 0.98
    for turn in range(1_000):  # a chat with a minute between its turns
        accounts.begin("chat", 100, 6_000.0 + turn * 60.0)
        accounts.end("chat", 6_000.5 + turn * 60.0)
    assert accounts.gaps.return_share < 0.02


def test_sessions_are_kept_for_as_long_as_nearly_all_that_return_take() -> None:
    accounts = Sessions(keep_s=32.0)
    assert accounts.gaps.keep_s == 32.0
    for turn in range(7):
        accounts.begin("agent", 100, turn * 5.0)
        accounts.end("agent", turn * 5.0 + 1.5)
    assert accounts.gaps.keep_s == 32.0
    for turn in range(7, 50):
        accounts.begin("agent", 100, turn * 5.0)
        accounts.end("agent", turn * 5.0 + 1.5)
    assert accounts.gaps.keep_s == 5.0  # gaps of 3.5 s, buckets of a second
    accounts.expire(300.0)
    assert accounts.kept_sessions == 0
    for turn in range(200):  # slower ones lengthen it again
        accounts.begin("slow", 100, 1_000.0 + turn * 20.0)
        accounts.end("slow", 1_001.5 + turn * 20.0)
    assert accounts.gaps.keep_s == 20.0
    accounts.set_keep(10.0, 5_000.0)
    assert accounts.gaps.keep_s == 10.0


def test_the_number_of_returns_that_count_grows_with_the_fleet() -> None:
    shares = []
    for instances in (1, 4):
        accounts = Sessions(keep_s=10.0)
        accounts.instances = instances
        for turn in range(25 * instances + 1):
            accounts.begin("chat", 100, turn * 60.0)
            accounts.end("chat", turn * 60.0 + 0.5)
        shares.append(accounts.gaps.return_share)
    assert shares == pytest.approx([0.37, 0.37], abs=0.01)


def test_a_held_session_has_returned_and_is_kept_while_it_waits() -> None:
    accounts = Sessions(keep_s=10.0)
    accounts.begin("a", 100, 0.0)
    accounts.end("a", 1.0)
    request = RequestView("a2", 120, session_id="a")
    assert accounts.view_of(request, 5.0).kept
    for now_s in range(10, 101, 5):
        assert accounts.view_of(request, float(now_s), now_s - 5.0).kept
    accounts.begin("a", 120, 100.0)
    assert accounts.gaps.return_share == 1.0
    accounts.end("a", 101.0)
    late = RequestView("a3", 140, session_id="a")
    accounts.expire(120.0)
    assert not accounts.view_of(late, 120.0).kept
    assert accounts.gaps.return_share < 1.0
    share = accounts.gaps.return_share
    accounts.begin("a", 140, 130.0)
    assert accounts.gaps.return_share == share  # it counts once


def test_sessions_of_the_past_are_bounded() -> None:
    accounts = Sessions(keep_s=0.0, capacity=3)
    for number in range(10):
        accounts.begin(str(number), 100, float(number))
        accounts.end(str(number), float(number))
    assert [name for name in map(str, range(10)) if accounts.view(name, 10.0).turns] == ["7", "8", "9"]


def test_a_longer_prompt_of_the_same_chain_was_computed_before() -> None:
    accounts = Sessions()
    assert accounts.computed_before("a", "a1", [1, 2, 3], 16.0) == 0
    assert accounts.computed_before("b", "b1", [1, 2, 3, 4], 16.0) == 0  # of another session
    assert accounts.computed_before("a", "a2", [1, 2, 3, 4], 16.0) == 48
    assert accounts.computed_before("a", "a3", [8, 9], 16.0) == 0
    assert accounts.computed_before("a", "a4", [1, 2, 3, 4, 5], 16.0) == 64
    assert accounts.computed_before("a", "a5", [], 16.0) == 0


@pytest.mark.parametrize(("changed", "found"), [(0, 1000), (1, 999), (3, 996), (100, 872), (129, 0), (900, 0)])
def test_a_turn_that_changes_the_end_of_the_last_prompt_is_recognised(changed: int, found: int) -> None:
    accounts = Sessions()
    first = list(range(1, 1001))
    accounts.computed_before("a", "a1", first, 1.0)
    second = [*first[: 1000 - changed], *range(5_000, 5_000 + changed + 50)]
    assert accounts.computed_before("a", "a2", second, 1.0) == found


def test_a_further_attempt_of_a_request_has_not_computed_its_prompt_before() -> None:
    accounts = Sessions()
    assert accounts.computed_before("a", "first", [1, 2], 16.0) == 0
    assert accounts.computed_before("a", "first", [1, 2], 16.0) == 0
    assert accounts.computed_before("a", "second", [1, 2, 3], 16.0) == 32
    assert accounts.computed_before("a", "second", [1, 2, 3], 16.0) == 32


def test_chains_that_take_turns_in_one_session_are_all_recognised() -> None:
    accounts = Sessions()
    chains = [[number * 10, number * 10 + 1] for number in range(1, REMEMBERED_TURNS + 1)]
    for turn in range(3):
        for number, chain in enumerate(chains):
            before = accounts.computed_before("a", f"{turn}-{number}", chain, 16.0)
            assert before == (16 * (len(chain) - 1) if turn else 0)
            chain.append(chain[-1] + 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.booleans(), st.integers(1, 1_000), st.floats(0.0, 20.0, allow_subnormal=False)
        )
    )
)
def test_sums_are_those_of_the_sessions(steps: list[tuple[str, bool, int, float]]) -> None:
    accounts = Sessions(keep_s=10.0)
    running: dict[str, list[int]] = {}
    idle: dict[str, tuple[int, float]] = {}
    now_s = 0.0
    for name, begin, tokens, passed_s in steps:
        now_s += passed_s
        if begin:
            accounts.begin(name, tokens, now_s)
            running.setdefault(name, []).append(tokens)
            idle.pop(name, None)
        elif name in running:
            accounts.end(name, now_s)
            context = max(running[name])
            if len(running[name]) == 1:
                idle[name] = (context, now_s)
                del running[name]
            else:
                running[name] = [context] * (len(running[name]) - 1)
        accounts.expire(now_s)
        kept = [tokens for tokens, since_s in idle.values() if since_s > now_s - 10.0]
        assert accounts.active_tokens == sum(max(each) for each in running.values())
        assert (accounts.kept_sessions, accounts.kept_tokens) == (len(kept), sum(kept))
