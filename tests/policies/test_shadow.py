"""Shadow decisions: agreement, regret by one yardstick, cached tokens, and answers that are not usable."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.admission.never_hold import NeverHold
from policies.admission.session_cap import SessionCap
from policies.classes import ClassThresholds
from policies.costs.formulas import Costs, PrefillModel
from policies.decide import decide
from policies.offload.cost_model import CostModel
from policies.offload.never import Never
from policies.offload.threshold import Threshold
from policies.registry import BUILT_IN, ROUTING_GROUP, make_routing
from policies.routing.base import RoutingPolicy
from policies.routing.least_loaded import LeastLoaded
from policies.routing.round_robin import RoundRobin
from policies.routing.warm import Warm
from policies.session import RoutingSession
from policies.shadow import HELD, OFFLOADED, SENT, STAYED, LiveDecision, admitted_by
from policies.snapshot import FleetSnapshot
from policies.state import FleetState
from policies.types import Choice, Decision, HotspotView, InstanceView, Reason, RequestView, Role
from tests.policies.builders import ask, ask_new, cases, fleet_of

THRESHOLDS = ClassThresholds(5_000, 20_000)


@dataclass(frozen=True)
class Fixed:
    """Always the same instance."""

    instance: str
    name: ClassVar[str] = "fixed"

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        return Choice(self.instance, Reason.DRAWN, ())


def live(request: RequestView, fleet: FleetSnapshot, policy: RoutingPolicy) -> LiveDecision:
    return LiveDecision(request, fleet, decide(request, fleet, policy, Never(), THRESHOLDS))


COLD = InstanceView("cold")
HOT = InstanceView("hot", cached_tokens=30_000, requests=1, decoding_tokens=10_000)
LONG = ask(40_000)


def test_the_same_choice_agrees_without_regret() -> None:
    verdict = live(LONG, fleet_of(COLD, HOT), Fixed("hot")).routed_by(Warm())
    assert (verdict.instance, verdict.agreed, verdict.regret_s, verdict.hit_tokens) == ("hot", True, 0.0, 0)


def test_a_live_choice_that_gives_a_cached_prefix_away_has_regret_and_tokens() -> None:
    fleet = fleet_of(COLD, HOT)
    case = live(LONG, fleet, Fixed("cold"))
    verdict = case.routed_by(Warm())
    scores = {score.instance: score.score for score in Warm().choose(LONG, fleet).scores}
    assert (verdict.instance, verdict.agreed, verdict.hit_tokens) == ("hot", False, 30_000)
    assert verdict.regret_s == pytest.approx(scores["cold"] - scores["hot"])
    assert verdict.regret_s > 0.1


def test_a_shadow_that_is_worse_has_the_same_amounts_with_the_other_sign() -> None:
    fleet = fleet_of(COLD, HOT)
    better = live(LONG, fleet, Fixed("cold")).routed_by(Fixed("hot"))
    worse = live(LONG, fleet, Fixed("hot")).routed_by(Fixed("cold"))
    assert (worse.regret_s, worse.hit_tokens) == (-better.regret_s, -better.hit_tokens)


def test_prices_are_the_live_warm_policys_own() -> None:
    fleet, patient = fleet_of(COLD, HOT), Warm(others_weight=0.0)
    decided = live(LONG, fleet, patient)
    prices = [decided.price(0), decided.price(1)]
    assert prices == [score.score for score in patient.choose(LONG, fleet).scores]
    assert prices != [score.score for score in Warm().choose(LONG, fleet).scores]


@given(cases())
def test_nobody_is_better_than_warm_by_its_own_estimate(case: tuple[RequestView, FleetSnapshot]) -> None:
    request, fleet = case
    decided = live(request, fleet, Warm())
    for name in BUILT_IN[ROUTING_GROUP]:
        verdict = decided.routed_by(make_routing(name))
        assert verdict.regret_s <= 0.0
        assert verdict.agreed == (verdict.instance == decided.decision.decode_on)
        assert not (verdict.agreed and (verdict.regret_s or verdict.hit_tokens))


@given(cases())
def test_a_policy_decides_as_a_shadow_as_it_does_live(case: tuple[RequestView, FleetSnapshot]) -> None:
    request, fleet = case
    assert_the_shadows_choose_as_live(request, fleet)


@pytest.mark.parametrize("instances", [2, 8, 64])
def test_a_policy_decides_as_a_shadow_as_it_does_live_in_fleets_full_of_ties(instances: int) -> None:
    draw = random.Random(instances)
    for sequence in range(150):
        prompt = draw.choice((1, 900, 40_000))
        capacity = draw.choice((0, 100_000, 700_000))
        views = [
            InstanceView(
                f"inst-{place}",
                cached_tokens=draw.choice((0, 0, prompt // 2, prompt - 1)),
                requests=(requests := draw.choice((0, 1, 2, 9, 80))),
                pending_prefill_tokens=draw.choice((0, 6_000, 6_001, 90_000)),
                decoding_tokens=draw.choice((0, 25_000)),
                recent_tokens=draw.choice((0.0, 500.5)),
                kv_capacity_tokens=capacity,
                kv_used_tokens=draw.choice((0, 60_000, 99_000)),
                holds_class=draw.random() < 0.2,
                prefilling=draw.randint(0, requests),
            )
            for place in range(instances)
        ]
        costs = Costs(prefill=PrefillModel().observe(draw.choice((2_000, 30_000)), 0, 0.0, draw.uniform(0.01, 5.0)))
        fleet = fleet_of(
            *views,
            sequence=sequence,
            pinned=draw.choice((None, "gone", "inst-1")),
            hotspot=HotspotView(draw.random(), draw.randint(0, 40), 900),
            costs=draw.choice((None, costs)),
        )
        assert_the_shadows_choose_as_live(ask(prompt, session_id=draw.choice((None, "s"))), fleet)


def assert_the_shadows_choose_as_live(request: RequestView, fleet: FleetSnapshot) -> None:
    decided = live(request, fleet, LeastLoaded())
    prices = {score.instance: score.score for score in Warm().choose(request, fleet).scores}
    for name in BUILT_IN[ROUTING_GROUP]:
        policy = make_routing(name)
        choice, verdict = policy.choose(request, fleet), decided.routed_by(policy)
        assert (verdict.instance, verdict.reason) == (choice.instance, choice.reason.value), name
        regret_s = prices[decided.decision.decode_on] - prices[choice.instance]
        assert verdict.regret_s == (0.0 if verdict.agreed else regret_s)


def test_a_choice_that_is_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="chose 'gone', which is not a candidate"):
        live(LONG, fleet_of(COLD, HOT), Warm()).routed_by(Fixed("gone"))


BUSY = InstanceView("busy", requests=20, decoding_tokens=100_000, kv_capacity_tokens=1_000_000, role=Role.KV_BOTH)
IDLE = InstanceView("idle", kv_capacity_tokens=1_000_000, role=Role.KV_BOTH)


def test_a_planner_that_would_offload_differs_and_its_saving_is_the_regret() -> None:
    fleet = fleet_of(BUSY, IDLE)
    verdict = live(LONG, fleet, Fixed("busy")).planned_by(Threshold(), THRESHOLDS)
    assert verdict is not None
    assert (verdict.instance, verdict.agreed, verdict.answer) == ("idle", False, OFFLOADED)
    assert verdict.regret_s == pytest.approx(CostModel().saving_s(LONG, BUSY, IDLE, fleet))
    plan = CostModel().plan(LONG, BUSY, THRESHOLDS.classify(LONG.prompt_tokens), fleet)
    parts = ("own_gain_s", "streams_gain_s", "others_cost_s", "risk_s")
    own, streams, others, risk = (plan.inputs[each] for each in parts)
    assert verdict.regret_s == pytest.approx(own + streams - others - risk)


def test_a_planner_that_stays_beside_a_live_offload_has_the_opposite_regret() -> None:
    fleet = fleet_of(BUSY, IDLE)
    decision = decide(LONG, fleet, Fixed("busy"), Threshold(), THRESHOLDS)
    assert decision.prefill_on == "idle"
    verdict = LiveDecision(LONG, fleet, decision).planned_by(Never(), THRESHOLDS)
    assert verdict is not None
    assert (verdict.instance, verdict.agreed, verdict.answer) == (None, False, STAYED)
    assert verdict.regret_s == pytest.approx(-CostModel().saving_s(LONG, BUSY, IDLE, fleet))


def test_planners_are_not_asked_about_what_no_hand_off_can_carry() -> None:
    assert (
        live(ask(40_000, may_offload=False), fleet_of(BUSY, IDLE), Warm()).planned_by(Threshold(), THRESHOLDS) is None
    )


def test_admission_rules_agree_if_both_send_or_both_hold() -> None:
    crowded = AdmissionView(pool_tokens=1_000, active_sessions=64, instances=2)
    sent, held = Admit(AdmissionReason.ROOM), Hold(AdmissionReason.WORKING_SET)
    verdict = admitted_by(SessionCap(), LONG, SessionView(), crowded, sent)
    assert (verdict.answer, verdict.reason, verdict.agreed, verdict.regret_s) == (HELD, "at_cap", False, 0.0)
    assert admitted_by(SessionCap(), LONG, SessionView(), crowded, held).agreed
    assert admitted_by(NeverHold(), LONG, SessionView(), crowded, sent)[-1] == SENT


def routed(observed: bool) -> tuple[list[Decision], list[Decision], dict[str, int]]:
    """Decisions of one session of requests, those that an observer saw, and the ledger's totals."""
    state, seen = FleetState(), list[Decision]()
    routing = RoutingSession(state, RoundRobin(), Never(), THRESHOLDS, admission=SessionCap(sessions=3))
    for name in ("a", "b", "c"):
        state.add_instance(name)
    if observed:

        def look(request: RequestView, fleet: FleetSnapshot, decision: Decision) -> None:
            seen.append(decision)
            for name in BUILT_IN[ROUTING_GROUP]:
                LiveDecision(request, fleet, decision).routed_by(make_routing(name))

        routing.on_decided = look

        def judge(request: RequestView, session: SessionView, fleet: AdmissionView, answer: Admit | Hold) -> None:
            admitted_by(NeverHold(), request, session, fleet, answer)

        routing.gate.on_offer = judge
    decisions = []
    for number in range(12):
        request = ask_new(number % 4, session_id=f"s{number % 5}")
        routing.offer(request, ["a", "b", "c"], float(number))
        decisions.append(routing.route(request, ["a", "b", "c"], [], float(number)).decision)
    return decisions, seen, state.ledger.totals()


def test_observing_changes_no_decision_and_no_state() -> None:
    plain, nothing, ledger = routed(observed=False)
    observed, seen, observed_ledger = routed(observed=True)
    assert nothing == []
    assert observed == plain == seen
    assert observed_ledger == ledger


def test_a_gate_reports_the_views_its_rule_was_given() -> None:
    state = FleetState()
    state.add_instance("a")
    routing = RoutingSession(state, Warm(), Never(), THRESHOLDS, admission=SessionCap(sessions=1))
    seen: list[tuple[RequestView, SessionView, AdmissionView, Admit | Hold]] = []
    routing.gate.on_offer = lambda *offered: seen.append(offered)
    first, second = ask_new(1, session_id="one"), ask_new(2, session_id="two")
    routing.offer(first, ["a"], 0.0)
    routing.route(first, ["a"], [], 0.0)
    routing.offer(second, ["a"], 1.0)
    routing.admitted(["a"], 2.0)
    assert [(each[0], each[2].active_sessions, type(each[3])) for each in seen] == [
        (first, 0, Admit),
        (second, 1, Hold),
    ]
