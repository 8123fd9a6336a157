"""Turns that are counted in batches: whatever is read, it is as if each had been counted at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from policies.admission.accounts import DEFERRED, SessionAccounts
from policies.admission.base import AdmissionView, SessionView
from policies.admission.never_hold import NeverHold
from policies.admission.residency import Residency
from policies.admission.room import ONE_PART
from policies.admission.turns import Turn
from policies.admission.working_set import WorkingSet
from policies.classes import ClassThresholds
from policies.costs.formulas import PrefillModel
from policies.offload.never import Never
from policies.routing.warm import Warm
from policies.session import Routed, RoutingSession
from policies.state import FleetState
from policies.types import RequestView

MODEL = PrefillModel()
NAMES = ("a", "b", "c")
PROMPT = tuple(range(100))
SESSIONS = tuple(f"s{number}" for number in range(6))


class Evicted(Residency):
    """Every context that is asked about has been evicted."""

    def __init__(self) -> None:
        """Read no index."""

    def evicted(self, request: RequestView, before_tokens: int, now_s: float) -> bool:
        return True


def accounts_of(*, deferred: bool) -> SessionAccounts:
    accounts = SessionAccounts(keep_s=10.0, residency=Evicted())
    for name in NAMES:
        accounts.add_instance(name)
    accounts.defer(deferred)
    return accounts


def everything(accounts: SessionAccounts, now_s: float) -> tuple[Any, ...]:
    """All that can be read; ``contexts`` last, so that the others cannot rely on it."""
    return (
        accounts.view(SESSIONS[0], now_s),
        [accounts.view_of(RequestView("next", 9, PROMPT, 16.0, session), now_s) for session in SESSIONS],
        accounts.gaps.return_share,
        accounts.gaps.keep_s,
        accounts.losses.share(3, now_s),
        accounts.losses.tokens,
        accounts.kept_sessions,
        accounts.homes.contexts(),
        accounts.contexts(),
    )


READERS: dict[str, Callable[[SessionAccounts, float], object]] = {
    "view": lambda accounts, now_s: accounts.view(SESSIONS[0], now_s),
    "view_of": lambda accounts, now_s: accounts.view_of(RequestView("next", 9, PROMPT, 16.0, SESSIONS[1]), now_s),
    "return_share": lambda accounts, _: accounts.gaps.return_share,
    "keeps_s": lambda accounts, _: accounts.gaps.keep_s,
    "lost_share": lambda accounts, now_s: accounts.losses.share(3, now_s),
    "lost_tokens": lambda accounts, _: accounts.losses.tokens,
    "active_sessions": lambda accounts, _: accounts.active_sessions,
    "active_tokens": lambda accounts, _: accounts.active_tokens,
    "kept_sessions": lambda accounts, _: accounts.kept_sessions,
    "kept_tokens": lambda accounts, _: accounts.kept_tokens,
}
CHANGES: dict[str, Callable[[SessionAccounts, float], None]] = {
    "expire": lambda accounts, now_s: accounts.expire(now_s),
    "set_keep": lambda accounts, now_s: accounts.set_keep(5.0, now_s),
    "restarted": lambda accounts, _: accounts.restarted("a"),
    "ran_elsewhere": lambda accounts, _: accounts.ran_elsewhere(SESSIONS[1]),
    "add_instance": lambda accounts, _: accounts.add_instance("d"),
    "remove_instance": lambda accounts, _: accounts.remove_instance("a"),
    "settle": lambda accounts, _: accounts.settle(),
}


def after_twenty_turns() -> tuple[SessionAccounts, SessionAccounts]:
    """Accounts that counted each turn at once, and those where most still wait."""
    at_once, batched = accounts_of(deferred=False), accounts_of(deferred=True)
    for accounts in (at_once, batched):
        for second in range(10):
            for number, session in enumerate(SESSIONS[:2]):
                turn = send(accounts, second, session, NAMES[number], float(second))
                if second < 9 or number:
                    accounts.ended(turn, second + 0.5, 0 if second % 2 else 16, MODEL)
            if second == 2:
                accounts.settle()
    assert batched._waiting
    return at_once, batched


@pytest.mark.parametrize("name", READERS)
def test_each_reader_alone_finds_every_turn_counted(name: str) -> None:
    at_once, batched = after_twenty_turns()
    assert READERS[name](batched, 10.0) == READERS[name](at_once, 10.0)


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_alone_finds_every_turn_counted(name: str) -> None:
    at_once, batched = after_twenty_turns()
    for accounts in (at_once, batched):
        CHANGES[name](accounts, 10.0)
    assert batched.homes.contexts() == at_once.homes.contexts()


def send(accounts: SessionAccounts, number: int, session: str | None, instance: str, now_s: float) -> Turn:
    hashes = PROMPT[: number % 30 * 3 + 1]
    request = RequestView(f"{session}-{number}", 16 * len(hashes), hashes, 16.0, session)
    return accounts.sent(request, instance, 16 * (number % 3), MODEL, now_s)


@pytest.mark.parametrize("seed", range(40))
def test_turns_counted_in_batches_are_counted_as_if_at_once(seed: int) -> None:
    draw, now_s = random.Random(seed), 0.0
    at_once, batched = accounts_of(deferred=False), accounts_of(deferred=True)
    in_flight: list[tuple[Turn, Turn]] = []
    for number in range(300):
        now_s += draw.choice((0.0, 0.1, 2.0, 6.0))
        action = draw.random()
        if action < 0.5:
            session, instance = draw.choice((*SESSIONS, None)), draw.choice((*NAMES, "gone"))
            in_flight.append(
                (send(at_once, number, session, instance, now_s), send(batched, number, session, instance, now_s))
            )
        elif action < 0.94 and in_flight:
            one, other = in_flight.pop(draw.randrange(len(in_flight)))
            at_s, cached = draw.choice((now_s, now_s, None)), draw.choice((None, 0, 16, 32))
            at_once.ended(one, at_s, cached, MODEL)
            batched.ended(other, at_s, cached, MODEL)
        elif action < 0.96:
            keep_s = draw.choice((5.0, 10.0))
            at_once.set_keep(keep_s, now_s)
            batched.set_keep(keep_s, now_s)
        elif action < 0.97:
            batched.defer(draw.random() < 0.7)
        elif action < 0.98:
            at_once.restarted("a")
            batched.restarted("a")
        else:
            assert everything(batched, now_s) == everything(at_once, now_s)
    assert everything(batched, now_s) == everything(at_once, now_s)


def test_few_turns_wait_to_be_counted() -> None:
    accounts = accounts_of(deferred=True)
    turns = []
    for number in range(5 * DEFERRED):
        turns.append(send(accounts, number, "s0", "a", 0.0))
        assert len(accounts._waiting) < 2 * DEFERRED
    for turn in turns:
        accounts.ended(turn, 0.0, None, MODEL)
        assert len(accounts._waiting) < DEFERRED


class Fleet:
    """Routing sessions over three instances whose requests are served one after the other."""

    def __init__(self, routing: RoutingSession) -> None:
        self.routing = routing
        for name in NAMES:
            routing.state.add_instance(name)
            routing.state.set_capacity(name, 100_000, 16.0)

    @classmethod
    def with_rule(cls, rule: NeverHold | WorkingSet) -> Fleet:
        return cls(RoutingSession(FleetState(), Warm(), Never(), ClassThresholds(), admission=rule))

    def serve(self, number: int, now_s: float, *, finish: bool = True) -> Routed:
        hashes = tuple(range(number % 4 * 1_000, number % 4 * 1_000 + 10 + number))
        request = RequestView(f"r{number}", 16 * len(hashes), hashes, 16.0, SESSIONS[number % 4])
        self.routing.offer(request, NAMES, now_s)
        routed = self.routing.route(request, NAMES, (), now_s)
        if finish:
            self.finish(routed, now_s + 0.5)
        return routed

    def finish(self, routed: Routed, now_s: float) -> None:
        routed.commitment.release(now_s, 0.0, routed.decision.cached_tokens)


def test_a_rule_that_is_switched_to_sees_the_sessions_as_if_it_had_been_there_from_the_start() -> None:
    late, early = Fleet.with_rule(NeverHold()), Fleet.with_rule(WorkingSet())
    for fleet in (late, early):
        for number in range(DEFERRED + 5):
            fleet.serve(number, float(number))
        fleet.serve(40, 40.0, finish=False)
    late.routing.set_admission(WorkingSet(), 300.0, 41.0)
    seen: list[list[tuple[SessionView, AdmissionView]]] = []
    for fleet in (late, early):
        views: list[tuple[SessionView, AdmissionView]] = []
        fleet.routing.gate.on_offer = lambda _, session, view, __, views=views: views.append((session, view))
        for number in range(41, 45):
            fleet.serve(number, float(number))
        seen.append(views)
    assert len(seen[0]) == 4
    assert [session for session, _ in seen[0]] == [session for session, _ in seen[1]]
    assert [view._replace(longest_hold_s=0.0) for _, view in seen[0]] == [
        view._replace(longest_hold_s=0.0) for _, view in seen[1]
    ]


def test_shadow_rules_of_a_fleet_that_never_holds_see_every_turn() -> None:
    fleet = Fleet.with_rule(NeverHold())
    views: list[AdmissionView] = []
    fleet.routing.gate.on_offer = lambda _, __, view, ___: views.append(view)
    for number in range(3):
        fleet.serve(number, float(number), finish=False)
        request = RequestView("seen", 16, session_id="other")
        fleet.routing.gate.observe_offer(request, fleet.routing.state.room(NAMES, ONE_PART), float(number))
    assert [view.active_sessions for view in views] == [1, 2, 3]


@pytest.mark.parametrize("rule", [NeverHold(), WorkingSet()])
def test_a_request_that_is_released_twice_ends_once(rule: NeverHold | WorkingSet) -> None:
    fleet = Fleet.with_rule(rule)
    first, _ = fleet.serve(0, 0.0, finish=False), fleet.serve(4, 0.0, finish=False)
    fleet.finish(first, 1.0)
    fleet.finish(first, 2.0)
    accounts = fleet.routing.state.accounts
    assert (accounts.active_sessions, accounts.kept_sessions) == (1, 0)
