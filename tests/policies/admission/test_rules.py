"""The admission rules: what each sends and holds, and why."""

from __future__ import annotations

from typing import Any

import pytest

from policies.admission.base import NO_INSTANCES, AdmissionReason, AdmissionView, Admit, Hold, InstanceUse, SessionView
from policies.admission.never_hold import NeverHold
from policies.admission.session_cap import SessionCap
from policies.admission.working_set import WorkingSet
from policies.registry import ADMISSION_GROUP, BUILT_IN, PolicyParameterError, admission_rules, make_admission
from policies.types import RequestView

NEW = SessionView()


def spread(fleet: AdmissionView, instances: int = 4) -> AdmissionView:
    """The fleet with its contexts shared equally between its instances."""
    sums = (fleet.pool_tokens, fleet.active_sessions, fleet.active_tokens, fleet.kept_sessions, fleet.kept_tokens)
    each = [total // instances for total in sums]
    uses = tuple(InstanceUse(f"i{number}", *each) for number in range(instances))
    return fleet._replace(instances=instances, by_instance=uses)


FULL = AdmissionView(
    pool_tokens=1_000_000,
    active_sessions=40,
    active_tokens=600_000,
    kept_sessions=40,
    kept_tokens=400_000,
    lost_share=0.5,
    prefilling=8,
    longest_hold_s=300.0,
)
"""Pools in use to the last token, and half of the time lost."""


def ask(tokens: int = 50_000) -> RequestView:
    return RequestView("req", tokens, session_id="s")


def admitted(rule: Any, session: SessionView = NEW, fleet: AdmissionView = FULL, tokens: int = 50_000) -> Admit | Hold:
    answer = rule.admit(ask(tokens), session, fleet if fleet.by_instance else spread(fleet))
    assert isinstance(answer, Admit | Hold)
    return answer


def reason(rule: Any, session: SessionView = NEW, fleet: AdmissionView = FULL, tokens: int = 50_000) -> AdmissionReason:
    answer = admitted(rule, session, fleet, tokens)
    assert isinstance(answer, Admit), answer
    return answer.reason


def held(
    rule: Any, session: SessionView = NEW, fleet: AdmissionView = FULL, tokens: int = 50_000
) -> tuple[int, int, int, int]:
    """Tokens in use with its own and of pools; its own, and the most that an instance has room for."""
    answer = admitted(rule, session, fleet, tokens)
    assert isinstance(answer, Hold), answer
    assert answer.reason is AdmissionReason.WORKING_SET
    return answer.needed_tokens, answer.pool_tokens, answer.own_tokens, answer.free_tokens


def test_never_hold_sends_everything() -> None:
    assert reason(NeverHold()) is AdmissionReason.NEVER_HOLDS


def test_a_session_cap_counts_sessions_in_flight_and_kept() -> None:
    rule = SessionCap(sessions=81)
    assert reason(rule) is AdmissionReason.BELOW_CAP
    assert SessionCap(sessions=80).admit(ask(), NEW, FULL) == Hold(AdmissionReason.AT_CAP)


@pytest.mark.parametrize("rule", [SessionCap(sessions=1), WorkingSet()], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("session", "resident"),
    [
        (SessionView(in_flight=1, turns=1), True),
        (SessionView(turns=3, idle_s=5.0, kept=True), True),
        (SessionView(turns=3, idle_s=5.0), False),
        (NEW, False),
    ],
)
def test_a_resident_session_is_never_held(rule: Any, session: SessionView, resident: bool) -> None:
    answer = admitted(rule, session)
    assert (answer == Admit(AdmissionReason.RESIDENT)) is resident
    assert isinstance(answer, Hold) is not resident


def test_a_kept_session_needs_room_beside_the_contexts_in_flight_only() -> None:
    kept = SessionView(turns=3, idle_s=5.0, kept=True)
    queued = FULL._replace(active_tokens=840_000, kept_tokens=200_000)
    # Room on each: 237,500 less 0.75 contexts of 1,040,000 / 80 tokens and 210,000 in flight.
    assert admitted(WorkingSet(), kept, queued, 17_750) == Admit(AdmissionReason.RESIDENT)
    assert held(WorkingSet(), kept, queued, 17_751) == (857_751, 1_000_000, 17_751, 17_750)
    assert reason(WorkingSet(), SessionView(in_flight=1, turns=1), queued) is AdmissionReason.RESIDENT
    assert reason(WorkingSet(), kept, queued._replace(pool_tokens=0)) is AdmissionReason.RESIDENT


def test_the_working_set_holds_a_session_that_would_evict_while_the_fleet_recomputes() -> None:
    assert held(WorkingSet()) == (1_050_000, 1_000_000, 50_000, 0)


def test_one_instance_with_room_is_enough_and_is_where_the_session_goes() -> None:
    fleet = spread(FULL)
    free = fleet.by_instance[2]._replace(active_sessions=2, active_tokens=40_000, kept_sessions=1, kept_tokens=9_000)
    fleet = fleet._replace(by_instance=(*fleet.by_instance[:2], free, *fleet.by_instance[3:]))
    assert admitted(WorkingSet(), fleet=fleet) == Admit(AdmissionReason.ROOM, frozenset({"i2"}))
    assert held(WorkingSet(), fleet=fleet, tokens=180_000)[3] == 177_574


def test_room_in_sum_is_none_where_no_instance_has_it() -> None:
    # Two contexts of 85,000 tokens do not fit a pool of 160,000; four pools have 300,000 tokens left.
    one = AdmissionView(
        pool_tokens=640_000, active_sessions=4, active_tokens=340_000, lost_share=0.5, instances=4, prefilling=4
    )
    assert held(WorkingSet(), fleet=one, tokens=85_000) == (425_000, 640_000, 85_000, 3_250)


def test_where_nobody_waits_and_little_is_recomputed_the_policy_chooses_among_all() -> None:
    fine = FULL._replace(kept_tokens=0, kept_sessions=0, lost_share=0.3)
    assert admitted(WorkingSet(), fleet=fine) == Admit(AdmissionReason.ROOM, NO_INSTANCES)
    assert admitted(WorkingSet(), fleet=fine._replace(held=1, lost_share=0.05)) == Admit(
        AdmissionReason.ROOM, NO_INSTANCES
    )
    everywhere = Admit(AdmissionReason.ROOM, frozenset({"i0", "i1", "i2", "i3"}))
    assert admitted(WorkingSet(), fleet=fine._replace(held=1, lost_share=0.06)) == everywhere
    assert admitted(WorkingSet(), SessionView(waited_s=3.0), fine._replace(lost_share=0.06)) == everywhere
    assert admitted(WorkingSet(), fleet=fine._replace(lost_share=0.31)) == everywhere


def test_a_kept_session_leaves_its_instance_only_for_one_where_it_evicts_nothing() -> None:
    kept = SessionView(turns=3, idle_s=5.0, kept=True)
    fleet = spread(FULL._replace(active_tokens=400_000, lost_share=0.0))
    roomy = fleet.by_instance[1]._replace(kept_tokens=87_500)
    fleet = fleet._replace(by_instance=(fleet.by_instance[0], roomy, *fleet.by_instance[2:]))
    assert admitted(WorkingSet(), kept, fleet) == Admit(AdmissionReason.RESIDENT)
    hurting = fleet._replace(lost_share=0.5)
    assert admitted(WorkingSet(), kept, hurting) == Admit(AdmissionReason.RESIDENT, frozenset({"i1"}))
    assert admitted(WorkingSet(), kept, hurting, 50_001) == Admit(AdmissionReason.RESIDENT)


def test_an_instance_without_contexts_has_room_for_a_prompt_of_any_length() -> None:
    fleet = spread(FULL)
    empty = InstanceUse("i0", 250_000)
    fleet = fleet._replace(by_instance=(empty, *fleet.by_instance[1:]))
    assert admitted(WorkingSet(), fleet=fleet, tokens=400_000) == Admit(AdmissionReason.ROOM, frozenset({"i0"}))


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        (FULL._replace(pool_tokens=0), AdmissionReason.POOLS_UNKNOWN),
        (FULL._replace(kept_tokens=0), AdmissionReason.ROOM),
        (FULL._replace(return_share=0.1), AdmissionReason.ROOM),
    ],
)
def test_the_working_set_sends_while_one_condition_is_missing(fleet: AdmissionView, expected: AdmissionReason) -> None:
    assert reason(WorkingSet(), fleet=fleet) is expected


