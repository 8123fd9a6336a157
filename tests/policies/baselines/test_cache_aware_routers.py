"""vLLM Router's and SGLang's cache-aware policies, worked by hand from their published rules."""

from __future__ import annotations

import pytest

from policies.baselines.sglang_cache_aware import SglangCacheAware
from policies.baselines.shortest_queue import is_imbalanced
from policies.baselines.vllm_cache_aware import VllmCacheAware
from policies.baselines.vllm_kv_aware import VllmKvAware
from policies.types import InstanceView, Reason
from tests.policies.builders import ask, fleet_of, idle, score_of

BOTH = [VllmCacheAware(), SglangCacheAware()]


@pytest.mark.parametrize("policy", BOTH, ids=lambda policy: policy.name)
def test_defaults_are_those_of_both_command_lines(policy: VllmCacheAware | SglangCacheAware) -> None:
    assert (policy.cache_threshold, policy.balance_abs_threshold, policy.balance_rel_threshold) == (0.3, 64, 1.5)


@pytest.mark.parametrize(
    ("most", "least", "imbalanced"),
    [
        (64, 0, False),  # a difference of 64 is not above 64
        (65, 0, True),
        (195, 130, False),  # 65 apart, but 195 is not above 1.5 x 130
        (196, 130, True),
    ],
)
def test_queues_are_uneven_only_above_both_thresholds(most: int, least: int, imbalanced: bool) -> None:
    fleet = fleet_of(InstanceView("a", requests=most), InstanceView("b", requests=least))
    assert is_imbalanced([view.requests for view in fleet.instances], 64, 1.5) is imbalanced


@pytest.mark.parametrize("policy", BOTH, ids=lambda policy: policy.name)
def test_a_match_above_the_threshold_is_followed_regardless_of_its_queue(
    policy: VllmCacheAware | SglangCacheAware,
) -> None:
    warm = InstanceView("warm", cached_tokens=301, requests=64, pending_prefill_tokens=10**6)
    choice = policy.choose(ask(1_000), fleet_of(*idle(2), warm))
    assert (choice.instance, choice.reason) == ("warm", Reason.AFFINITY)
    assert score_of(choice, "warm").inputs == {"requests": 64, "match_rate": 0.301}


@pytest.mark.parametrize("policy", BOTH, ids=lambda policy: policy.name)
def test_a_match_at_the_threshold_counts_as_a_miss(policy: VllmCacheAware | SglangCacheAware) -> None:
    warm = InstanceView("warm", cached_tokens=300, requests=1)
    choice = policy.choose(ask(1_000), fleet_of(warm, InstanceView("free")))
    assert (choice.instance, choice.reason) == ("free", Reason.LEAST_LOADED)


@pytest.mark.parametrize("policy", BOTH, ids=lambda policy: policy.name)
def test_uneven_queues_disable_affinity_for_all_candidates(policy: VllmCacheAware | SglangCacheAware) -> None:
    """Even for a holder that is not the busy one: the rule considers the fleet, not the candidate."""
    fleet = fleet_of(InstanceView("busy", requests=65), InstanceView("warm", cached_tokens=999, requests=1), *idle(1))
    choice = policy.choose(ask(1_000), fleet)
    assert (choice.instance, choice.reason) == ("inst-0", Reason.LEAST_LOADED)


def test_of_equal_holders_vllm_takes_the_less_busy_one_and_sglang_the_last_one() -> None:
    last = InstanceView("last", cached_tokens=900, requests=3)
    free = InstanceView("free", cached_tokens=900, requests=1)
    fleet = fleet_of(last, free, *idle(1), pinned="last")
    request = ask(1_000, session_id="s")
    assert VllmCacheAware().choose(request, fleet).instance == "free"
    assert SglangCacheAware().choose(request, fleet).instance == "last"


def test_kv_aware_multiplies_prefill_by_batch() -> None:
    warm = InstanceView("warm", cached_tokens=800, pending_prefill_tokens=1_000, requests=2)
    free = InstanceView("free", pending_prefill_tokens=0, requests=3)
    choice = VllmKvAware().choose(ask(1_000), fleet_of(warm, free))
    assert [score.score for score in choice.scores] == [(1_000 + 200) * 3, 1_000 * 4]
    assert (choice.instance, choice.reason) == ("warm", Reason.LOWEST_SCORE)


def test_kv_aware_breaks_a_tie_by_fewer_requests() -> None:
    one = InstanceView("one", cached_tokens=500, requests=1)  # 500 x 2
    none = InstanceView("none")  # 1,000 x 1
    assert VllmKvAware().choose(ask(1_000), fleet_of(one, none)).instance == "none"


@pytest.mark.parametrize(
    "bad",
    [
        {"cache_threshold": 1.1},
        {"cache_threshold": -0.1},
        {"balance_abs_threshold": -1},
        {"balance_rel_threshold": 0.9},
    ],
)
@pytest.mark.parametrize("policy", [VllmCacheAware, SglangCacheAware])
def test_thresholds_out_of_range_are_refused(
    policy: type[VllmCacheAware | SglangCacheAware], bad: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match=f"{policy.name}: {next(iter(bad))} must"):
        policy(**bad)  # type: ignore[arg-type]
