"""round_robin, random, least_loaded and linear, worked by hand."""

from __future__ import annotations

from collections import Counter

from policies.routing.least_loaded import LeastLoaded
from policies.routing.linear import Linear
from policies.routing.random_choice import RandomChoice
from policies.routing.round_robin import RoundRobin
from policies.types import InstanceView, Reason
from tests.policies.builders import ask, fleet_of, idle, score_of

BUSY = InstanceView("busy", pending_prefill_tokens=1_000, decoding_tokens=8_000, recent_tokens=500.0, requests=3)
WARM = InstanceView("warm", cached_tokens=900, decoding_tokens=2_000, recent_tokens=4_000.0, requests=1)
FREE = InstanceView("free")


def test_round_robin_takes_the_fleet_in_turn() -> None:
    policy, views = RoundRobin(), idle(3)
    chosen = [policy.choose(ask(), fleet_of(*views, sequence=s)).instance for s in range(7)]
    assert chosen == ["inst-0", "inst-1", "inst-2", "inst-0", "inst-1", "inst-2", "inst-0"]


def test_round_robin_scores_the_distance_to_the_turn() -> None:
    choice = RoundRobin().choose(ask(), fleet_of(*idle(3), sequence=4))
    assert [score.score for score in choice.scores] == [2.0, 0.0, 1.0]
    assert choice.reason is Reason.NEXT_IN_TURN


def test_round_robin_ignores_load_and_cache() -> None:
    assert RoundRobin().choose(ask(), fleet_of(BUSY, FREE, sequence=0)).instance == "busy"


def test_random_repeats_for_the_same_seed_and_differs_for_another() -> None:
    def draws(seed: int) -> list[str]:
        return [RandomChoice(seed).choose(ask(), fleet_of(*idle(8), sequence=s)).instance for s in range(40)]

    assert draws(1) == draws(1) != draws(2)


def test_random_is_uniform_over_many_decisions() -> None:
    drawn = Counter(RandomChoice(0).choose(ask(), fleet_of(*idle(4), sequence=s)).instance for s in range(4_000))
    assert all(abs(count - 1_000) < 120 for count in drawn.values())  # 4.4 standard deviations


def test_random_gives_the_drawn_instance_the_lowest_score() -> None:
    choice = RandomChoice(0).choose(ask(), fleet_of(*idle(4), sequence=3))
    assert sorted(score.score for score in choice.scores) == [0.0, 1.0, 1.0, 1.0]
    assert score_of(choice, choice.instance).score == 0.0
    assert choice.reason is Reason.DRAWN


def test_least_loaded_weighs_pending_decoding_and_recent_tokens() -> None:
    choice = LeastLoaded().choose(ask(), fleet_of(BUSY, WARM, FREE))
    assert [score.score for score in choice.scores] == [1_000 + 800 + 50, 0 + 200 + 400, 0]
    assert score_of(choice, "busy").inputs == {
        "pending_prefill_tokens": 1_000,
        "decoding_tokens": 8_000,
        "recent_tokens": 500.0,
    }
    assert (choice.instance, choice.reason) == ("free", Reason.LEAST_LOADED)


def test_least_loaded_is_blind_to_the_cache() -> None:
    cached = FREE._replace(instance="cached", cached_tokens=900, recent_tokens=1.0)
    assert LeastLoaded().choose(ask(), fleet_of(cached, FREE)).instance == "free"


def test_least_loaded_weights_are_parameters() -> None:
    choice = LeastLoaded(decode_weight=1.0, recent_weight=0.0).choose(ask(), fleet_of(BUSY, WARM))
    assert [score.score for score in choice.scores] == [9_000, 2_000]


def test_linear_is_ongoing_plus_a_tenth_of_recent_minus_cached() -> None:
    choice = Linear().choose(ask(), fleet_of(BUSY, WARM, FREE))
    assert [score.score for score in choice.scores] == [9_000 + 50, 2_000 + 400 - 900, 0]
    assert score_of(choice, "warm").inputs == {"ongoing_tokens": 2_000, "recent_tokens": 4_000.0, "cached_tokens": 900}
    assert (choice.instance, choice.reason) == ("free", Reason.LOWEST_SCORE)


def test_linear_alpha_says_how_much_load_a_cached_token_is_worth() -> None:
    assert Linear(alpha=3.0).choose(ask(), fleet_of(BUSY, WARM, FREE)).instance == "warm"
    assert score_of(Linear(alpha=3.0).choose(ask(), fleet_of(WARM, FREE)), "warm").score == 2_400 - 2_700
