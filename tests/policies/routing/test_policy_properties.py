"""Properties that every routing policy and planner must satisfy, over random snapshots."""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from policies.classes import ClassThresholds
from policies.decide import decide
from policies.offload.never import Never
from policies.registry import make_planner, make_routing, offload_planners, parameters, routing_policies
from policies.routing.base import lowest, tie_break
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, InstanceView, OffloadReason, Reason, RequestClass, RequestView
from tests.policies.builders import ask, cases, fleet_of, idle

POLICIES = {name: make_routing(name) for name in routing_policies()}
PLANNERS = {name: make_planner(name) for name in offload_planners()}
LOWEST_SCORE_WINS = {Reason.LOWEST_SCORE, Reason.LEAST_LOADED, Reason.HOTSPOT_AVOIDED, Reason.SESSION_PLACED}
LOWEST_SCORE_WINS |= {Reason.SESSION_OVERLOADED, Reason.SESSION_INSTANCE_GONE, Reason.AFFINITY_OVERLOADED}
LOWEST_SCORE_WINS |= {Reason.NEXT_IN_TURN, Reason.DRAWN}


@settings(max_examples=200)
@given(case=cases())
def test_an_answer_is_pure_complete_and_among_the_candidates(case: tuple[RequestView, FleetSnapshot]) -> None:
    """All policies answer the same requests, in one test: making one takes twenty times as long as all answers to it.

    A decision without scores is the same, and the lowest score wins wherever the reason says so.
    """
    request, fleet = case
    before, same = deepcopy(case), deepcopy(case)
    instances = [view.instance for view in fleet.instances]
    without = 0
    for name, policy in POLICIES.items():
        note(name)
        choice = policy.choose(request, fleet)
        assert choice == policy.choose(*same)
        assert (request, fleet) == before
        assert choice.instance in instances
        assert [score.instance for score in choice.scores] == instances
        assert all(math.isfinite(score.score) and score.inputs for score in choice.scores)
        assert isinstance(choice.reason, Reason)
        chosen = next(score for score in choice.scores if score.instance == choice.instance)
        assert not chosen.skipped
        if choice.reason in LOWEST_SCORE_WINS:
            assert chosen.score == min(score.score for score in choice.scores if not score.skipped)
        else:
            assert choice.reason in {Reason.AFFINITY, Reason.SESSION_PINNED, Reason.SESSION_MIGRATED}
        scored = decide(*case, policy, Never(), ClassThresholds())
        bare = decide(*case, policy, Never(), ClassThresholds(), scored=False)
        assert bare._replace(scores=scored.scores) == scored
        without += not bare.scores
    assert without >= len(POLICIES) / 2


@given(case=cases())
def test_a_product_score_is_never_zero(case: tuple[RequestView, FleetSnapshot]) -> None:
    for name in ("lmetric", "unified"):
        assert all(score.score >= 1.0 for score in POLICIES[name].choose(*case).scores), name


@pytest.mark.parametrize("cached_tokens", [0, 900])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"random"}))
def test_an_idle_fleet_does_not_pile_onto_one_instance(name: str, n: int, cached_tokens: int) -> None:
    """Equal instances, cold or equally warm: 80 decisions, none above a fair share plus one."""
    views = [view._replace(cached_tokens=cached_tokens, holds_class=cached_tokens > 0) for view in idle(n)]
    taken = Counter(POLICIES[name].choose(ask(1_000), fleet_of(*views, sequence=s)).instance for s in range(80))
    assert max(taken.values()) <= math.ceil(80 / n) + 1
    assert len(taken) == n


def test_ties_go_to_fewer_requests_then_less_recent_work_then_the_turn() -> None:
    views = (
        InstanceView("many", requests=2),
        InstanceView("recent", requests=1, recent_tokens=10.0),
        InstanceView("first", requests=1, recent_tokens=5.0),
        InstanceView("second", requests=1, recent_tokens=5.0),
    )
    scores = [CandidateScore(view.instance, 7.0, {}) for view in views]
    assert [lowest(fleet_of(*views, sequence=s), scores).instance for s in range(4)] == [
        "first",
        "first",
        "first",
        "second",
    ]
    assert lowest(fleet_of(*views[:2]), scores[:2]).instance == "recent"
    assert lowest(fleet_of(views[0], views[1]._replace(requests=2)), scores[:2]).instance == "many"
    assert tie_break(fleet_of(*views, sequence=3), 1) == (1, 10.0, 2)


def test_a_lower_score_beats_every_tie_break_and_skipping_beats_every_score() -> None:
    busy, free = InstanceView("busy", requests=9, recent_tokens=1e9), InstanceView("free")
    scores = [CandidateScore("busy", 1.0, {}), CandidateScore("free", 1.5, {})]
    assert lowest(fleet_of(busy, free), scores).instance == "busy"
    assert lowest(fleet_of(busy, free), [scores[0]._replace(skipped=True), scores[1]]).instance == "free"


@settings(max_examples=100)
@given(case=cases(), request_class=st.sampled_from(RequestClass), at=st.integers(0, 7))
def test_a_plan_is_pure_and_prefills_on_another_willing_instance(
    case: tuple[RequestView, FleetSnapshot], request_class: RequestClass, at: int
) -> None:
    for name in PLANNERS:
        note(name)
        check_plan(name, *case, request_class, at)


def check_plan(name: str, request: RequestView, fleet: FleetSnapshot, request_class: RequestClass, at: int) -> None:
    decode = fleet.instances[at % len(fleet.instances)]
    before = deepcopy((request, fleet))
    plan = PLANNERS[name].plan(request, decode, request_class, fleet)
    assert plan == PLANNERS[name].plan(deepcopy(request), decode, request_class, deepcopy(fleet))
    assert (request, fleet) == before
    assert (plan.prefill_on is not None) == (plan.reason is OffloadReason.CHOSEN)
    if plan.prefill_on is not None:
        among = fleet.prefill_instances or fleet.instances
        prefill = next(view for view in among if view.instance == plan.prefill_on)
        assert prefill.instance != decode.instance
        assert (prefill.instance, decode.instance) not in fleet.broken_pairs
        assert prefill.role in {"kv_both", "kv_producer"}
        assert decode.role in {"kv_both", "kv_consumer"}
        assert prefill.connector is decode.connector
        assert fleet.offloads_in_flight < parameters(PLANNERS[name])["max_in_flight"]
        if name == "threshold":
            assert request_class is RequestClass.HEAVY
        else:
            assert request.prompt_tokens - decode.cached_tokens >= parameters(PLANNERS[name])["min_new_tokens"]
