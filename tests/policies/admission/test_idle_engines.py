"""``working_set`` with an idle engine: what it would evict against the time until a session returns there."""

from __future__ import annotations

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, InstanceUse, SessionView
from policies.admission.working_set import WorkingSet
from policies.costs.formulas import PrefillModel
from policies.types import RequestView

MODEL = PrefillModel(fixed_s=0.0, s_per_token=1e-4, s_per_token_squared=0.0)
"""10,000 tokens a second."""
IDLE = InstanceUse("idle", 100_000, 0, 0, 2, 60_000)
BUSY = InstanceUse("busy", 100_000, 3, 90_000, 0, 0, 0)
FLEET = AdmissionView(
    pool_tokens=200_000,
    active_sessions=3,
    active_tokens=90_000,
    kept_sessions=2,
    kept_tokens=60_000,
    instances=2,
    by_instance=(IDLE, BUSY),
    return_gap_s=10.0,
    prefill=MODEL,
)
"""A prompt of 60,000 tokens evicts 25,000 of the idle one's 60,000, which takes 2.5 s to compute again; the first of
two sessions is back after 2.5 s."""


def answer(fleet: AdmissionView, tokens: int = 60_000) -> Admit | Hold:
    return WorkingSet().admit(RequestView("r", tokens, session_id="s"), SessionView(), fleet)


def sent(fleet: AdmissionView, tokens: int = 60_000) -> bool:
    found = answer(fleet, tokens)
    assert isinstance(found, Hold) or found.reason is AdmissionReason.IDLE_FLEET
    return isinstance(found, Admit)


def test_an_engine_idles_if_a_session_is_back_before_an_eviction_pays() -> None:
    assert sent(FLEET)
    assert not sent(FLEET._replace(return_gap_s=9.9))
    assert not sent(FLEET, tokens=61_000)


def test_sessions_that_seldom_return_keep_no_engine_idle() -> None:
    assert sent(FLEET._replace(return_gap_s=9.9, return_share=0.9))


def test_an_engine_whose_contexts_leave_room_is_used() -> None:
    assert sent(FLEET._replace(return_gap_s=0.1), tokens=35_000)


def test_an_engine_is_used_while_prefill_times_are_unknown() -> None:
    assert sent(FLEET._replace(return_gap_s=0.1, prefill=None))


def test_one_engine_that_is_worth_using_is_enough() -> None:
    other = replace_use(IDLE, "other", kept_sessions=1, kept_tokens=55_000)
    assert not sent(FLEET._replace(return_gap_s=9.9))
    assert sent(FLEET._replace(return_gap_s=9.9, by_instance=(IDLE, BUSY, other), instances=3))


def replace_use(use: InstanceUse, name: str, *, kept_sessions: int, kept_tokens: int) -> InstanceUse:
    return use._replace(instance=name, kept_sessions=kept_sessions, kept_tokens=kept_tokens)
