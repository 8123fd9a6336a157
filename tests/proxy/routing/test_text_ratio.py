"""The ratio of bytes to tokens follows the engines' counts, and outliers hardly move it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.request.parse import Endpoint
from proxy.routing.text_ratio import LEAST, MOST, TextRatios


def test_endpoints_learn_apart() -> None:
    ratios = TextRatios(4.0)
    for _ in range(100):
        ratios.learn(Endpoint.CHAT, 3_000, 1_000)
    assert ratios.of(Endpoint.CHAT) == pytest.approx(3.0, rel=0.01)
    assert ratios.of(Endpoint.COMPLETIONS) == 4.0


def test_tiny_prompts_of_another_client_do_not_distort_the_ratio() -> None:
    ratios = TextRatios(3.98)
    for _ in range(60):
        ratios.learn(Endpoint.COMPLETIONS, 1, 1)
    assert ratios.of(Endpoint.COMPLETIONS) == pytest.approx(3.98, rel=0.01)
    for _ in range(200):
        ratios.learn(Endpoint.COMPLETIONS, 4_000, 1_000)
        for _ in range(10):
            ratios.learn(Endpoint.COMPLETIONS, 1, 1)
    assert ratios.of(Endpoint.COMPLETIONS) == pytest.approx(4.0, rel=0.02)


def test_short_prompts_are_learned_from_in_proportion_to_their_tokens() -> None:
    ratios = TextRatios(4.0)
    for _ in range(1_000):
        ratios.learn(Endpoint.CHAT, 300, 100)
    assert ratios.of(Endpoint.CHAT) == pytest.approx(3.0, rel=0.01)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_one_request_moves_the_ratio_by_five_percent_at_most(text_bytes: int, tokens: int) -> None:
    ratios = TextRatios(4.0)
    ratios.learn(Endpoint.CHAT, text_bytes, tokens)
    assert 3.79 < ratios.of(Endpoint.CHAT) < 4.21


@pytest.mark.parametrize("tokens", [0, -5, 1, 10**9])
def test_implausible_counts_are_ignored(tokens: int) -> None:
    ratios = TextRatios(4.0)
    for _ in range(100):
        ratios.learn(Endpoint.CHAT, 5_000_000, tokens)
    assert ratios.of(Endpoint.CHAT) == 4.0


@given(st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)), max_size=300))
def test_the_ratio_stays_within_its_bounds(seen: list[tuple[int, int]]) -> None:
    ratios = TextRatios(4.0)
    for text_bytes, tokens in seen:
        ratios.learn(Endpoint.CHAT, text_bytes, tokens)
    assert LEAST <= ratios.of(Endpoint.CHAT) <= MOST
