"""Parts of a fleet without a common model: each is judged as if it were a fleet of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.base import AdmissionReason, AdmissionRule, AdmissionView, Admit, Hold, SessionView
from policies.admission.elsewhere import HeldElsewhere
from policies.admission.gate import AdmissionGate
from policies.admission.line import Held
from policies.admission.room import ONE_PART, WHOLE, Parts, Room
from policies.admission.session_cap import SessionCap
from policies.admission.working_set import WorkingSet
from policies.costs.formulas import PrefillModel
from policies.state import Commitment, FleetState
from policies.types import RequestView, Tenant
from tests.policies.admission.test_selection import Unbounded
from tests.policies.builders import decision_for

BLOCK = 16
POOL_BLOCKS = 60
INSTANCES = {"a": ("a0", "a1"), "b": ("b0", "b1", "b2")}
PARTS = Parts.of_fleet({name: [model] for model, names in INSTANCES.items() for name in names})

FLEETS = st.dictionaries(
    st.sampled_from([f"i{number}" for number in range(8)]), st.frozensets(st.sampled_from("abcdefgh"), max_size=3)
)


@given(FLEETS)
def test_parts_are_disjoint_and_have_no_model_in_common(fleet: dict[str, frozenset[str]]) -> None:
    parts = Parts.of_fleet(fleet)
    if not parts.each:
        assert all(parts.of(model) is WHOLE for model in "abcdefgh")
        return
    assert sorted(name for part in parts.each for name in part) == sorted(name for name in fleet if fleet[name])
    served = [frozenset[str]().union(*(fleet[name] for name in part)) for part in parts.each]
    assert sum(map(len, served)) == len(frozenset[str]().union(*served))
    for model in "abcdefgh":
        serving = {name for name, models in fleet.items() if model in models}
        part = parts.of(model)
        assert part is WHOLE if not serving else serving <= part


@given(FLEETS)
def test_instances_are_one_part_only_if_models_connect_them(fleet: dict[str, frozenset[str]]) -> None:
    for part in Parts.of_fleet(fleet).each:
        reached, models = {min(part)}, set(fleet[min(part)])
        while more := {name for name in part - reached if fleet[name] & models}:
            reached |= more
            models.update(*(fleet[name] for name in more))
        assert reached == part


def test_a_fleet_of_one_model_or_none_is_one_part() -> None:
    for fleet in ({}, {"a": ["m"]}, {"a": ["m", "n"], "b": ["n"]}, {"a": ["m"], "restarted": []}):
        assert Parts.of_fleet(fleet).each == ()
    assert ONE_PART.of("m") is WHOLE
    assert PARTS.of("c") is WHOLE
    assert PARTS.of(None) is WHOLE


@dataclass(frozen=True)
class Step:
    """A turn of a session for a model, after ``wait_s``; before it, a request for ``ends`` ends."""

    model: str
    session: int
    blocks: int
    wait_s: float
    ends: str | None


class Fleet:
    """Instances whose turns pass a gate; each turn that is sent is placed by its number among those for its model."""

    def __init__(self, rule: AdmissionRule, instances: Collection[str], parts: Parts = ONE_PART) -> None:
        self.instances = instances
        self.state = FleetState()
        for name in instances:
            self.state.add_instance(name)
            self.state.set_capacity(name, POOL_BLOCKS * BLOCK, BLOCK)
        self.gate = AdmissionGate(rule, self.state.accounts, 40.0)
        self.parts = parts
        self.sent: dict[str, list[tuple[str, Admit, float]]] = {model: [] for model in INSTANCES}
        self.waits: dict[str, list[tuple[str, int, float]]] = {model: [] for model in INSTANCES}
        self.flying: dict[str, list[Commitment]] = {model: [] for model in INSTANCES}
        self._turns: dict[tuple[str, int], int] = {}

    def end(self, model: str, now_s: float) -> None:
        if self.flying[model]:
            self.flying[model].pop(0).release(now_s)

    def room(self) -> Room:
        return self.state.room(self.instances, self.parts)

    def look(self, now_s: float) -> None:
        while (held := self.gate.examine(self.room(), now_s)) is not None:
            assert held.admitted is not None
            self._send(held.request, held.request.model or "", held.admitted, now_s)

    def arrive(self, step: Step, now_s: float) -> None:
        turn = self._turns[step.model, step.session] = self._turns.get((step.model, step.session), 0) + 1
        first = (ord(step.model) * 10 + step.session) * 1_000
        hashes = tuple(range(first, first + step.blocks))
        name, session = f"{step.model}{step.session}-{turn}", f"s{step.session}"  # sessions use both models
        request = RequestView(name, step.blocks * BLOCK, hashes, float(BLOCK), session, model=step.model)
        answer = self.gate.offer(request, self.room(), now_s)
        if isinstance(answer, Held):
            self.waits[step.model].append((request.request_id, answer.hold.behind, answer.hold.expected_wait_s))
        else:
            self._send(request, step.model, answer, now_s)

    def _send(self, request: RequestView, model: str, admitted: Admit, now_s: float) -> None:
        self.sent[model].append((request.request_id, admitted, now_s))
        own = INSTANCES[model]
        snapshot = self.state.snapshot(request, now_s, own)
        decision = decision_for(request, own[len(self.sent[model]) % len(own)])
        self.flying[model].append(self.state.commit(request, snapshot, decision, now_s))


# Gaps between turns and the share of turns that are followed are learned of the fleet as a whole, so none is kept here.
RULES = [
    WorkingSet(keep_s=0.0),
    WorkingSet(keep_s=0.0, least_prefilling=0.0),
    Unbounded(WorkingSet(keep_s=0.0, least_prefilling=0.0, spare_contexts=0.0)),
    SessionCap(sessions=2, keep_s=0.0),
]
STEPS = st.lists(
    st.builds(
        Step,
        model=st.sampled_from("ab"),
        session=st.integers(0, 7),
        blocks=st.integers(10, 50),
        wait_s=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        ends=st.sampled_from([None, "a", "b"]),
    ),
    min_size=20,
    max_size=80,
)


@pytest.mark.parametrize("rule", RULES, ids=["default", "often", "unbounded", "cap"])
@given(STEPS)
@settings(max_examples=30, deadline=None)
def test_each_part_is_judged_as_if_it_were_alone(rule: AdmissionRule, steps: list[Step]) -> None:
    alone = {model: Fleet(rule, names) for model, names in INSTANCES.items()}
    both = Fleet(rule, [name for names in INSTANCES.values() for name in names], PARTS)
    now_s = 0.0
    for step in steps:
        now_s += step.wait_s
        for fleet in (both, *alone.values()):
            if step.ends is not None:
                fleet.end(step.ends, now_s)
            fleet.look(now_s)
        for fleet in (both, alone[step.model]):
            fleet.arrive(step, now_s)
    for model, fleet in alone.items():
        assert both.sent[model] == fleet.sent[model]
        assert both.waits[model] == fleet.waits[model]
    assert len(both.gate) == sum(len(fleet.gate) for fleet in alone.values())


def test_without_parts_overload_of_one_model_holds_requests_for_another() -> None:
    """The answers of the rule without them, so that the test above can fail."""
    found = []
    for parts in (ONE_PART, PARTS):
        fleet = Fleet(SessionCap(sessions=2, keep_s=0.0), ["a0", "a1", "b0", "b1", "b2"], parts)
        for number, model in enumerate("aaab"):
            fleet.arrive(Step(model, number, 10, 0.0, None), 0.0)
        found.append(len(fleet.sent["b"]))
    assert found == [0, 1]


def fleet_with_contexts(rule: AdmissionRule) -> Fleet:
    """Two sessions that decode on each of the instances of one model and none on those of the other."""
    fleet = Fleet(rule, ["a0", "a1", "b0", "b1", "b2"], PARTS)
    for number in range(4):
        fleet.arrive(Step("a", number, 25, 0.0, None), 0.0)
        fleet.flying["a"][-1].decode.first_token()
    assert len(fleet.sent["a"]) == 4
    return fleet


def offer(fleet: Fleet, model: str, blocks: int) -> Admit | Held:
    request = RequestView(f"new-{model}", blocks * BLOCK, session_id=f"new-{model}", model=model)
    return fleet.gate.offer(request, fleet.room(), 1.0)


ROOMY = WorkingSet(least_prefilling=0.0, keep_s=0.0, spare_contexts=0.0, lost_share=0.01)
"""A context of 6 blocks fits each instance beside its two, and a second one does not."""


def test_requests_that_other_replicas_hold_count_in_their_part_only() -> None:
    fleet = fleet_with_contexts(ROOMY)
    fleet.gate.elsewhere.replace([HeldElsewhere("other", number, 90, 0.0, model="b") for number in range(3)])
    assert offer(fleet, "a", 6) == Admit(AdmissionReason.ROOM)
    fleet.gate.elsewhere.replace([HeldElsewhere("other", number, 90, 0.0, model="a") for number in range(2)])
    assert isinstance(offer(fleet, "a", 6), Held)
    assert offer(fleet, "b", 6) == Admit(AdmissionReason.ROOM)


def test_losses_count_in_the_part_that_recomputes() -> None:
    fleet = fleet_with_contexts(ROOMY)
    assert offer(fleet, "a", 6) == Admit(AdmissionReason.ROOM)
    for instance, instances in (("b0", frozenset[str]()), ("a0", frozenset({"a0", "a1"}))):
        fleet.state.accounts._losses.sent(instance, PrefillModel(), 100_000, 100_000, 0, 1.0)
        assert offer(fleet, "a", 6) == Admit(AdmissionReason.ROOM, instances)


def test_losses_and_contexts_of_other_replicas_count_in_their_part_only() -> None:
    fleet = fleet_with_contexts(ROOMY)
    accounts = fleet.state.accounts
    accounts.set_remote([{"b0": (9, 9_000, 0, 0)}], {"b0": 3.0}, 0)
    assert offer(fleet, "a", 6) == Admit(AdmissionReason.ROOM)
    accounts.set_remote([{"a0": (1, 100, 0, 0)}], {"a0": 3.0}, 0)
    assert offer(fleet, "a", 6) == Admit(AdmissionReason.ROOM, frozenset({"a1"}))


def test_the_flow_of_held_requests_survives_a_change_of_their_part() -> None:
    fleet = Fleet(SessionCap(sessions=1, keep_s=0.0), ["a0", "a1", "b0", "b1", "b2"], PARTS)
    for number in range(8):
        fleet.arrive(Step("a", number, 10, 0.0, None), 0.0)
    for second in (10.0, 20.0, 30.0):
        fleet.end("a", second)
        fleet.look(second)
    for number, parts in enumerate((PARTS, Parts.of_fleet({"a0": ["a"], "b0": ["b"]}), ONE_PART, PARTS), 8):
        fleet.parts = parts
        fleet.arrive(Step("a", number, 10, 0.0, None), 30.0)
        _, behind, expected_s = fleet.waits["a"][-1]
        assert expected_s == pytest.approx((behind + 1) * 160 * 30.0 / (3 * 160))


def test_a_flow_ends_with_the_line_of_its_part_however_the_parts_change() -> None:
    """Else a request much later would seem to wait for what has not been admitted since."""
    fleet = Fleet(SessionCap(sessions=1, keep_s=0.0), ["a0", "a1", "b0", "b1", "b2"])
    for number in range(2):
        fleet.arrive(Step("a", number, 10, 0.0, None), 0.0)
    fleet.parts = PARTS
    fleet.end("a", 1.0)
    fleet.look(1.0)
    assert not len(fleet.gate)
    fleet.parts = ONE_PART
    for number in range(2, 5):
        fleet.arrive(Step("a", number, 10, 0.0, None), 100.0)
    assert [expected_s for _, _, expected_s in fleet.waits["a"]] == [0.0] * 4


def test_tenants_of_a_part_take_turns_as_if_it_were_alone() -> None:
    lines = []
    for others in (0, 40):
        fleet = Fleet(SessionCap(sessions=1, keep_s=0.0), ["a0", "a1", "b0", "b1", "b2"], PARTS)
        for model in "ab":
            fleet.arrive(Step(model, 0, 10, 0.0, None), 0.0)
        waiting = [("a", "x", 320)] * others + [("b", "x", 480), ("b", "y", 12_800)]
        for number, (model, tenant, tokens) in enumerate(waiting):
            name, of = f"{tenant}{number - others}", Tenant(tenant)
            request = RequestView(name, tokens, session_id=f"w{number}", tenant=of, model=model)
            answer = fleet.gate.offer(request, fleet.room(), 1.0)
            assert isinstance(answer, Held)
        lines.append([held.request.request_id for held in fleet.gate.line(2.0) if held.request.model == "b"])
    assert lines == [["x0", "y1"]] * 2


def test_the_first_of_each_part_are_announced_to_other_replicas() -> None:
    fleet = Fleet(SessionCap(sessions=1, keep_s=0.0), ["a0", "a1", "b0", "b1", "b2"], PARTS)
    for number in range(6):
        fleet.arrive(Step("a", number, 10 + number, 0.0, None), 0.0)
    for number in range(3):
        fleet.arrive(Step("b", number, 40, 0.0, None), 0.0)
    assert [held.request.request_id for held, _ in fleet.gate.first(2, 0.0)] == ["a1-1", "a2-1", "b1-1", "b2-1"]


def test_a_session_that_is_kept_with_one_model_is_not_kept_with_another() -> None:
    fleet = Fleet(SessionCap(sessions=1, keep_s=60.0), ["a0", "a1", "b0", "b1", "b2"], PARTS)
    fleet.arrive(Step("a", 0, 10, 0.0, None), 0.0)
    fleet.end("a", 1.0)
    fleet.arrive(Step("b", 1, 10, 0.0, None), 1.0)
    fleet.arrive(Step("b", 0, 10, 0.0, None), 1.0)
    [(held, kept)] = fleet.gate.first(1, 2.0)
    assert (held.request.request_id, kept) == ("b0-1", False)
    [(_, reason)] = fleet.gate.reasons(1, fleet.room(), 2.0)
    assert reason.reason is AdmissionReason.AT_CAP
    fleet.arrive(Step("a", 0, 12, 0.0, None), 2.0)
    assert fleet.sent["a"][-1][1] == Admit(AdmissionReason.RESIDENT)


@dataclass(frozen=True)
class HoldsTurns(SessionCap):
    """Sends first turns and holds all others; the reason says whether their sessions are kept."""

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if request.request_id.endswith("-1") or fleet.held < 0:
            return Admit(AdmissionReason.ROOM)
        return Hold(AdmissionReason.AT_CAP if session.kept else AdmissionReason.WORKING_SET)


def test_whether_a_held_session_is_kept_depends_on_the_model() -> None:
    fleet = Fleet(HoldsTurns(keep_s=60.0), ["a0", "a1", "b0", "b1", "b2"])
    for model in "ab":
        fleet.arrive(Step(model, 0, 10, 0.0, None), 0.0)
        fleet.arrive(Step(model, 0, 12, 0.0, None), 0.0)
    fleet.end("a", 1.0)
    fleet.parts = PARTS
    reasons = {held.request.model: hold.reason for held, hold in fleet.gate.reasons(2, fleet.room(), 2.0)}
    assert reasons == {"a": AdmissionReason.AT_CAP, "b": AdmissionReason.WORKING_SET}
    assert {held.request.model: kept for held, kept in fleet.gate.first(2, 2.0)} == {"a": True, "b": False}


def test_a_question_may_be_the_first_with_other_parts() -> None:
    fleet = Fleet(SessionCap(sessions=1, keep_s=0.0), ["a0", "a1", "b0", "b1", "b2"], PARTS)
    for number in range(2):
        for model in "ab":
            fleet.arrive(Step(model, number, 10, 0.0, None), 0.0)
    assert [len(sent) for sent in fleet.sent.values()] == [1, 1]
    for parts, behind, held in ((ONE_PART, [0, 1], []), (PARTS, [0, 0], [1, 1]), (ONE_PART, [0, 1], [])):
        fleet.parts = parts
        assert [hold.behind for _, hold in fleet.gate.reasons(3, fleet.room(), 1.0)] == behind
        assert [view.held for _, view in fleet.gate.by_part(fleet.room(), 1.0)] == held
    fleet.parts = PARTS
    assert [view.held for _, view in fleet.gate.by_part(fleet.room(), 1.0)] == [1, 1]


def test_the_held_requests_of_each_part_are_counted_without_those_of_others() -> None:
    fleet = Fleet(SessionCap(sessions=1, keep_s=0.0), ["a0", "a1", "b0", "b1", "b2"], PARTS)
    for number in range(2):
        fleet.arrive(Step("b", number, 10, 0.0, None), 0.0)
    fleet.gate.elsewhere.replace([HeldElsewhere("other", number, 100, 0.0, model="b") for number in range(8)])
    assert [view.held for _, view in fleet.gate.by_part(fleet.room(), 1.0)] == [0, 1]


def test_of_an_instance_that_has_left_no_loss_is_remembered() -> None:
    fleet = Fleet(SessionCap(), ["a0", "a1"])
    losses = fleet.state.accounts.losses
    fleet.state.remove_instance("a1")
    for name in ("a0", "a1"):
        losses.sent(name, PrefillModel(), 100_000, 100_000, 0, 1.0)
    assert list(losses.shares(1.0)) == ["a0"]
    assert losses.share(1, 1.0) == pytest.approx(2 * losses.shares(1.0)["a0"])
