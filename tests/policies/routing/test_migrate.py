"""``migrate``: equal to ``warm`` without an overloaded home; else a pull, where it is cheaper than to stay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from policies.classes import ClassThresholds
from policies.costs.book import CostBook
from policies.decide import decide
from policies.offload.never import Never
from policies.offload.threshold import Threshold
from policies.registry import PolicyParameterError, make_routing
from policies.routing.migrate import Migrate
from policies.routing.warm import Warm
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import (
    Connector,
    InstanceView,
    OffloadPlan,
    OffloadReason,
    QueuedPrefill,
    Reason,
    RequestView,
    Role,
    Transport,
)
from tests.policies.builders import ask, cases, fleet_of, score_of

PROMPT = 60_000
CACHED = 58_000
TURN = ask(PROMPT, max_tokens=100, session_id="s")


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
    return fleet_of(*views, **{"pinned": "home", "costs": CostBook().at(0.0), **fields})


HOME = view("home", 24, cached_tokens=CACHED)
OTHERS = (view("a", 4), view("b", 2))


def plan_of(snapshot: FleetSnapshot, request: RequestView = TURN, **params: Any) -> OffloadPlan | None:
    return Migrate(**params).choose(request, snapshot).plan


def test_an_overloaded_home_hands_over_to_the_instance_with_the_least_to_do() -> None:
    choice = Migrate().choose(TURN, fleet(HOME, *OTHERS))
    assert choice.plan is not None
    assert (choice.instance, choice.reason) == ("b", Reason.SESSION_MIGRATED)
    assert (choice.plan.prefill_on, choice.plan.reason) == ("home", OffloadReason.CHOSEN)
    assert choice.scores == Warm().choose(TURN, fleet(HOME, *OTHERS)).scores
    inputs = choice.plan.inputs
    home = score_of(choice, "home")
    assert inputs["home_load_s"] == pytest.approx(0.3 * 24)
    assert inputs["target_load_s"] == pytest.approx(0.3 * 2)
    assert inputs["prefill_s"] == home.inputs["own_s"]
    assert inputs["first_s"] == pytest.approx(inputs["prefill_s"] + inputs["transfer_s"])
    assert inputs["stay_s"] == pytest.approx(home.score + 0.3 * 24)
    assert inputs["moved_s"] + 0.25 <= inputs["stay_s"]


def test_a_target_that_holds_part_of_the_prefix_pulls_less_and_is_preferred() -> None:
    def blocks(held: int) -> InstanceView:
        return view("partly", 4, cached_tokens=held)

    assert Migrate().choose(TURN, fleet(HOME, view("a", 4), blocks(50_000))).instance == "partly"
    transfers = []
    for held in (0, 50_000):
        plan = plan_of(fleet(HOME, blocks(held)))
        assert plan is not None
        transfers.append(plan.inputs["transfer_s"])
    assert transfers[1] < transfers[0]


def test_a_pull_does_not_overtake_the_prefills_queued_at_home() -> None:
    queued = HOME._replace(requests=9, prefilling=3, pending_prefill_tokens=150_000)
    plan = plan_of(fleet(queued, *OTHERS), priced=False)
    assert plan is not None
    assert plan.inputs["first_s"] > plan.inputs["prefill_queue_s"] > 3.0


def test_unpriced_it_moves_whenever_there_is_a_target() -> None:
    slow = tuple(each._replace(transport=Transport.TCP) for each in (HOME, *OTHERS))
    priced, always = plan_of(fleet(*slow)), plan_of(fleet(*slow), priced=False)
    assert priced is not None
    assert always is not None
    assert (priced.prefill_on, priced.reason) == (None, OffloadReason.DOES_NOT_PAY)
    assert priced.inputs["moved_s"] > priced.inputs["stay_s"]
    assert (always.prefill_on, always.reason) == ("home", OffloadReason.CHOSEN)


def test_between_the_thresholds_nothing_moves_either_way() -> None:
    """The old home does not pull the session back before the loads have changed places."""
    before = fleet(view("home", 23, cached_tokens=CACHED), view("b", 12))
    after = fleet(view("home", 18, cached_tokens=CACHED), view("b", 17, cached_tokens=CACHED), pinned="b")
    assert plan_of(before, priced=False) is None
    assert plan_of(after, priced=False) is None
    # Loads that have changed places: the old home still has the prefix, so the session returns.
    back = fleet(view("home", 2, cached_tokens=CACHED), view("b", 24, cached_tokens=CACHED), pinned="b")
    assert Migrate().choose(TURN, back).instance == "home"


def test_a_target_whose_queue_is_overtaken_is_light_with_and_without_the_scores() -> None:
    """The home has less to do than the target, but the turn overtakes nearly all that waits there."""
    queue = (QueuedPrefill(0.0, 0.1), QueuedPrefill(500.0, 10.0))
    busy = view("b", 2, prefilling=2, pending_prefill_tokens=400_000, queue=queue)
    for overtakes, instance in ((1.0, "b"), (0.0, "home")):
        snapshot, policy = fleet(HOME, busy), Migrate(overtakes=overtakes)
        assert policy.choose(TURN, snapshot).instance == instance
        place = policy.quick(TURN, snapshot, FleetColumns.of(snapshot.instances)).place
        assert snapshot.instances[place].instance == instance


@pytest.mark.parametrize(
    "views",
    [
        (view("home", 3, cached_tokens=CACHED), view("a", 0)),
        (view("home", 24, cached_tokens=25_000), *OTHERS),
        (HOME, view("a", 12), view("b", 14)),
        (HOME,),
    ],
    ids=["below overload_s", "little cached", "all are loaded", "alone"],
)
def test_without_an_overloaded_home_the_planner_is_asked(views: tuple[InstanceView, ...]) -> None:
    assert Migrate().choose(TURN, fleet(*views)) == Warm().choose(TURN, fleet(*views))
    decision = decide(TURN, fleet(*views), Migrate(), Threshold(), ClassThresholds())
    assert not decision.planned


@pytest.mark.parametrize(
    ("views", "fields", "reason"),
    [
        ((HOME, view("a", role=Role.NONE)), {}, OffloadReason.ROLE_FORBIDS),
        ((HOME._replace(role=Role.KV_CONSUMER), *OTHERS), {}, OffloadReason.NO_PREFILL_CANDIDATE),
        ((HOME, view("a", connector=Connector.NIXL)), {}, OffloadReason.NO_PREFILL_CANDIDATE),
        ((HOME, view("a")), {"broken_pairs": frozenset({("home", "a")})}, OffloadReason.PAIR_BROKEN),
        ((HOME, view("a", kv_used_tokens=600_000)), {}, OffloadReason.NO_ROOM_ON_D),
        ((HOME, view("a", kv_capacity_tokens=0)), {}, OffloadReason.NO_ROOM_ON_D),
        ((HOME, *OTHERS), {"target_share": 0.01}, OffloadReason.DOES_NOT_PAY),
        ((HOME, *OTHERS), {"offloads_in_flight": 4}, OffloadReason.CAP_REACHED),
    ],
)
def test_the_reason_against_a_migration(
    views: tuple[InstanceView, ...], fields: dict[str, Any], reason: OffloadReason
) -> None:
    params = {name: value for name, value in fields.items() if name == "target_share"}
    snapshot = fleet(*views, **{name: value for name, value in fields.items() if name not in params})
    plan = plan_of(snapshot, priced=False, **params)
    assert plan is not None
    assert (plan.prefill_on, plan.reason) == (None, reason)


def test_a_broken_pair_leaves_the_next_target() -> None:
    choice = Migrate().choose(TURN, fleet(HOME, *OTHERS, broken_pairs=frozenset({("home", "b")})))
    assert choice.instance == "a"


def test_of_equal_holders_the_sessions_own_is_its_home() -> None:
    twin = view("twin", 24, cached_tokens=CACHED)
    plan = plan_of(fleet(twin, HOME, *OTHERS, view("c", 1), view("d", 1), view("e", 1)), priced=False)
    assert plan is not None
    assert plan.prefill_on == "home"


def test_a_request_that_a_hand_off_cannot_carry_stays() -> None:
    request = TURN._replace(may_offload=False)
    assert Migrate().choose(request, fleet(HOME, *OTHERS)) == Warm().choose(request, fleet(HOME, *OTHERS))


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_a_migration_is_one_that_can_be_carried_out(case: tuple[RequestView, FleetSnapshot]) -> None:
    request, snapshot = case
    policy = Migrate(
        overload_s=0.0, overload_factor=1.0, affinity_gate=0.0, min_cached_tokens=1, target_share=0.99, priced=False
    )
    decision = decide(request, snapshot, policy, Never(), ClassThresholds())
    names = [each.instance for each in snapshot.instances]
    assert policy.quick(request, snapshot, FleetColumns.of(snapshot.instances)).place == names.index(decision.decode_on)
    if decision.prefill_on is None:
        assert decision.offload.reason is not OffloadReason.CHOSEN
        assert decision.reason is not Reason.SESSION_MIGRATED
        return
    prefill, decode = snapshot.view(decision.prefill_on), snapshot.view(decision.decode_on)
    assert prefill is not None
    assert decode is not None
    assert decision.reason is Reason.SESSION_MIGRATED
    assert prefill.cached_tokens == max(each.cached_tokens for each in snapshot.instances)
    assert prefill.role in {Role.KV_BOTH, Role.KV_PRODUCER}
    assert decode.role in {Role.KV_BOTH, Role.KV_CONSUMER}
    assert (prefill.instance, decode.instance) not in snapshot.broken_pairs


@pytest.mark.parametrize(
    "params",
    [
        {"overload_factor": 0.9},
        {"overload_s": -1.0},
        {"target_share": 1.0},
        {"affinity_gate": 1.1},
        {"min_cached_tokens": 0},
        {"max_in_flight": 0},
        {"stream_s": -0.1},
        {"min_gain_s": -1.0},
        {"step_s": -1.0},
    ],
)
def test_impossible_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(PolicyParameterError, match=r"migrate|warm"):
        make_routing("migrate", params)
