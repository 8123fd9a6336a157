"""SMetric, worked by hand from its published rule."""

from __future__ import annotations

import pytest

from policies.baselines.smetric import Smetric
from policies.costs.formulas import Costs, PrefillModel
from policies.snapshot import FleetSnapshot
from policies.types import InstanceView, Reason
from tests.policies.builders import ask, fleet_of, idle, score_of

COSTS = Costs(PrefillModel(fixed_s=0.0, s_per_token=1e-4, s_per_token_squared=1e-9))
"""10,000 tokens take a second, and attention another microsecond per thousand tokens of context and token."""
TURN = ask(16_000, session_id="s")
"""Its objective is 1 + 16 x 0.0625 = 2 s."""


def fleet(*views: InstanceView, pinned: str | None = "home") -> FleetSnapshot:
    return fleet_of(*views, pinned=pinned, costs=COSTS)


def test_load_is_linear_and_quadratic_work_times_requests() -> None:
    view = InstanceView("a", cached_tokens=10_000, pending_prefill_tokens=4_000, prefilling=1, requests=3)
    score = Smetric().choose(TURN, fleet(view)).scores[0]
    # queued: one prefill of 4,000, half done; own: 6,000 new behind 10,000
    queued_s = 0.5 * (0.4 + 1e-9 * 4_000 * 2_000)
    own_s = 0.6 + 1e-9 * 6_000 * (16_000 - 3_000)
    assert score.inputs["queued_s"] == pytest.approx(queued_s)
    assert score.inputs["own_s"] == pytest.approx(own_s)
    assert score.score == pytest.approx((queued_s + own_s) * 3)


@pytest.mark.parametrize(("queued", "sticks"), [(26_000, True), (40_000, False)])
def test_a_later_turn_stays_while_its_instance_meets_the_objective(queued: int, sticks: bool) -> None:
    """1,000 new tokens take 0.1 s; half of a queued prefill is left: 1.5 s for 26,000 tokens, 2.4 s for 40,000."""
    home = InstanceView("home", cached_tokens=15_000, pending_prefill_tokens=queued, prefilling=1, requests=1)
    other = InstanceView("other", requests=1)
    choice = Smetric().choose(TURN, fleet(home, other))
    assert (choice.instance == "home") is sticks
    assert choice.reason is (Reason.AFFINITY if sticks else Reason.LOWEST_SCORE)


def test_it_also_stays_when_no_instance_meets_the_objective() -> None:
    views = [
        InstanceView(name, cached_tokens=cached, pending_prefill_tokens=100_000, prefilling=1, requests=1)
        for name, cached in (("home", 15_000), ("other", 0))
    ]
    assert Smetric().choose(TURN, fleet(*views)).reason is Reason.AFFINITY


def test_slack_widens_the_objective() -> None:
    home = InstanceView("home", cached_tokens=15_000, pending_prefill_tokens=40_000, prefilling=1, requests=1)
    assert Smetric(slack=1.5).choose(TURN, fleet(home, *idle(1))).instance == "home"


def test_a_first_turn_is_balanced_even_if_an_instance_holds_its_prefix() -> None:
    warm = InstanceView("warm", cached_tokens=15_000, requests=4)
    choice = Smetric().choose(TURN, fleet(warm, InstanceView("free", requests=0), pinned=None))
    assert (choice.instance, choice.reason) == ("free", Reason.LOWEST_SCORE)


def test_half_the_prompt_is_not_enough_to_follow() -> None:
    home = InstanceView("home", cached_tokens=8_000, requests=5)
    assert Smetric().choose(TURN, fleet(home, *idle(1))).reason is Reason.LOWEST_SCORE
    more = home._replace(cached_tokens=8_001)
    assert Smetric().choose(TURN, fleet(more, *idle(1))).reason is Reason.AFFINITY


def test_without_a_session_id_the_prefix_identifies_a_later_turn() -> None:
    warm = InstanceView("warm", cached_tokens=15_000, requests=5)
    choice = Smetric().choose(ask(16_000), fleet(warm, *idle(1), pinned=None))
    assert (choice.instance, choice.reason) == ("warm", Reason.AFFINITY)


def test_before_anything_is_learned_the_published_constants_price() -> None:
    choice = Smetric().choose(TURN, fleet_of(InstanceView("a", requests=1)))
    assert score_of(choice, "a").inputs["own_s"] == PrefillModel().predict(16_000).seconds


@pytest.mark.parametrize(
    "bad", [{"hit_ratio": 1.1}, {"slack": -1}, {"ttft_slo_s": -1}, {"ttft_slo_s_per_1k_tokens": -1}]
)
def test_parameters_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"smetric: {next(iter(bad))} must"):
        Smetric(**bad)
