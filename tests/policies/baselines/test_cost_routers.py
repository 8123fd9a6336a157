"""Dynamo's cost, llm-d's filter and LPWL, worked by hand from their published formulas."""

from __future__ import annotations

import pytest

from policies.baselines.dynamo_cost import DynamoCost
from policies.baselines.llmd_affinity import LlmdAffinity
from policies.baselines.lpwl import Lpwl
from policies.types import InstanceView, Reason
from tests.policies.builders import ask, fleet_of, idle, score_of

FIFTH = ask(1_600)
"""100 blocks of 16."""


def test_dynamo_adds_blocks_to_prefill_and_blocks_in_flight() -> None:
    warm = InstanceView("warm", cached_tokens=800, pending_prefill_tokens=160, decoding_tokens=3_200, requests=3)
    free = InstanceView("free", decoding_tokens=1_600, requests=1)
    choice = DynamoCost().choose(FIFTH, fleet_of(warm, free))
    # warm: raw 10 + 100 blocks, less 50 credited, plus 200 decoding and 10 waiting; free: 100 + 100
    assert [score.score for score in choice.scores] == [110 - 50 + 210, 100 + 100]
    assert score_of(choice, "warm").inputs == {
        "raw_prefill_blocks": 110,
        "credit_blocks": 50,
        "decode_blocks": 210,
        "requests": 3,
    }
    assert (choice.instance, choice.reason) == ("free", Reason.LOWEST_SCORE)


def test_dynamos_credit_decays_with_the_backlog_above_the_least_loaded() -> None:
    warm = InstanceView("warm", cached_tokens=800, pending_prefill_tokens=2_000)
    other = InstanceView("other", pending_prefill_tokens=400)
    policy = DynamoCost(overlap_score_credit_decay=2.0)
    # 1,600 tokens of backlog above the floor are one prompt: decay 1 / (1 + 2)
    choice = policy.choose(FIFTH, fleet_of(warm, other))
    assert score_of(choice, "warm").inputs["credit_blocks"] == pytest.approx(50 / 3)
    assert score_of(choice, "other").inputs["credit_blocks"] == 0
    at_the_floor = policy.choose(FIFTH, fleet_of(warm._replace(pending_prefill_tokens=400), other))
    assert score_of(at_the_floor, "warm").inputs["credit_blocks"] == 50


def test_dynamos_scale_and_request_weight() -> None:
    view = InstanceView("a", pending_prefill_tokens=160, requests=4)
    choice = DynamoCost(prefill_load_scale=0.5, decode_active_request_weight=2.0).choose(FIFTH, fleet_of(view))
    assert choice.scores[0].score == 0.5 * 110 + 10 + 2 * 4


@pytest.mark.parametrize(("cached", "kept"), [(800, ["warm"]), (799, ["free", "warm"])])
def test_llmd_keeps_only_instances_with_four_fifths_of_the_prompt(cached: int, kept: list[str]) -> None:
    warm = InstanceView("warm", cached_tokens=cached, pending_prefill_tokens=100_000)
    choice = LlmdAffinity().choose(ask(1_000), fleet_of(warm, InstanceView("free")))
    assert sorted(score.instance for score in choice.scores if not score.skipped) == kept
    assert (choice.instance, choice.reason) == (
        ("warm", Reason.AFFINITY) if kept == ["warm"] else ("free", Reason.LEAST_LOADED)
    )


@pytest.mark.parametrize(
    ("pending", "reason"),
    [
        (286_704, Reason.AFFINITY),  # 18,000 ms at 15,928 tokens/s are 286,704 tokens
        (286_705, Reason.AFFINITY_OVERLOADED),
    ],
)
def test_llmd_breaks_stickiness_eighteen_seconds_behind(pending: int, reason: Reason) -> None:
    warm = InstanceView("warm", cached_tokens=900, pending_prefill_tokens=pending)
    choice = LlmdAffinity().choose(ask(1_000), fleet_of(warm, *idle(2)))
    assert choice.reason is reason
    assert (choice.instance == "warm") is (reason is Reason.AFFINITY)


def test_llmd_compares_the_best_sticky_with_the_best_other() -> None:
    slow = InstanceView("slow", cached_tokens=900, pending_prefill_tokens=900_000)
    fast = InstanceView("fast", cached_tokens=900, pending_prefill_tokens=200_000)
    choice = LlmdAffinity().choose(ask(1_000), fleet_of(slow, fast, *idle(1)))
    assert (choice.instance, choice.reason) == ("fast", Reason.AFFINITY)


def test_llmd_stickiness_can_be_made_unbreakable() -> None:
    warm = InstanceView("warm", cached_tokens=900, pending_prefill_tokens=10**7)
    assert LlmdAffinity(max_ttft_penalty_ms=0).choose(ask(1_000), fleet_of(warm, *idle(1))).instance == "warm"


def test_llmds_load_is_what_is_queued_and_new_over_four_million_tokens() -> None:
    view = InstanceView("a", cached_tokens=500, pending_prefill_tokens=4_194_304 // 2 - 500)
    full = InstanceView("b", pending_prefill_tokens=10**7)
    choice = LlmdAffinity().choose(ask(1_000), fleet_of(view, full))
    assert [score.score for score in choice.scores] == [0.5, 1.0]


def test_lpwl_takes_the_least_prefill_left() -> None:
    warm = InstanceView("warm", cached_tokens=900, pending_prefill_tokens=600, decoding_tokens=10**6, requests=9)
    free = InstanceView("free")
    choice = Lpwl().choose(ask(1_000), fleet_of(warm, free))
    assert [score.score for score in choice.scores] == [700, 1_000]
    assert (choice.instance, choice.reason) == ("warm", Reason.LOWEST_SCORE)


@pytest.mark.parametrize(
    ("policy", "bad"),
    [
        (DynamoCost, {"overlap_score_credit": 1.1}),
        (DynamoCost, {"overlap_score_credit_decay": -1}),
        (DynamoCost, {"prefill_load_scale": -1}),
        (DynamoCost, {"decode_active_request_weight": -1}),
        (LlmdAffinity, {"affinity_threshold": 1.1}),
        (LlmdAffinity, {"max_ttft_penalty_ms": -1}),
        (LlmdAffinity, {"peak_prefill_tokens_per_s": 0}),
        (LlmdAffinity, {"queue_threshold_tokens": 0}),
    ],
)
def test_parameters_out_of_range_are_refused(policy: type[DynamoCost | LlmdAffinity], bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{policy.name}: {next(iter(bad))} must"):
        policy(**bad)  # type: ignore[arg-type]
