"""AIBrix's prefix-cache, worked by hand from its published rule."""

from __future__ import annotations

import pytest

from policies.baselines.aibrix_prefix import AibrixPrefix
from policies.types import InstanceView, Reason
from tests.policies.builders import ask, fleet_of, idle, score_of


@pytest.mark.parametrize(("running", "reason"), [(8, Reason.AFFINITY), (9, Reason.LEAST_LOADED)])
def test_more_than_eight_requests_apart_the_least_busy_takes_it(running: int, reason: Reason) -> None:
    fleet = fleet_of(
        InstanceView("busy", requests=running), InstanceView("warm", cached_tokens=999, requests=1), *idle(1)
    )
    choice = AibrixPrefix().choose(ask(1_000), fleet)
    assert (choice.instance, choice.reason) == ("warm" if reason is Reason.AFFINITY else "inst-0", reason)


@pytest.mark.parametrize(("running", "chosen"), [(4, "best"), (5, "second")])
def test_the_longest_match_must_not_be_busier_than_mean_plus_one_sigma(running: int, chosen: str) -> None:
    # with the fleet at (4, 4, 0, 0): mean 2, sigma 2, limit 4; at (5, 3, 0, 0): mean 2, sigma 2.12, limit 4.12
    fleet = fleet_of(
        InstanceView("best", cached_tokens=900, requests=running),
        InstanceView("second", cached_tokens=500, requests=8 - running),
        *idle(2),
    )
    choice = AibrixPrefix().choose(ask(1_000), fleet)
    assert (choice.instance, choice.reason) == (chosen, Reason.AFFINITY)


def test_where_every_holder_is_too_busy_the_fewest_requests_decide() -> None:
    fleet = fleet_of(InstanceView("warm", cached_tokens=900, requests=6), *idle(3))  # mean 1.5, sigma 2.6
    choice = AibrixPrefix().choose(ask(1_000), fleet)
    assert (choice.instance != "warm", choice.reason) == (True, Reason.LEAST_LOADED)


def test_matches_are_compared_in_whole_per_cent_then_by_requests() -> None:
    fleet = fleet_of(
        InstanceView("a", cached_tokens=909, requests=2), InstanceView("b", cached_tokens=900, requests=1), *idle(1)
    )
    choice = AibrixPrefix(sigma_factor=3).choose(ask(1_000), fleet)
    assert choice.instance == "b"
    assert score_of(choice, "a").inputs == {"requests": 2, "match_per_cent": 90}


def test_less_than_one_per_cent_is_no_match() -> None:
    fleet = fleet_of(InstanceView("a", cached_tokens=9, requests=0, recent_tokens=5.0), *idle(1))
    assert AibrixPrefix().choose(ask(1_000), fleet).reason is Reason.LEAST_LOADED


@pytest.mark.parametrize("bad", [{"imbalance_requests": -1}, {"sigma_factor": -0.1}])
def test_parameters_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"aibrix_prefix: {next(iter(bad))} must not be negative"):
        AibrixPrefix(**bad)  # type: ignore[arg-type]
