"""Offload planners: every reason, and the choice of P."""

from __future__ import annotations

from typing import Any

import pytest

from policies.offload.base import best_prefill, has_room
from policies.offload.never import Never
from policies.offload.threshold import Threshold
from policies.snapshot import FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, Role
from tests.policies.builders import ask, fleet_of

REQUEST = ask(60_000, max_tokens=1_000)
D = InstanceView("d", role=Role.KV_BOTH, requests=4, decoding_tokens=90_000, kv_capacity_tokens=400_000)
P1 = InstanceView("p1", role=Role.KV_BOTH, pending_prefill_tokens=30_000)
P2 = InstanceView("p2", role=Role.KV_BOTH, pending_prefill_tokens=5_000)


def plan(
    decode: InstanceView = D,
    others: tuple[InstanceView, ...] = (P1, P2),
    request_class: RequestClass = RequestClass.HEAVY,
    planner: Threshold | Never | None = None,
    **fields: Any,
) -> OffloadPlan:
    return (planner or Threshold()).plan(REQUEST, decode, request_class, fleet_of(decode, *others, **fields))


def test_never_never_offloads() -> None:
    assert plan(planner=Never()) == OffloadPlan(None, OffloadReason.PLANNER_NEVER)


def test_a_heavy_request_goes_to_the_p_with_least_queued_prefill() -> None:
    chosen = plan(offloads_in_flight=3)
    assert (chosen.prefill_on, chosen.reason) == ("p2", OffloadReason.CHOSEN)
    assert chosen.inputs == {
        "new_tokens": 60_000.0,
        "decode_requests": 4.0,
        "in_flight": 3.0,
        "prefill_pending_tokens": 5_000.0,
    }


@pytest.mark.parametrize("request_class", [RequestClass.WARM, RequestClass.MEDIUM])
def test_what_is_not_heavy_stays(request_class: RequestClass) -> None:
    assert plan(request_class=request_class).reason is OffloadReason.BELOW_THRESHOLD


@pytest.mark.parametrize("role", [Role.KV_PRODUCER, Role.NONE])
def test_a_d_that_cannot_receive_stays_alone(role: Role) -> None:
    assert plan(D._replace(role=role)).reason is OffloadReason.ROLE_FORBIDS


@pytest.mark.parametrize("role", [Role.KV_BOTH, Role.KV_CONSUMER])
def test_a_d_that_can_receive_is_offloaded(role: Role) -> None:
    assert plan(D._replace(role=role)).reason is OffloadReason.CHOSEN


def test_an_idle_d_has_nothing_to_protect_by_default() -> None:
    idle_d = D._replace(requests=0, decoding_tokens=0)
    assert plan(idle_d).reason is OffloadReason.NOTHING_TO_PROTECT
    assert plan(idle_d, planner=Threshold(min_decode_requests=0)).reason is OffloadReason.CHOSEN
    assert plan(planner=Threshold(min_decode_requests=5)).reason is OffloadReason.NOTHING_TO_PROTECT


def test_the_cap_on_offloads_in_flight_holds() -> None:
    assert plan(offloads_in_flight=4).reason is OffloadReason.CAP_REACHED
    assert plan(offloads_in_flight=4, planner=Threshold(max_in_flight=5)).reason is OffloadReason.CHOSEN


@pytest.mark.parametrize(
    ("used", "promised", "fits"),
    [(339_000, 0, True), (339_001, 0, False), (0, 339_001, False), (200_000, 139_000, True), (200_000, 139_001, False)],
)
def test_d_must_hold_prompt_and_output_beside_what_is_used_and_promised(used: int, promised: int, fits: bool) -> None:
    decode = D._replace(kv_used_tokens=used, kv_promised_tokens=promised)
    assert has_room(decode, REQUEST) is fits
    assert plan(decode).reason is (OffloadReason.CHOSEN if fits else OffloadReason.NO_ROOM_ON_D)


def test_the_published_arm_pushes_to_a_d_without_room() -> None:
    """As its source did: no condition but the class and the cap."""
    full = D._replace(kv_used_tokens=D.kv_capacity_tokens, requests=0, decoding_tokens=0)
    published = Threshold(min_decode_requests=0, check_room=False)
    assert plan(full, planner=published).reason is OffloadReason.CHOSEN
    assert plan(full, planner=Threshold(min_decode_requests=0)).reason is OffloadReason.NO_ROOM_ON_D
    assert plan(full, planner=published, offloads_in_flight=4).reason is OffloadReason.CAP_REACHED


