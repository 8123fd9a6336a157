"""The benchmark of admission's cost serves all arms, and the arm without admission counts no session."""

from __future__ import annotations

import pytest

from bench.never_hold.__main__ import AdmissionArm, measure, requests


def test_every_arm_is_measured() -> None:
    took = measure(2, 4)
    assert list(took) == ["no admission", "never_hold", "working_set"]
    assert all(cost > 0 for each in took.values() for cost in each)


@pytest.mark.parametrize("rule", [None, "never_hold", "working_set"])
def test_sessions_are_counted_in_the_arms_with_admission_only(rule: str | None) -> None:
    arm = AdmissionArm(2, rule)
    arm.serve(requests(50))
    accounts = arm.state.accounts
    counted = (accounts.active_sessions, accounts.active_tokens, accounts.kept_sessions)
    assert all(counted) if rule else not any(counted)


def test_never_hold_goes_through_the_line_of_the_proxy() -> None:
    without, never = AdmissionArm(2, None), AdmissionArm(2, "never_hold")
    for arm in (without, never):
        arm.serve(requests(1))
    assert (without._row.admission, never._row.admission) == (None, "never_holds")
