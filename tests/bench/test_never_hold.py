"""The benchmark of admission's cost serves all arms, and the arm without admission counts no session."""

from __future__ import annotations

from bench.never_hold.__main__ import AdmissionArm, NoAccounts, measure, requests
from policies.admission.never_hold import NeverHold


def test_every_arm_is_measured() -> None:
    took = measure(2, 4)
    assert list(took) == ["no admission", "never_hold", "working_set"]
    assert all(cost > 0 for each in took.values() for cost in each)


def test_without_admission_no_session_is_counted() -> None:
    accounts = NoAccounts()
    AdmissionArm(2, NeverHold(), accounts).serve(requests(50))
    assert (accounts.active_sessions, accounts.kept_sessions, accounts.active_tokens) == (0, 0, 0)