def test_contexts_in_flight_that_exceed_the_room_hold_others_before_anything_is_lost() -> None:
    queued = FULL._replace(active_tokens=800_000, kept_tokens=0, kept_sessions=0, lost_share=0.0, prefilling=21)
    assert held(WorkingSet(), fleet=queued) == (850_000, 1_000_000, 50_000, 21_951)


def test_contexts_that_exceed_the_room_hold_others_also_while_all_sessions_are_being_answered() -> None:
    answering = FULL._replace(active_tokens=800_000, kept_tokens=0, kept_sessions=0, lost_share=0.0, prefilling=0)
    assert held(WorkingSet(), fleet=answering) == (850_000, 1_000_000, 50_000, 21_951)


def test_an_instance_without_a_request_takes_one_while_few_wait_for_a_first_token() -> None:
    fleet = spread(FULL._replace(prefilling=0))
    unused = fleet.by_instance[0]._replace(active_sessions=0, active_tokens=0, kept_tokens=250_000)
    idle = fleet._replace(by_instance=(unused, *fleet.by_instance[1:]))
    assert held(WorkingSet(), fleet=fleet, tokens=150_000)
    assert reason(WorkingSet(), fleet=idle, tokens=150_000) is AdmissionReason.IDLE_FLEET
    assert held(WorkingSet(), fleet=idle._replace(prefilling=1), tokens=150_000)
    assert held(WorkingSet(least_prefilling=0.0), fleet=idle, tokens=150_000)