def test_a_pool_of_unknown_size_is_taken_to_have_room() -> None:
    assert has_room(D._replace(kv_capacity_tokens=0, kv_used_tokens=10**9), REQUEST)


@pytest.mark.parametrize(
    "others",
    [(), (P1._replace(role=Role.KV_CONSUMER), P2._replace(role=Role.NONE))],
    ids=["alone", "nobody may send"],
)
def test_without_a_p_the_request_stays(others: tuple[InstanceView, ...]) -> None:
    assert plan(others=others).reason is OffloadReason.NO_PREFILL_CANDIDATE


def test_d_itself_is_never_p_however_idle() -> None:
    assert best_prefill(REQUEST, D, fleet_of(D)) is None
    assert plan(others=(P1._replace(pending_prefill_tokens=10**6),)).prefill_on == "p1"


@pytest.mark.parametrize("role", [Role.KV_BOTH, Role.KV_PRODUCER])
def test_only_roles_that_may_send_become_p(role: Role) -> None:
    assert plan(others=(P2._replace(role=Role.KV_CONSUMER), P1._replace(role=role))).prefill_on == "p1"


def test_a_broken_pair_is_passed_over_in_its_own_direction_only() -> None:
    assert plan(broken_pairs=frozenset({("p2", "d")})).prefill_on == "p1"
    assert plan(broken_pairs=frozenset({("d", "p2")})).prefill_on == "p2"


def test_when_every_pair_is_broken_the_plan_says_so() -> None:
    broken = frozenset({("p1", "d"), ("p2", "d")})
    assert plan(broken_pairs=broken).reason is OffloadReason.PAIR_BROKEN
    assert plan(others=(), broken_pairs=broken).reason is OffloadReason.NO_PREFILL_CANDIDATE


def test_p_is_chosen_by_queue_plus_new_tokens_then_requests_then_recent_work() -> None:
    cached = P1._replace(cached_tokens=26_000)  # 30,000 queued + 34,000 new against 5,000 + 60,000
    assert plan(others=(cached, P2)).prefill_on == "p1"
    equal = P1._replace(pending_prefill_tokens=5_000)
    assert plan(others=(equal._replace(requests=1), P2)).prefill_on == "p2"
    assert plan(others=(equal, P2._replace(recent_tokens=9.0))).prefill_on == "p1"


def test_instances_kept_for_prefill_are_the_only_candidates_for_p_beside_the_fleet_given_there() -> None:
    spare = InstanceView("spare", role=Role.KV_PRODUCER)
    fleet = FleetSnapshot((D, P2), prefill_instances=(D, P2, spare))
    assert Threshold().plan(REQUEST, D, RequestClass.HEAVY, fleet).prefill_on == "spare"


@pytest.mark.parametrize("params", [{"max_in_flight": 0}, {"min_decode_requests": -1}])
def test_bad_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_in_flight must be at least 1 and min_decode_requests at least 0"):
        Threshold(**params)


def test_these_planners_know_these_reasons_and_the_rest_is_what_became_of_an_offload() -> None:
    given = {
        plan(planner=Never()).reason,
        plan().reason,
        plan(request_class=RequestClass.WARM).reason,
        plan(D._replace(role=Role.NONE)).reason,
        plan(D._replace(requests=0)).reason,
        plan(offloads_in_flight=4).reason,
        plan(D._replace(kv_used_tokens=400_000)).reason,
        plan(others=()).reason,
        plan(others=(P1,), broken_pairs=frozenset({("p1", "d")})).reason,
    }
    elsewhere = {
        OffloadReason.REQUEST_SHAPE,
        OffloadReason.DOES_NOT_PAY,
        OffloadReason.UNSURE,
        OffloadReason.NO_SPECIALIST,
        OffloadReason.PLANNER_FAILED,
    }
    rest = {reason for reason in OffloadReason if not reason.startswith("fell_back")}
    assert rest - elsewhere == given
