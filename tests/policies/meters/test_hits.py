"""Hits of a request against the best candidate and the infinite cache: the losses add up and none is negative."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.meters.hits import CeilingCache, HitTokens, hit_tokens
from policies.types import RequestView

TOKENS = st.integers(0, 10_000)


def view(blocks: int, *, first: int = 0, tail: int = 8) -> RequestView:
    """A prompt of ``blocks`` full blocks of 16 tokens, and ``tail`` tokens more."""
    return RequestView("r", blocks * 16 + tail, tuple(range(first, first + blocks)))


@given(prompt=TOKENS, ceiling=TOKENS, best=TOKENS, predicted=TOKENS, reported=TOKENS)
def test_the_losses_explain_the_whole_difference(
    prompt: int, ceiling: int, best: int, predicted: int, reported: int
) -> None:
    hits = hit_tokens(prompt, ceiling, best, predicted, reported)
    assert 0 <= hits.achieved <= hits.reachable <= hits.ceiling <= prompt
    assert hits.ceiling - hits.achieved == hits.routing + hits.eviction + hits.prediction
    assert min(hits.routing, hits.eviction, hits.prediction) >= 0
    assert hits.achieved == min(reported, prompt)


def test_each_cause_gets_its_part() -> None:
    hits = hit_tokens(1_000, ceiling=900, best=700, predicted=400, reported=300)
    assert (hits.eviction, hits.routing, hits.prediction) == (200, 300, 100)
    assert hits.shares() == {"achieved": 0.3, "reachable": 0.7, "ceiling": 0.9}
    assert hits.losses() == {"routing": 0.3, "eviction": 0.2, "prediction": 0.1}


def test_without_requests_rates_are_unknown_and_losses_zero() -> None:
    assert set(HitTokens().shares().values()) == {None}
    assert set(HitTokens().losses().values()) == {0.0}


def test_the_infinite_cache_has_every_prompt_before() -> None:
    cache = CeilingCache(1_000)
    assert cache.add(view(4)) == (0, 0)
    assert cache.add(view(6)) == (4, 64)
    assert cache.add(view(6, tail=0)) == (6, 80)  # an engine computes the last token itself
    assert cache.add(view(6, first=100)) == (0, 0)
    cache.clear()
    assert cache.add(view(6)) == (0, 0)


def test_the_infinite_cache_is_finite() -> None:
    cache = CeilingCache(10)
    for number in range(50):
        cache.add(view(4, first=100 * number))
        assert cache.blocks <= 10
    assert cache.add(view(4, first=4_900))[0] == 4
    assert cache.add(view(4))[0] == 0
