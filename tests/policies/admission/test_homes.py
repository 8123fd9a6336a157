"""Contexts by instance: where each session counts, and the routing step that sends it where there is room."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.base import (
    NO_INSTANCES,
    AdmissionReason,
    AdmissionView,
    Admit,
    Hold,
    InstanceUse,
    SessionView,
    checked_answer,
)
from policies.admission.homes import RemoteContexts, sums_of
from policies.admission.line import Held
from policies.classes import ClassThresholds
from policies.offload.never import Never
from policies.registry import make_routing
from policies.session import RoutingSession
from policies.state import FleetState
from policies.types import NoCandidateError, RequestView
from tests.policies.admission.sessions import Sessions

BLOCK = 16
POOL = 10_000
NAMES = ("a", "b", "c")


def accounts_of(*names: str, keep_s: float = 10.0) -> Sessions:
    accounts = Sessions(keep_s=keep_s)
    for name in names:
        accounts.add_instance(name)
    return accounts


def uses(accounts: Sessions, *names: str) -> list[tuple[int, int, int, int]]:
    """Sessions and tokens in flight, and kept, by instance."""
    return [tuple(use[2:6]) for use in accounts.homes.uses([(name, POOL, 0) for name in names])]  # type: ignore[misc]


def test_a_session_counts_where_its_last_request_was_sent() -> None:
    accounts = accounts_of("a", "b")
    accounts.begin("s", 1_000, 0.0, "a")
    assert uses(accounts, "a", "b") == [(1, 1_000, 0, 0), (0, 0, 0, 0)]
    accounts.begin("s", 3_000, 1.0, "b")
    assert uses(accounts, "a", "b") == [(0, 0, 0, 0), (1, 3_000, 0, 0)]
    accounts.end("s", 2.0)
    accounts.end("s", 2.0)
    assert uses(accounts, "a", "b") == [(0, 0, 0, 0), (0, 0, 1, 3_000)]
    accounts.begin("s", 3_500, 3.0, "a")
    assert uses(accounts, "a", "b") == [(1, 3_500, 0, 0), (0, 0, 0, 0)]


def test_contexts_of_other_replicas_add_to_those_on_an_instance() -> None:
    accounts = accounts_of("a", "b")
    accounts.begin("s", 1_000, 0.0, "a")
    accounts.begin("t", 500, 0.0, "a")
    accounts.end("t", 1.0)
    accounts.homes.set_elsewhere([{"a": (2, 70, 5, 300)}, {"a": (1, 30, 2, 100), "b": (3, 9, 4, 8)}])
    assert uses(accounts, "a", "b") == [(4, 1_100, 8, 900), (3, 9, 4, 8)]
    assert accounts.homes.sums_elsewhere() == (6, 109, 11, 408)
    assert sums_of(accounts.homes.uses([("a", POOL, 0), ("b", POOL, 0)])) == (7, 1_109, 12, 908)
    accounts.homes.set_elsewhere([])
    assert uses(accounts, "a", "b") == [(1, 1_000, 1, 500), (0, 0, 0, 0)]


def test_time_that_other_replicas_lost_is_a_share_of_that_of_the_instances() -> None:
    remote = RemoteContexts(lost_shares={"a": 0.5, "b": 0.25})
    assert remote.lost_share(3) == 0.25
    assert remote.lost_share(2, ["b", "c"]) == 0.125
    assert (remote.lost_share(0), RemoteContexts().lost_share(3)) == (0.0, 0.0)


def test_a_restarted_instance_keeps_no_context() -> None:
    accounts = accounts_of("a", "b")
    for session, instance in (("s", "a"), ("t", "b"), ("u", "a")):
        accounts.begin(session, 1_000, 0.0, instance)
    accounts.end("s", 1.0)
    accounts.end("t", 1.0)
    accounts.restarted("a")
    assert uses(accounts, "a", "b") == [(1, 1_000, 0, 0), (0, 0, 1, 1_000)]
    assert (accounts.kept_sessions, accounts.kept_tokens) == (1, 1_000)
    assert accounts.view("s", 1.0) == SessionView(0, 1_000, 0.0, 1)


def test_sessions_of_a_removed_instance_are_on_none_of_those_left() -> None:
    accounts = accounts_of("a", "b")
    accounts.begin("s", 1_000, 0.0, "a")
    accounts.remove_instance("a")
    accounts.add_instance("a")
    assert uses(accounts, "a") == [(0, 0, 0, 0)]
    accounts.end("s", 1.0)
    accounts.begin("s", 1_200, 2.0, "a")
    assert uses(accounts, "a") == [(1, 1_200, 0, 0)]
    accounts.begin("unknown", 10, 2.0)
    assert uses(accounts, "a", "b") == [(1, 1_200, 0, 0), (0, 0, 0, 0)]


STEPS = st.tuples(
    st.sampled_from(["s", "t", "u", "v"]),
    st.sampled_from(["begin", "begin", "end", "keep"]),
    st.sampled_from(NAMES),
    st.integers(1, 1_000),
    st.floats(0.0, 20.0, allow_subnormal=False),
)


@given(st.lists(STEPS, max_size=60))
def test_instances_add_up_to_the_fleet(steps: list[tuple[str, str, str, int, float]]) -> None:
    accounts, now_s = accounts_of(*NAMES), 0.0
    for session, action, instance, tokens, passed_s in steps:
        now_s += passed_s
        if action == "begin":
            accounts.begin(session, tokens, now_s, instance)
        elif action == "end":
            if accounts.view(session, now_s).in_flight:
                accounts.end(session, now_s)
        else:
            accounts.set_keep(float(tokens % 30), now_s)
        accounts.expire(now_s)
        sums = [sum(column) for column in zip(*uses(accounts, *NAMES), strict=True)]
        assert sums == [
            accounts.active_sessions,
            accounts.active_tokens,
            accounts.kept_sessions,
            accounts.kept_tokens,
        ]


class Chosen:
    """Admits everything to fixed instances."""

    name: ClassVar[str] = "chosen"
    keep_s = 30.0

    def __init__(self, *instances: str) -> None:
        self.admit_to = frozenset(instances)
        self.seen: list[AdmissionView] = []

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        self.seen.append(fleet)
        return Admit(AdmissionReason.ROOM, self.admit_to)


class Fleet:
    """A routing session over three instances."""

    def __init__(self, policy: str = "least_loaded", *admit_to: str) -> None:
        self.state = FleetState()
        for name in NAMES:
            self.state.add_instance(name)
            self.state.set_capacity(name, POOL, BLOCK)
        self.rule = Chosen(*admit_to)
        self.routing = RoutingSession(self.state, make_routing(policy), Never(), ClassThresholds(), admission=self.rule)

    def send(
        self,
        session: str,
        blocks: int,
        available: tuple[str, ...] = NAMES,
        first: int | None = None,
        *,
        done: bool = False,
    ) -> str:
        first = ord(session) * 1_000 if first is None else first
        request = RequestView(session, blocks * BLOCK, range(first, first + blocks), float(BLOCK), session_id=session)
        answer = self.routing.offer(request, available, 0.0)
        assert not isinstance(answer, Held)
        routed = self.routing.route(request, available, (), 0.0, answer.instances)
        if done:
            routed.commitment.release(0.0)
        return routed.decision.decode_on


@pytest.mark.parametrize("policy", ["warm", "least_loaded", "round_robin", "session_sticky"])
def test_a_session_is_sent_where_the_rule_found_room(policy: str) -> None:
    fleet = Fleet(policy, "b")
    assert [fleet.send(session, 10) for session in "stuv"] == ["b"] * 4
    assert fleet.rule.seen[-1].by_instance == (
        InstanceUse("a", POOL),
        InstanceUse("b", POOL, 3, 3 * 160, prefilling=3),
        InstanceUse("c", POOL),
    )


def test_an_instance_that_has_most_of_the_prompt_cached_may_be_chosen_without_room() -> None:
    fleet = Fleet("warm", "a")
    assert fleet.send("s", 100, done=True) == "a"
    fleet.rule.admit_to = frozenset({"b"})
    assert fleet.send("t", 110, first=ord("s") * 1_000, done=True) == "a"
    assert fleet.send("u", 300, first=ord("s") * 1_000) == "b"


def test_where_no_instance_with_room_is_left_all_others_may_be_chosen() -> None:
    fleet = Fleet("least_loaded", "b")
    assert {fleet.send(session, 10, ("a", "c")) for session in "st"} == {"a", "c"}
    with pytest.raises(NoCandidateError):
        fleet.send("u", 10, ())


def test_an_explanation_decides_among_the_same_instances_and_shows_all() -> None:
    fleet = Fleet()
    request = RequestView("q", 100, session_id="q")
    policies = {"least_loaded": make_routing("least_loaded")}
    whole, decisions = fleet.routing.explain(request, policies, NAMES, (), 0.0, frozenset({"c"}))
    assert [view.instance for view in whole.instances] == list(NAMES)
    assert decisions["least_loaded"].decode_on == "c"


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (Admit(AdmissionReason.ROOM, ["a"]), "instances are no frozenset"),  # type: ignore[arg-type]
        (Hold(AdmissionReason.WORKING_SET, 1, 1, own_tokens=1.5), "tokens are no integers"),  # type: ignore[arg-type]
        (Hold(AdmissionReason.WORKING_SET, 1, 1, free_tokens=None), "tokens are no integers"),  # type: ignore[arg-type]
    ],
)
def test_invalid_answers_are_refused(answer: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        checked_answer("third_party", answer)


def test_an_answer_that_names_no_instances_is_valid() -> None:
    answer = Admit(AdmissionReason.ROOM)
    assert checked_answer("third_party", answer) is answer
    assert answer.instances is NO_INSTANCES