def test_room_is_left_for_contexts_to_grow() -> None:
    large = AdmissionView(pool_tokens=1_280_000, active_sessions=8, active_tokens=480_000, prefilling=8)
    large = spread(large, 8)
    # A pool of 160,000 tokens holds two contexts of 60,000, but not until they have grown.
    assert held(WorkingSet(), fleet=large, tokens=60_000)[3] == 47_000
    assert reason(WorkingSet(spare_contexts=0.5), NEW, large, 60_000) is AdmissionReason.ROOM
    small = large._replace(active_sessions=960)
    assert reason(WorkingSet(), NEW, small, 60_000) is AdmissionReason.ROOM


def test_kept_contexts_take_no_more_than_their_share_of_the_pools() -> None:
    thinking = FULL._replace(active_tokens=200_000, kept_tokens=900_000)
    assert reason(WorkingSet(), fleet=thinking) is AdmissionReason.ROOM
    assert held(WorkingSet(kept_share=1.0), fleet=thinking)[:2] == (1_150_000, 1_000_000)
    working = thinking._replace(active_tokens=420_000)
    assert held(WorkingSet(), fleet=working)[:2] == (970_000, 1_000_000)


def test_kept_contexts_count_as_much_as_turns_are_followed_by_others() -> None:
    thinking = FULL._replace(active_tokens=250_000, kept_tokens=900_000, return_share=0.8)
    assert reason(WorkingSet(), fleet=thinking) is AdmissionReason.ROOM
    assert held(WorkingSet(kept_share=1.0), fleet=thinking)[:2] == (1_100_000, 1_000_000)


def test_an_idle_moment_is_no_reason_to_send_where_idling_is_permitted() -> None:
    thinking = FULL._replace(active_sessions=0, active_tokens=0, prefilling=0, kept_sessions=80, kept_tokens=1_000_000)
    assert held(WorkingSet(least_prefilling=0.0, kept_share=1.0), fleet=thinking)[3] == 0
    assert reason(WorkingSet(kept_share=1.0), fleet=thinking) is AdmissionReason.IDLE_FLEET
    nobody = thinking._replace(kept_sessions=0, kept_tokens=0)
    assert reason(WorkingSet(least_prefilling=0.0), fleet=nobody, tokens=2_000_000) is AdmissionReason.ROOM


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        (SessionCap, {"sessions": 0}),
        (SessionCap, {"keep_s": -1.0}),
        (WorkingSet, {"keep_s": -1.0}),
        (WorkingSet, {"fill": 0.0}),
        (WorkingSet, {"lost_share": 1.5}),
        (WorkingSet, {"least_prefilling": -1.0}),
        (WorkingSet, {"spare_contexts": -0.1}),
        (WorkingSet, {"kept_share": 1.5}),
        (WorkingSet, {"packing_share": 1.5}),
    ],
)
def test_impossible_parameters_are_refused(rule: Any, params: dict[str, Any]) -> None:
    with pytest.raises(PolicyParameterError, match=next(iter(params))):
        make_admission(rule.name, params)


def test_all_rules_are_registered() -> None:
    assert admission_rules() == sorted(BUILT_IN[ADMISSION_GROUP]) == ["never_hold", "session_cap", "working_set"]
    assert all(make_admission(name).name == name for name in admission_rules())
