"""``joint``: equal to ``warm`` where nothing can be handed off, and the cheaper placement elsewhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings

from policies.classes import ClassThresholds
from policies.costs.book import CostBook
from policies.costs.formulas import PrefillModel
from policies.decide import decide
from policies.offload.never import Never
from policies.registry import PolicyParameterError, make_routing
from policies.routing.joint import Joint
from policies.routing.warm import Warm
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Connector, ContextsView, InstanceView, OffloadReason, RequestView, Role, Transport
from tests.policies.builders import ask, cases, fleet_of, score_of

PROMPT = 60_000
REQUEST = ask(PROMPT, max_tokens=100)


def view(name: str, streams: int = 4, **fields: Any) -> InstanceView:
    values: dict[str, Any] = {
        "requests": streams,
        "role": Role.KV_BOTH,
        "kv_capacity_tokens": 700_000,
        "host": "h",
        "transport": Transport.NVLINK,
        **fields,
    }
    return InstanceView(name, **values)


def fleet(*views: InstanceView, **fields: Any) -> FleetSnapshot:
    return fleet_of(*views, **{"specialists": {"p": 1.0}, "costs": CostBook().at(0.0), **fields})


BUSY = (view("a", 6), view("b", 4), view("p", 0, prefilling=0))


def drawn(draw: random.Random) -> tuple[RequestView, FleetSnapshot]:
    prompt = draw.randint(1, 150_000)
    views = []
    for number in range(draw.randint(1, 12)):
        requests = draw.randint(0, 20)
        prefilling = draw.randint(0, requests)
        fields = {
            "cached_tokens": draw.choice([0, draw.randrange(prompt)]),
            "prefilling": prefilling,
            "pending_prefill_tokens": prefilling * draw.randint(100, 40_000),
            "kv_capacity_tokens": draw.choice([0, 100_000, 700_000]),
            "kv_used_tokens": draw.randint(0, 600_000),
            "role": draw.choice(list(Role)),
        }
        views.append(view(f"inst-{number}", requests, **fields))
    return ask(prompt), fleet(*views, specialists={}, sequence=draw.randint(0, 1_000))


def test_without_specialists_or_producers_the_choice_is_that_of_warm() -> None:
    draw = random.Random(18)
    for _ in range(3_000):
        request, snapshot = drawn(draw)
        choice, warm = Joint().choose(request, snapshot), Warm().choose(request, snapshot)
        assert choice._replace(plan=None) == warm
        assert choice.plan is not None
        assert choice.plan.prefill_on is None


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_what_is_not_long_is_placed_by_warm_and_specialists_cost_more(case: tuple[RequestView, FleetSnapshot]) -> None:
    request, snapshot = case
    names = tuple(each.instance for each in snapshot.instances)
    policy = Joint(heavy_tokens=10**9, specialist_s=3.0, eviction_weight=0.0)
    choice = policy.choose(request, snapshot._replace(specialists=dict.fromkeys(names[:2], 1.0)))
    warm = Warm().choose(request, snapshot)
    extra = [3.0 if name in names[:2] else 0.0 for name in names]
    assert [each.score for each in choice.scores] == [
        each.score + more for each, more in zip(warm.scores, extra, strict=True)
    ]
    assert choice.plan is not None
    assert (choice.plan.prefill_on, choice.plan.reason) == (None, OffloadReason.BELOW_THRESHOLD)


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_a_hand_off_is_one_that_can_be_carried_out(case: tuple[RequestView, FleetSnapshot]) -> None:
    request, snapshot = case
    names = tuple(each.instance for each in snapshot.instances)
    snapshot = snapshot._replace(specialists=dict.fromkeys(names[: len(names) // 2], 1.0))
    policy = Joint(heavy_tokens=1, max_own_loss=100.0)
    decision = decide(request, snapshot, policy, Never(), ClassThresholds())
    assert policy.quick(request, snapshot, FleetColumns.of(snapshot.instances)).place == names.index(decision.decode_on)
    assert score_of(policy.choose(request, snapshot), decision.decode_on).score == min(
        score.score for score in decision.scores if not score.skipped
    )
    if decision.prefill_on is None:
        assert decision.offload.reason is not OffloadReason.CHOSEN
        return
    prefill, decode = snapshot.prefill_view(decision.prefill_on), snapshot.view(decision.decode_on)
    assert prefill is not None
    assert decode is not None
    assert prefill.instance in snapshot.specialists
    assert decode.instance not in snapshot.specialists
    assert prefill.role in {Role.KV_BOTH, Role.KV_PRODUCER}
    assert decode.role in {Role.KV_BOTH, Role.KV_CONSUMER}
    assert prefill.connector is decode.connector
    assert (prefill.instance, decode.instance) not in snapshot.broken_pairs


def test_a_long_cold_prompt_is_prefilled_on_the_specialist_and_decoded_where_there_is_least_to_do() -> None:
    choice = Joint().choose(REQUEST, fleet(*BUSY, view("busier", 9)))
    assert choice.plan is not None
    assert (choice.instance, choice.plan.prefill_on, choice.plan.reason) == ("b", "p", OffloadReason.CHOSEN)
    inputs = choice.plan.inputs
    prefill_s = PrefillModel().seconds(PROMPT, 0)
    assert inputs["prefill_s"] == prefill_s
    assert inputs["first_s"] == prefill_s + inputs["transfer_s"]
    assert inputs["handed_off_s"] == pytest.approx(
        inputs["first_s"] * 1.02 + inputs["streams_s"] + 0.02 * 4 + inputs["eviction_s"]
    )
    score = score_of(choice, "b")
    assert score.score == inputs["handed_off_s"] < inputs["colocated_s"]
    assert score.inputs["handed_off_s"] == score.score < score.inputs["colocated_s"]
    assert score_of(choice, "p").inputs["specialist_s"] == 1.0


def test_a_hand_off_saves_the_stalls_of_the_answer_on_a_specialist_that_would_decode_it() -> None:
    views = (view("a", 60), view("b", 10), view("p", 0, prefilling=0))
    idle, busy = (fleet(*views, specialists={"p": stretch}) for stretch in (1.0, 20.0))
    assert (plan_of(idle)[0], plan_of(busy)[0]) == (None, "p")
    choice = Joint().choose(REQUEST, busy)
    assert choice.plan is not None
    assert choice.plan.inputs["saved_s"] == 3.0 * 19.0
    assert choice.plan.inputs["handed_off_s"] == score_of(choice, "b").score < score_of(choice, "p").score
    assert plan_of(busy, answer_s=0.0)[0] is None
    elsewhere = fleet(view("b", 0), *views[::2], specialists={"p": 20.0})
    assert plan_of(elsewhere)[0] is None, "the best single instance is no specialist, so there is nothing to save"
    assert Joint().choose(REQUEST, elsewhere).instance == "b"


def test_contexts_are_placed_where_the_fewest_of_the_last_minutes_are() -> None:
    request = REQUEST._replace(prompt_tokens=10_000)
    contexts = ContextsView({"a": 300_000, "b": 200_000, "p": 0})
    views = view("a", 0), view("b", 0), view("p", 0)
    choice = Joint().choose(request, fleet(*views, contexts=contexts))
    assert choice.instance == "b", "the specialist costs a second more, which is more than it would save"
    again_s = PrefillModel().seconds(10_000, 0) - PrefillModel().seconds(0, 0)
    assert score_of(choice, "b").inputs["eviction_s"] == again_s * 210_000 / views[0].kv_capacity_tokens
    assert score_of(choice, "p").inputs["eviction_s"] < score_of(choice, "b").inputs["eviction_s"]
    there = Joint(specialist_s=0.0).choose(request, fleet(*views, contexts=contexts))
    assert there.instance == "p"
    unknown = views[0]._replace(kv_capacity_tokens=0), *views[1:]
    assert "eviction_s" not in score_of(Joint().choose(request, fleet(*unknown, contexts=contexts)), "a").inputs
    seldom = Joint().choose(request, fleet(*views, contexts=contexts._replace(return_share=0.25)))
    assert score_of(seldom, "b").inputs["eviction_s"] == 0.25 * score_of(choice, "b").inputs["eviction_s"]


def test_a_hand_off_goes_to_the_pool_with_the_fewest_contexts() -> None:
    snapshot = fleet(*BUSY, contexts=ContextsView({"a": 0, "b": 700_000, "p": 0}))
    choice = Joint(stream_s=0.0).choose(REQUEST, snapshot)
    assert choice.plan is not None
    assert (choice.instance, choice.plan.prefill_on) == ("a", "p")
    assert choice.plan.inputs["eviction_s"] > 0
    assert Joint(stream_s=0.0).choose(REQUEST, snapshot._replace(contexts=ContextsView())).instance == "b"


def plan_of(snapshot: FleetSnapshot, request: RequestView = REQUEST, **params: Any) -> tuple[str | None, OffloadReason]:
    plan = Joint(**params).choose(request, snapshot).plan
    assert plan is not None
    return plan.prefill_on, plan.reason


def test_the_request_itself_may_lose_only_so_much() -> None:
    queue = {"requests": 3, "prefilling": 3, "pending_prefill_tokens": 180_000}
    waiting = (*BUSY[:2], view("p", **queue))
    assert plan_of(fleet(*waiting), queue_cost=0.0) == (None, OffloadReason.DOES_NOT_PAY)
    assert plan_of(fleet(*waiting), queue_cost=0.0, max_own_loss=9.0, stream_s=0.0)[0] == "p"


def test_the_queue_of_a_specialist_counts_again_for_prompts_that_will_wait_behind_this_one() -> None:
    queue = {"requests": 1, "prefilling": 1, "pending_prefill_tokens": 60_000}
    snapshot = fleet(view("a", 6), view("b", 1), view("p", **queue))
    assert plan_of(snapshot, queue_cost=0.0) == ("p", OffloadReason.CHOSEN)
    plan = Joint().choose(REQUEST, snapshot).plan
    assert plan is not None
    assert (plan.prefill_on, plan.reason) == (None, OffloadReason.DOES_NOT_PAY)
    inputs = plan.inputs
    assert inputs["behind_s"] == 2 * inputs["prefill_queue_s"] > 0
    assert inputs["first_s"] <= 2 * inputs["colocated_first_s"], "not refused for its own loss"
    assert inputs["handed_off_s"] - inputs["behind_s"] < inputs["colocated_s"] <= inputs["handed_off_s"]


def test_a_specialist_that_decodes_is_taken_before_one_with_a_queue() -> None:
    queued = view("p", requests=1, prefilling=1, pending_prefill_tokens=60_000)
    snapshot = fleet(*BUSY[:2], queued, view("q", 1), specialists={"p": 1.0, "q": 1.0})
    assert plan_of(snapshot)[0] == "q"
    assert plan_of(snapshot, queue_cost=0.0)[0] == "p"


def test_a_long_prompt_does_not_wait_behind_the_queue_of_a_specialist_without_streams() -> None:
    queue = {"requests": 3, "prefilling": 3, "pending_prefill_tokens": 180_000}
    snapshot = fleet(view("a", 30), view("b", 30), view("p", **queue))
    choice = Joint().choose(REQUEST, snapshot)
    assert choice.instance != "p"
    assert score_of(choice, "p").skipped
    assert score_of(choice, "p").score < score_of(choice, choice.instance).score
    assert choice.plan is not None
    assert choice.plan.reason is OffloadReason.DOES_NOT_PAY
    assert not score_of(Joint(max_own_loss=9.0).choose(REQUEST, snapshot), "p").skipped


def test_an_idle_fleet_computes_in_place() -> None:
    assert plan_of(fleet(view("a", 0), view("p", 0))) == (None, OffloadReason.DOES_NOT_PAY)


def test_streams_on_the_specialist_count_against_it() -> None:
    assert plan_of(fleet(*BUSY[:2], view("p", 12))) == (None, OffloadReason.DOES_NOT_PAY)


@pytest.mark.parametrize(
    ("views", "fields", "reason"),
    [
        (BUSY, {"specialists": {}}, OffloadReason.NO_SPECIALIST),
        (BUSY, {"specialists": {"gone": 1.0}}, OffloadReason.NO_SPECIALIST),
        (BUSY, {"broken_pairs": frozenset({("p", "a"), ("p", "b")})}, OffloadReason.PAIR_BROKEN),
        ((view("a", role=Role.NONE), BUSY[2]), {}, OffloadReason.ROLE_FORBIDS),
        ((BUSY[0], view("p", 0, role=Role.KV_CONSUMER)), {}, OffloadReason.NO_PREFILL_CANDIDATE),
        ((BUSY[0], view("p", 0, connector=Connector.NIXL)), {}, OffloadReason.NO_PREFILL_CANDIDATE),
        ((BUSY[0], view("p", 0, kv_capacity_tokens=0)), {}, OffloadReason.NO_PREFILL_CANDIDATE),
        ((BUSY[0], view("p", 0, kv_used_tokens=650_000)), {}, OffloadReason.NO_PREFILL_CANDIDATE),
        ((view("a", kv_used_tokens=600_000), BUSY[2]), {}, OffloadReason.NO_ROOM_ON_D),
        ((view("a", kv_capacity_tokens=0), BUSY[2]), {}, OffloadReason.NO_ROOM_ON_D),
    ],
)
def test_the_reason_against_a_hand_off(
    views: tuple[InstanceView, ...], fields: dict[str, Any], reason: OffloadReason
) -> None:
    assert plan_of(fleet(*views, **fields)) == (None, reason)


def test_a_broken_pair_leaves_the_next_d() -> None:
    choice = Joint().choose(REQUEST, fleet(*BUSY, broken_pairs=frozenset({("p", "b")})))
    assert choice.plan is not None
    assert (choice.instance, choice.plan.prefill_on) == ("a", "p")


def test_instances_that_only_prefill_are_specialists_too() -> None:
    consumers = (view("a", 5, role=Role.KV_CONSUMER), view("b", 4, role=Role.KV_CONSUMER))
    producer = view("only", 0, role=Role.KV_PRODUCER)
    snapshot = fleet(*consumers, specialists={}, prefill_instances=(*consumers, producer))
    choice = Joint().choose(REQUEST, snapshot)
    assert choice.plan is not None
    assert (choice.instance, choice.plan.prefill_on) == ("b", "only")
    assert "specialist_s" not in score_of(choice, "b").inputs


@pytest.mark.parametrize("able", [True, False])
def test_what_a_hand_off_cannot_carry_is_placed_on_one_instance_and_short_prompts_avoid_specialists(able: bool) -> None:
    request = REQUEST._replace(may_offload=able)
    views = BUSY if not able else tuple([each._replace(role=Role.NONE) for each in BUSY])
    decision = decide(request, fleet(*views), Joint(), Never(), ClassThresholds())
    assert (decision.decode_on, decision.prefill_on) == ("p", None)
    assert decision.offload.reason is (OffloadReason.ROLE_FORBIDS if able else OffloadReason.REQUEST_SHAPE)
    short = request._replace(prompt_tokens=100)
    idle = fleet(view("a", 0), view("p", 0))
    assert [score.inputs.get("specialist_s") for score in Joint().choose(short, idle).scores] == [None, 1.0]
    assert Joint().choose(short, idle).instance == "a"
    queue = {"requests": 3, "prefilling": 3, "pending_prefill_tokens": 180_000}
    waiting = fleet(view("a", 30), view("b", 30), view("p", **queue))
    choice = Joint().choose(request, waiting)
    assert score_of(choice, "p").skipped, "prompts do not queue at the specialist"


@pytest.mark.parametrize(
    "params",
    [{"heavy_tokens": 0}, {"specialist_s": -1.0}, {"max_own_loss": -0.1}, {"queue_cost": -1.0}, {"step_s": -1.0}],
)
def test_impossible_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(PolicyParameterError, match=r"joint|warm"):
        make_routing("joint", params)
