"""A gate that does not ask about requests held for certain sends the same ones as a gate that asks about all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.accounts import SessionAccounts
from policies.admission.base import AdmissionReason, AdmissionRule, AdmissionView, Admit, Hold, InstanceUse, SessionView
from policies.admission.gate import AdmissionGate
from policies.admission.line import Held
from policies.admission.residency import Residency
from policies.admission.room import ONE_PART, Room
from policies.admission.session_cap import SessionCap
from policies.admission.working_set import WorkingSet
from policies.state import Commitment, FleetState
from policies.types import PolicyFailure, RequestView
from tests.policies.admission.sessions import MODEL
from tests.policies.builders import decision_for

BLOCK = 16
POOL_BLOCKS = 60
NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Step:
    """A turn of a session that comes after ``wait_s``; before it, the ``ends``-th request in flight ends."""

    session: int
    blocks: int
    wait_s: float
    ends: int | None


class Fleet:
    """A fleet whose turns pass a gate; each sent turn is placed by its number."""

    def __init__(self, rule: AdmissionRule, *, explains: bool = True) -> None:
        self.state = FleetState()
        for name in NAMES:
            self.state.add_instance(name)
            self.state.set_capacity(name, POOL_BLOCKS * BLOCK, BLOCK)
        self.gate = AdmissionGate(rule, self.state.accounts, 40.0, explains=explains)
        self.sent: list[tuple[str, Admit, float]] = []
        self.flying: list[Commitment] = []
        self._turns: dict[int, int] = {}

    def play(self, step: Step, now_s: float) -> None:
        if step.ends is not None and self.flying:
            self.flying.pop(step.ends % len(self.flying)).release(now_s)
        self._look(now_s)
        turn = self._turns[step.session] = self._turns.get(step.session, 0) + 1
        first = step.session * 1_000
        hashes = range(first, first + step.blocks)
        name = f"{step.session}-{turn}"
        request = RequestView(name, step.blocks * BLOCK, hashes, float(BLOCK), session_id=str(step.session))
        answer = self.gate.offer(request, self.state.room(NAMES, ONE_PART), now_s)
        if isinstance(answer, Held):
            self._look(now_s)
        else:
            self._send(request, answer, now_s)

    def _look(self, now_s: float) -> None:
        while (held := self.gate.examine(self.state.room(NAMES, ONE_PART), now_s)) is not None:
            assert held.admitted is not None
            self._send(held.request, held.admitted, now_s)

    def _send(self, request: RequestView, admitted: Admit, now_s: float) -> None:
        self.sent.append((request.request_id, admitted, now_s))
        snapshot = self.state.snapshot(request, now_s, NAMES)
        instance = NAMES[len(self.sent) % len(NAMES)]
        self.flying.append(self.state.commit(request, snapshot, decision_for(request, instance), now_s))


@dataclass(frozen=True, slots=True)
class Unbounded:
    """A rule that has to be asked about every request."""

    rule: AdmissionRule
    name: ClassVar[str] = "unbounded"

    @property
    def keep_s(self) -> float:
        return self.rule.keep_s

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        return self.rule.admit(request, session, fleet)


RULES = [
    WorkingSet(),
    WorkingSet(least_prefilling=0.0, spare_contexts=0.0, kept_share=1.0),
    WorkingSet(least_prefilling=0.0, keep_s=6.0),
    SessionCap(sessions=4),
]
STEPS = st.lists(
    st.builds(
        Step,
        session=st.integers(0, 9),
        blocks=st.integers(10, 50),
        wait_s=st.sampled_from([0.0, 0.5, 1.0, 3.0, 5.0]),
        ends=st.sampled_from([None, 0, 0, 1, 2]),
    ),
    min_size=20,
    max_size=80,
)


@pytest.mark.parametrize("rule", RULES, ids=["default", "often", "briefly", "cap"])
@given(STEPS)
@settings(max_examples=30, deadline=None)
def test_the_same_requests_are_sent_as_by_asking_about_all(rule: WorkingSet | SessionCap, steps: list[Step]) -> None:
    asking = Fleet(Unbounded(rule))
    selecting = {"places": Fleet(rule, explains=True), "no places": Fleet(rule, explains=False)}
    fleets = (asking, *selecting.values())
    now_s = 0.0
    for step in steps:
        now_s += step.wait_s
        for fleet in fleets:
            fleet.play(step, now_s)
            fleet.state.accounts.expire(now_s)  # contexts are as of the last call with a time, which need not be now
        contexts = asking.state.accounts.contexts()
        for name, fleet in selecting.items():
            assert fleet.state.accounts.contexts() == contexts, name
    for name, fleet in selecting.items():
        assert fleet.sent == asking.sent, name
        assert len(fleet.gate) == len(asking.gate), name
        assert fleet.state.accounts.contexts() == asking.state.accounts.contexts(), name
        assert fleet.state.accounts.gaps.return_share == asking.state.accounts.gaps.return_share, name


class Evictions(Residency):
    """Calls contexts evicted once ``all`` is set."""

    def __init__(self) -> None:
        self.all = False

    def evicted(self, request: RequestView, before_tokens: int, now_s: float) -> bool:
        return self.all


@dataclass(frozen=True, slots=True)
class Contexts:
    """Sends what fits beside the contexts in flight and kept."""

    tokens: int = 10_000
    keep_s: float = 60.0
    name: ClassVar[str] = "contexts"

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if request.prompt_tokens <= self.longest_sent(fleet, session.kept):
            return Admit(AdmissionReason.ROOM)
        return Hold(AdmissionReason.WORKING_SET)

    def longest_sent(self, fleet: AdmissionView, kept: bool) -> float:
        return self.tokens - fleet.active_tokens - fleet.kept_tokens


@pytest.mark.parametrize("rule", [Contexts(), Unbounded(Contexts())], ids=["bound", "no-bound"])
def test_room_that_an_evicted_context_leaves_goes_to_those_behind(rule: AdmissionRule) -> None:
    evictions, room = Evictions(), Room(10_000, 1)
    accounts = SessionAccounts(residency=evictions)
    gate = AdmissionGate(rule, accounts)
    first = RequestView("k-1", 6_000, range(375), 16.0, "k")
    accounts.ended(accounts.sent(first, "a", 0, MODEL, 0.0), 1.0, None, MODEL)
    assert isinstance(gate.offer(RequestView("longer", 9_900), room, 2.0), Held)
    assert isinstance(gate.offer(RequestView("k-2", 9_500, range(593), 16.0, "k"), room, 2.0), Held)
    assert gate.examine(room, 2.0) is None
    evictions.all = True  # as by a request that is sent at the same instant
    found = gate.examine(room, 2.0)
    assert found is not None
    assert found.request.request_id == "longer"


class Misleading(Contexts):
    """Its bound fails, or is none."""

    answers: ClassVar[list[object]] = [ValueError("no bound"), "many", float("nan"), None]

    def longest_sent(self, fleet: AdmissionView, kept: bool) -> float:
        answer = self.answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        return Admit(AdmissionReason.ROOM) if session.waited_s else Hold(AdmissionReason.WORKING_SET)


@pytest.mark.parametrize("answer", [ValueError("no bound"), "many", None, float("nan")], ids=str)
def test_a_rule_without_a_usable_bound_is_asked_about_every_request(answer: object) -> None:
    Misleading.answers = [answer] * 4
    gate = AdmissionGate(Misleading(), SessionAccounts())
    failures: list[PolicyFailure] = []
    gate.guard.on_failure = failures.append
    held = gate.offer(RequestView("r-1", 9_900), Room(10_000, 1), 0.0)
    assert gate.examine(Room(10_000, 1), 1.0) is held
    assert bool(failures) is not isinstance(answer, float)
    assert all(failure.name == "contexts" for failure in failures)


def test_the_failure_of_a_bound_is_raised_where_nobody_listens() -> None:
    Misleading.answers = [ValueError("no bound")]
    gate = AdmissionGate(Misleading(), SessionAccounts())
    gate.offer(RequestView("r-1", 9_900), Room(10_000, 1), 0.0)
    with pytest.raises(ValueError, match="no bound"):
        gate.examine(Room(10_000, 1), 1.0)


def test_reasons_are_those_of_now_and_change_nothing() -> None:
    fleet = Fleet(WorkingSet(least_prefilling=0.0))
    for number in range(8):
        fleet.play(Step(number, 40, 0.0, None), 0.0)
    assert len(fleet.gate) == 5
    room, before = fleet.state.room(NAMES, ONE_PART), fleet.state.accounts.contexts()
    line = fleet.gate.line(20.0)
    first = fleet.gate.reasons(3, room, 20.0)
    assert [held for held, _ in first] == line[:3]
    assert [hold.behind for _, hold in first] == [0, 1, 2]
    assert [hold.behind_in_tenant for _, hold in first] == [0, 1, 2]
    waits_s = [hold.expected_wait_s for _, hold in first]
    assert waits_s == sorted(waits_s)
    assert waits_s[0] > 0
    # Nothing was asked for, nothing has changed: the same again, and nobody has been sent.
    assert fleet.gate.reasons(3, room, 20.0) == first
    assert fleet.state.accounts.contexts() == before
    assert fleet.gate.line(20.0) == line
    # The first would be sent at the next look: it keeps the reason of its offer.
    fleet.flying.pop().release(21.0)
    assert fleet.gate.reasons(1, fleet.state.room(NAMES, ONE_PART), 60.0)[0] == (line[0], line[0].hold)
    assert len(fleet.gate.reasons(9, room, 20.0)) == 5


TOKENS = st.integers(0, 2_000_000)
USES = st.lists(
    st.builds(
        InstanceUse,
        instance=st.sampled_from(NAMES),
        pool_tokens=st.sampled_from([0, 500_000, 1_000_000]),
        active_sessions=st.integers(0, 3),
        active_tokens=TOKENS,
        kept_sessions=st.integers(0, 3),
        kept_tokens=TOKENS,
    ),
    min_size=1,
    max_size=4,
)


@given(
    USES,
    st.integers(0, 3),
    st.floats(0.0, 1.0),
    st.sampled_from([0.0, 0.3, 0.75]),
    st.integers(0, 1_500_000),
    st.booleans(),
    st.booleans(),
)
def test_the_working_set_holds_every_prompt_above_its_bound(
    uses: list[InstanceUse], prefilling: int, return_share: float, spare: float, tokens: int, near: bool, kept: bool
) -> None:
    pools = [use.pool_tokens for use in uses]
    fleet = AdmissionView(
        pool_tokens=sum(pools) if all(pools) else 0,
        active_sessions=sum(use.active_sessions for use in uses),
        active_tokens=sum(use.active_tokens for use in uses),
        kept_sessions=sum(use.kept_sessions for use in uses),
        kept_tokens=sum(use.kept_tokens for use in uses),
        return_share=return_share,
        instances=len(uses),
        prefilling=prefilling,
        by_instance=tuple(uses),
    )
    rule = WorkingSet(spare_contexts=spare)
    longest = rule.longest_sent(fleet, kept)
    if near and 1.0 < longest < 1e9:
        tokens = int(longest) + 1
    answer = rule.admit(RequestView("r", tokens), SessionView(waited_s=1.0, kept=kept), fleet)
    if tokens > longest:
        assert isinstance(answer, Hold)
    elif longest == float("inf"):
        assert isinstance(answer, Admit)
