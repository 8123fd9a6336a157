"""decide(): one function from a request and a snapshot to a decision."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import pytest

from policies.classes import ClassThresholds
from policies.decide import decide
from policies.offload.never import Never
from policies.offload.threshold import Threshold
from policies.registry import make_routing, routing_policies
from policies.routing.base import ColumnPolicy, Pick, RoutingPolicy, least, lowest
from policies.routing.linear import Linear
from policies.routing.session_sticky import SessionSticky
from policies.routing.warm import Warm
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import (
    CandidateScore,
    Choice,
    InstanceView,
    NoCandidateError,
    OffloadPlan,
    OffloadReason,
    PolicyFailedError,
    PolicyPart,
    Reason,
    RequestClass,
    RequestView,
    Role,
)
from tests.policies.builders import ask, fleet_of, idle

DEFAULT = ClassThresholds()


@pytest.mark.parametrize(
    ("cached", "expected"),
    [(45_001, RequestClass.WARM), (45_000, RequestClass.MEDIUM), (30_000, RequestClass.HEAVY)],
)
def test_the_class_is_by_new_tokens_on_the_chosen_instance(cached: int, expected: RequestClass) -> None:
    fleet = fleet_of(InstanceView("warm", cached_tokens=cached), InstanceView("cold"))
    decision = decide(ask(50_000), fleet, Linear(), Never(), DEFAULT)
    assert (decision.decode_on, decision.request_class) == ("warm", expected)
    assert (decision.prompt_tokens, decision.cached_tokens, decision.new_tokens) == (50_000, cached, 50_000 - cached)


def test_what_is_cached_elsewhere_does_not_make_a_request_warm() -> None:
    warm = InstanceView("warm", cached_tokens=49_000, pending_prefill_tokens=10**6)
    decision = decide(ask(50_000), fleet_of(warm, InstanceView("cold")), Linear(), Never(), DEFAULT)
    assert (decision.decode_on, decision.request_class) == ("cold", RequestClass.HEAVY)


def test_without_an_instance_there_is_no_decision() -> None:
    with pytest.raises(NoCandidateError, match="no instance may take the request"):
        decide(ask(), FleetSnapshot(()), Linear(), Never(), DEFAULT)


@pytest.mark.parametrize("policy", routing_policies())
def test_with_one_instance_the_reason_is_that_there_was_no_other(policy: str) -> None:
    request = ask(session_id="s")
    decision = decide(request, fleet_of(*idle(1), pinned="inst-0"), make_routing(policy), Never(), DEFAULT)
    assert (decision.decode_on, decision.reason) == ("inst-0", Reason.ONLY_CANDIDATE)
    assert (decision.policy, len(decision.scores)) == (policy, 1)


def test_the_policy_reason_and_the_plan_are_passed_on() -> None:
    busy = InstanceView("d", role=Role.KV_BOTH, requests=2)
    other = InstanceView("p", role=Role.KV_BOTH, recent_tokens=5.0)
    request = ask(50_000, session_id="s")
    decision = decide(request, fleet_of(busy, other, pinned="d"), SessionSticky(), Threshold(), DEFAULT)
    assert (decision.request_id, decision.decode_on, decision.prefill_on) == ("req", "d", "p")
    assert (decision.reason, decision.offload.reason) == (Reason.SESSION_PINNED, OffloadReason.CHOSEN)
    assert decision.offload.inputs["new_tokens"] == 50_000


class _Stray:
    name: ClassVar[str] = "stray"

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        return Choice("nowhere", Reason.DRAWN, ())


def test_a_request_one_hand_off_cannot_carry_never_reaches_the_planner() -> None:
    views = [InstanceView(name, requests=1, role=Role.KV_BOTH) for name in ("a", "b")]
    planner = Threshold()
    offloaded = decide(ask(50_000), fleet_of(*views), Linear(), planner, DEFAULT)
    assert offloaded.offload.reason is OffloadReason.CHOSEN
    stayed = decide(ask(50_000, may_offload=False), fleet_of(*views), Linear(), planner, DEFAULT)
    assert (stayed.prefill_on, stayed.offload.reason) == (None, OffloadReason.REQUEST_SHAPE)


@pytest.mark.parametrize("answer", [None, "inst-0", InstanceView("inst-0")])
def test_a_policy_that_answers_with_no_choice_is_named_in_the_error(answer: object) -> None:
    class Mistaken:
        name: ClassVar[str] = "mistaken"

        def choose(self, request: RequestView, fleet: FleetSnapshot) -> Any:
            return answer

    words = re.escape(f"policy 'mistaken' answered {answer!r}"[:60])
    with pytest.raises(ValueError, match=f"{words}.*, which is not a Choice"):
        decide(ask(), fleet_of(*idle(2)), Mistaken(), Never(), DEFAULT)


def test_a_policy_that_answers_with_a_stranger_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="policy 'stray' chose 'nowhere', which is not a candidate"):
        decide(ask(), fleet_of(*idle(2)), _Stray(), Never(), DEFAULT)


@pytest.mark.parametrize("name", routing_policies())
def test_every_score_carries_the_predicted_hit_of_its_candidate(name: str) -> None:
    """Readers of a breakdown row need not know what a policy calls its inputs."""
    hits = {"a": 320, "b": 0, "c": 64}
    fleet = fleet_of(*(InstanceView(instance, cached_tokens=hit) for instance, hit in hits.items()))
    scores = decide(ask(1_000), fleet, make_routing(name), Never(), DEFAULT).scores
    assert scores
    assert all(score.cached_tokens == hits[score.instance] for score in scores)


class _FailingPlanner:
    name: ClassVar[str] = "failing"

    def plan(self, *_: object) -> OffloadPlan:
        raise KeyError("lost")


def test_a_guarded_decision_replaces_what_fails_and_names_it() -> None:
    fleet, request = fleet_of(*idle(2)), ask(session_id="s")
    decision = decide(request, fleet, _Stray(), _FailingPlanner(), DEFAULT, guarded=True)
    assert decision == decide(request, fleet, Warm(), Never(), DEFAULT)._replace(
        failures=decision.failures, offload=OffloadPlan(None, OffloadReason.PLANNER_FAILED)
    )
    (policy, planner) = decision.failures
    assert (policy.part, policy.name, policy.error) == (
        PolicyPart.POLICY,
        "stray",
        "ValueError: policy 'stray' chose 'nowhere', which is not a candidate",
    )
    assert (planner.part, planner.name, planner.error) == (PolicyPart.PLANNER, "failing", "KeyError: 'lost'")
    assert [call.rpartition(" ")[2] for call in planner.trace] == ["decide", "planned_by", "plan"]


@pytest.mark.parametrize("policy", [Linear(), _Stray()])
def test_without_the_guard_a_failure_is_raised(policy: RoutingPolicy) -> None:
    """As in a simulation, whose result must not be that of another policy."""
    with pytest.raises(PolicyFailedError) as caught:
        decide(ask(), fleet_of(*idle(2)), policy, _FailingPlanner(), DEFAULT)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (sent.failure, str(sent)) == (caught.value.failure, str(caught.value))
    assert (sent.request_id, type(caught.value.__cause__)) == (
        "req",
        ValueError if policy.name == "stray" else KeyError,
    )


class _Unscored(ColumnPolicy):
    """A policy whose formula gives NaN for every candidate."""

    name: ClassVar[str] = "unscored"

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> list[float]:
        return [math.inf * 0] * len(fleet.instances)

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> list[dict[str, float]]:
        return [{}] * len(fleet.instances)

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(least(fleet, scores), Reason.LOWEST_SCORE)


class _UnscoredRows:
    """The same with rows of scores."""

    name: ClassVar[str] = "unscored"

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        scores = tuple(CandidateScore(view.instance, math.nan, {}) for view in fleet.instances)
        return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, scores)


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("policy", [_Unscored(), _UnscoredRows()])
def test_a_choice_by_a_score_that_is_nan_is_a_failure_of_the_policy(policy: RoutingPolicy, scored: bool) -> None:
    fleet, error = fleet_of(*idle(2)), "policy 'unscored' chose 'inst-0', whose score is NaN"
    with pytest.raises(ValueError, match=error):
        decide(ask(), fleet, policy, Never(), DEFAULT, scored=scored)
    decision = decide(ask(), fleet, policy, Never(), DEFAULT, scored=scored, guarded=True)
    [failure] = decision.failures
    assert (failure.part, failure.name, failure.error) == (PolicyPart.POLICY, "unscored", f"ValueError: {error}")
    assert decision.policy == "warm"


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("name", ["warm", "joint", "migrate"])
def test_a_parameter_that_makes_scores_nan_is_a_failure_with_and_without_scores(name: str, scored: bool) -> None:
    policy = make_routing(name, {"queue_crowd": math.inf})
    with pytest.raises(ValueError, match=f"policy '{name}' chose 'inst-0', whose score is NaN"):
        decide(ask(), fleet_of(*idle(2)), policy, Never(), DEFAULT, scored=scored)


def test_a_nan_for_a_candidate_that_was_not_chosen_is_accepted() -> None:
    scores = (CandidateScore("inst-0", math.nan, {}, skipped=True), CandidateScore("inst-1", 1.0, {}))

    class Skipping:
        name: ClassVar[str] = "skipping"

        def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
            return Choice("inst-1", Reason.LOWEST_SCORE, scores)

    assert decide(ask(), fleet_of(*idle(2)), Skipping(), Never(), DEFAULT).decode_on == "inst-1"


@pytest.mark.parametrize("chosen", ["d", "nowhere"])
def test_a_planner_that_answers_with_d_or_a_stranger_is_named_in_the_error(chosen: str) -> None:
    class Astray:
        name: ClassVar[str] = "astray"

        def plan(self, *_: object) -> OffloadPlan:
            return OffloadPlan(chosen, OffloadReason.CHOSEN)

    fleet = fleet_of(InstanceView("d"), InstanceView("p", requests=5))
    with pytest.raises(ValueError, match=f"planner 'astray' chose '{chosen}', which cannot prefill for another"):
        decide(ask(), fleet, Linear(), Astray(), DEFAULT)


def test_a_policy_may_refuse_every_candidate_guarded_or_not() -> None:
    class Full:
        name: ClassVar[str] = "full"

        def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
            raise NoCandidateError("all full")

    for guarded in (True, False):
        with pytest.raises(NoCandidateError, match="all full"):
            decide(ask(), fleet_of(*idle(2)), Full(), Never(), DEFAULT, guarded=guarded)


class _Placing:
    """A policy that decides on both legs; its plan is given."""

    name: ClassVar[str] = "placing"

    def __init__(self, plan: OffloadPlan | None) -> None:
        self._plan = plan

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        return Warm().choose(request, fleet)._replace(instance="d", plan=self._plan)


PAIR = fleet_of(InstanceView("d"), InstanceView("p", requests=5, cached_tokens=640))


@pytest.mark.parametrize("prefill_on", ["p", None])
def test_a_policy_s_own_plan_is_used_and_the_planner_is_not_asked(prefill_on: str | None) -> None:
    reason = OffloadReason.CHOSEN if prefill_on else OffloadReason.DOES_NOT_PAY
    plan = OffloadPlan(prefill_on, reason, {"first_s": 1.0})
    decision = decide(ask(), PAIR, _Placing(plan), _FailingPlanner(), DEFAULT)
    assert (decision.decode_on, decision.prefill_on, decision.offload) == ("d", prefill_on, plan)
    assert (decision.planned, decision.failures) == (True, ())
    assert (decision.prefill_prediction is not None) == (prefill_on is not None)


def test_without_a_plan_the_planner_is_asked() -> None:
    decision = decide(ask(), PAIR, _Placing(None), Never(), DEFAULT)
    assert (decision.offload.reason, decision.planned) == (OffloadReason.PLANNER_NEVER, False)


def test_a_plan_for_a_request_that_no_hand_off_can_carry_is_not_used() -> None:
    plan = OffloadPlan("p", OffloadReason.CHOSEN)
    decision = decide(ask(may_offload=False), PAIR, _Placing(plan), Never(), DEFAULT)
    assert (decision.prefill_on, decision.offload.reason) == (None, OffloadReason.REQUEST_SHAPE)


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (OffloadPlan("d", OffloadReason.CHOSEN), "policy 'placing' chose 'd', which cannot prefill for another"),
        (OffloadPlan("x", OffloadReason.CHOSEN), "policy 'placing' chose 'x', which cannot prefill for another"),
        (
            OffloadPlan("p", cast("OffloadReason", "because")),
            "policy 'placing' gave the reason 'because', which is not an OffloadReason",
        ),
    ],
)
def test_an_invalid_plan_is_a_failure_of_the_policy(plan: OffloadPlan, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        decide(ask(), PAIR, _Placing(plan), Never(), DEFAULT)
    decision = decide(ask(), PAIR, _Placing(plan), Never(), DEFAULT, guarded=True)
    [failure] = decision.failures
    assert (failure.part, failure.name, failure.error) == (PolicyPart.POLICY, "placing", f"ValueError: {error}")
    assert (decision.policy, decision.offload.reason, decision.planned) == ("warm", OffloadReason.PLANNER_NEVER, False)
