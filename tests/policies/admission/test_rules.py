"""The admission rules: what each sends and holds, and why."""

from __future__ import annotations

from typing import Any

import pytest

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.admission.never_hold import NeverHold
from policies.admission.session_cap import SessionCap
from policies.admission.working_set import WorkingSet
from policies.registry import ADMISSION_GROUP, BUILT_IN, PolicyParameterError, admission_rules, make_admission
from policies.types import RequestView

NEW = SessionView()
FULL = AdmissionView(
    pool_tokens=1_000_000,
    active_sessions=40,
    active_tokens=600_000,
    kept_sessions=40,
    kept_tokens=400_000,
    lost_share=0.5,
    instances=4,
    prefilling=8,
    longest_hold_s=300.0,
)
"""Pools in use to the last token, and half of the time lost."""


def ask(tokens: int = 50_000) -> RequestView:
    return RequestView("req", tokens, session_id="s")


def reason(rule: Any, session: SessionView = NEW, fleet: AdmissionView = FULL, tokens: int = 50_000) -> AdmissionReason:
    answer = rule.admit(ask(tokens), session, fleet)
    assert isinstance(answer, Admit), answer
    return answer.reason


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
    answer = rule.admit(ask(), session, FULL)
    assert (answer == Admit(AdmissionReason.RESIDENT)) is resident
    assert isinstance(answer, Hold) is not resident


def test_a_kept_session_needs_room_beside_the_contexts_in_flight_only() -> None:
    kept = SessionView(turns=3, idle_s=5.0, kept=True)
    queued = FULL._replace(active_tokens=900_000, kept_tokens=80_000)
    # Room: 950,000 less half a context of 980,000 / 80 tokens for each of the 4 instances.
    assert reason(WorkingSet(), kept, queued, tokens=25_500) is AdmissionReason.RESIDENT
    assert WorkingSet().admit(ask(25_501), kept, queued) == Hold(AdmissionReason.WORKING_SET, 925_501, 1_000_000)
    assert reason(WorkingSet(), SessionView(in_flight=1, turns=1), queued) is AdmissionReason.RESIDENT
    assert reason(WorkingSet(), kept, queued._replace(pool_tokens=0)) is AdmissionReason.RESIDENT


def test_the_working_set_holds_a_session_that_would_evict_while_the_fleet_recomputes() -> None:
    assert WorkingSet().admit(ask(), NEW, FULL) == Hold(AdmissionReason.WORKING_SET, 1_050_000, 1_000_000)


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        (FULL._replace(pool_tokens=0), AdmissionReason.POOLS_UNKNOWN),
        (FULL._replace(kept_tokens=0), AdmissionReason.ROOM),
        (FULL._replace(prefilling=0), AdmissionReason.IDLE_FLEET),
        (FULL._replace(return_share=0.1), AdmissionReason.ROOM),
        (FULL._replace(lost_share=0.1), AdmissionReason.NO_LOSS),
    ],
)
def test_the_working_set_sends_while_one_condition_is_missing(fleet: AdmissionView, expected: AdmissionReason) -> None:
    assert reason(WorkingSet(), fleet=fleet) is expected


def test_contexts_in_flight_that_exceed_the_room_hold_others_before_anything_is_lost() -> None:
    queued = FULL._replace(active_tokens=900_000, kept_tokens=0, kept_sessions=0, lost_share=0.0)
    assert WorkingSet().admit(ask(), NEW, queued) == Hold(AdmissionReason.WORKING_SET, 950_000, 1_000_000)


def test_a_pool_holds_whole_contexts_only() -> None:
    large = AdmissionView(pool_tokens=1_280_000, active_sessions=16, active_tokens=960_000, instances=8, prefilling=8)
    # 8 pools of 160,000 tokens hold 16 contexts of 60,000 and no seventeenth, though the sum is below the sum of pools.
    assert isinstance(WorkingSet().admit(ask(60_000), NEW, large), Hold)
    assert reason(WorkingSet(spare_contexts=0.0), NEW, large, 60_000) is AdmissionReason.ROOM
    small = large._replace(active_sessions=960)
    assert reason(WorkingSet(), NEW, small, 60_000) is AdmissionReason.ROOM


def test_kept_contexts_take_no_more_than_their_share_of_the_pools() -> None:
    thinking = FULL._replace(active_tokens=300_000, kept_tokens=900_000)
    assert reason(WorkingSet(), fleet=thinking) is AdmissionReason.ROOM
    assert WorkingSet(kept_share=1.0).admit(ask(), NEW, thinking) == Hold(
        AdmissionReason.WORKING_SET, 1_250_000, 1_000_000
    )
    working = thinking._replace(active_tokens=420_000)
    assert WorkingSet().admit(ask(), NEW, working) == Hold(AdmissionReason.WORKING_SET, 970_000, 1_000_000)


def test_kept_contexts_count_as_much_as_turns_are_followed_by_others() -> None:
    thinking = FULL._replace(active_tokens=420_000, kept_tokens=900_000, return_share=0.8)
    assert reason(WorkingSet(), fleet=thinking) is AdmissionReason.ROOM
    assert WorkingSet(kept_share=1.0).admit(ask(), NEW, thinking) == Hold(
        AdmissionReason.WORKING_SET, 1_270_000, 1_000_000
    )


def test_an_idle_moment_is_no_reason_to_send_where_idling_is_permitted() -> None:
    thinking = FULL._replace(active_sessions=0, active_tokens=0, prefilling=0, kept_sessions=80, kept_tokens=1_000_000)
    assert isinstance(WorkingSet(least_prefilling=0.0, kept_share=1.0).admit(ask(), NEW, thinking), Hold)
    assert reason(WorkingSet(kept_share=1.0), fleet=thinking) is AdmissionReason.IDLE_FLEET
    nobody = thinking._replace(kept_sessions=0, kept_tokens=0)
    assert reason(WorkingSet(least_prefilling=0.0), fleet=nobody, tokens=2_000_000) is AdmissionReason.IDLE_FLEET


def test_once_some_wait_others_wait_too_although_the_loss_has_fallen() -> None:
    rule, better = WorkingSet(), FULL._replace(lost_share=0.0)
    assert isinstance(rule.admit(ask(), NEW, better._replace(held=1)), Hold)
    assert isinstance(rule.admit(ask(), SessionView(waited_s=3.0), better), Hold)


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
    ],
)
def test_impossible_parameters_are_refused(rule: Any, params: dict[str, Any]) -> None:
    with pytest.raises(PolicyParameterError, match=next(iter(params))):
        make_admission(rule.name, params)


def test_all_rules_are_registered() -> None:
    assert admission_rules() == sorted(BUILT_IN[ADMISSION_GROUP]) == ["never_hold", "session_cap", "working_set"]
    assert all(make_admission(name).name == name for name in admission_rules())
