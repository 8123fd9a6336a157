"""The agentic-kvc reports' baseline, worked by hand from its published rules."""

from __future__ import annotations

from typing import Any

import pytest

from policies.baselines.pinned_linear import PinnedLinear
from policies.registry import PolicyParameterError, make_routing
from policies.types import Choice, InstanceView, Reason, RequestView
from tests.policies.builders import ask, fleet_of, score_of

TURN = ask(10_000, session_id="s")


def choose(*views: InstanceView, request: RequestView = TURN, pinned: str | None = "home", **params: Any) -> Choice:
    return PinnedLinear(**params).choose(request, fleet_of(*views, pinned=pinned))


def test_the_score_is_load_minus_cache() -> None:
    view = InstanceView("a", pending_prefill_tokens=3_000, decoding_tokens=4_000, cached_tokens=5_000)
    assert choose(view, pinned=None).scores[0].score == 3_000 + 4_000 - 5_000
    score = choose(view, pinned=None, alpha=0.5).scores[0]
    assert score.score == 7_000 - 2_500
    assert score.inputs == {"ongoing_tokens": 7_000, "cached_tokens": 5_000}


@pytest.mark.parametrize(("load", "reason"), [(8_000, Reason.SESSION_PINNED), (8_001, Reason.SESSION_OVERLOADED)])
def test_a_turn_stays_up_to_twice_the_mean_load(load: int, reason: Reason) -> None:
    """The mean over four with 8,000 elsewhere is (8,000 + 8,000) / 4; decoding counts as queued prefill does."""
    home = InstanceView("home", pending_prefill_tokens=load - 3_000, decoding_tokens=3_000, cached_tokens=9_000)
    others = [InstanceView("b", decoding_tokens=8_000), InstanceView("c"), InstanceView("d", cached_tokens=1)]
    choice = choose(home, *others)
    assert choice.reason is reason
    assert choice.instance == ("home" if reason is Reason.SESSION_PINNED else "d")
    # Its own cache would have kept it: the override leaves it out.
    assert score_of(choice, "home").skipped is (reason is Reason.SESSION_OVERLOADED)


def test_another_factor_moves_the_override() -> None:
    home = InstanceView("home", pending_prefill_tokens=20_000)
    others = [InstanceView(name, pending_prefill_tokens=10_000) for name in "bcd"]
    assert choose(home, *others).instance == "home"
    assert choose(home, *others, overload_factor=1.5).reason is Reason.SESSION_OVERLOADED


@pytest.mark.parametrize(
    ("request_view", "pinned", "reason"),
    [
        (TURN, None, Reason.SESSION_PLACED),
        (ask(10_000), None, Reason.LOWEST_SCORE),
        (TURN, "gone", Reason.SESSION_INSTANCE_GONE),
    ],
)
def test_without_a_pin_the_score_decides(request_view: RequestView, pinned: str | None, reason: Reason) -> None:
    warm = InstanceView("warm", pending_prefill_tokens=4_000, cached_tokens=5_000)
    choice = choose(warm, InstanceView("free"), request=request_view, pinned=pinned)
    assert (choice.instance, choice.reason) == ("warm", reason)


def test_an_only_instance_keeps_its_session() -> None:
    assert choose(InstanceView("home", pending_prefill_tokens=10**6)).reason is Reason.SESSION_PINNED


def test_it_is_registered_and_refuses_nonsense() -> None:
    assert make_routing("pinned_linear") == PinnedLinear()
    with pytest.raises(PolicyParameterError, match="overload_factor must be at least 1"):
        make_routing("pinned_linear", {"overload_factor": 0.5})
    with pytest.raises(PolicyParameterError, match="alpha must not be negative"):
        make_routing("pinned_linear", {"alpha": -1.0})
