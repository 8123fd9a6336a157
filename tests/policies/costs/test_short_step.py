"""Fit of the time that a step with a short prefill takes longer, on answers whose times are known."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from policies.costs.short_step import UNKNOWN_STEP, BesideStream, ShortStep, StepFit

DECODE_S, STREAM_S, LONG_S, PREFILL = 0.008, 0.0004, 0.03, 0.6


def answers(
    count: int, short_s: float, *, seed: int = 1, streams: tuple[int, int] = (1, 30), short: int = 12, long: int = 8
) -> Iterator[BesideStream]:
    """Answers that took just so long, and noise of a hundredth for each token."""
    random = Random(seed)
    for _ in range(count):
        tokens, beside = random.randint(20, 400), random.uniform(*streams)
        few, many = random.randint(0, short), random.randint(0, long)
        lengths_s = [(0.01, 0.05)] * many + [(0.0, 0.008)] * few
        prefill_s = sum(random.uniform(*bounds_s) for bounds_s in lengths_s)
        seconds = (DECODE_S + STREAM_S * beside) * tokens + short_s * few + LONG_S * many + PREFILL * prefill_s
        noise_s = random.gauss(0, 0.01 * DECODE_S) * tokens**0.5
        yield BesideStream(seconds + noise_s, tokens, tokens * beside, few, many, prefill_s)


def fitted(count: int, short_s: float, fit: StepFit | None = None, **of: Any) -> ShortStep:
    fit = fit or StepFit()
    for each in answers(count, short_s, **of):
        fit.observe(each)
    return fit.short_step


@pytest.mark.parametrize("short_s", [0.0, 0.012, 0.04, 0.2])
def test_the_time_of_a_short_step_is_separated_from_streams_and_long_prefills(short_s: float) -> None:
    found = fitted(600, short_s)
    assert found.seconds == pytest.approx(short_s, abs=5 * found.sigma)
    assert found.sigma < 0.0005
    assert found.known


def test_nothing_is_estimated_before_416_answers_and_then_after_every_32() -> None:
    fit = StepFit()
    assert fitted(415, 0.01, fit) == UNKNOWN_STEP
    assert not fit.short_step.known
    first = fitted(1, 0.01, fit, seed=2)
    assert first.known
    assert fitted(31, 0.01, fit, seed=3) == first
    assert fitted(1, 0.01, fit, seed=4) != first
    assert fit.answers == 448


def test_short_and_untimed_answers_are_left_out() -> None:
    fit = StepFit()
    fit.observe(BesideStream(0.1, 7, 7.0, 0, 0, 0.0))
    fit.observe(BesideStream(0.0, 80, 80.0, 0, 0, 0.0))
    assert fit.answers == 0
    fit.observe(BesideStream(0.1, 8, 8.0, 0, 0, 0.0))
    assert fit.answers == 1


@pytest.mark.parametrize("of", [{"short": 0}, {"short": 0, "long": 0}])
def test_without_short_steps_nothing_is_known(of: dict[str, Any]) -> None:
    found = fitted(500, 0.0, **of)
    assert not found.known
    assert found.instead_of(0.04) == 0.04


@pytest.mark.parametrize("of", [{"long": 0}, {"streams": (1, 1)}])
def test_terms_that_cannot_be_separated_do_not_hide_it(of: dict[str, Any]) -> None:
    """Without long prefills, or where always one stream ran and its own time has two terms."""
    assert fitted(500, 0.012, **of).seconds == pytest.approx(0.012, abs=0.001)


def test_an_engine_that_changes_is_followed() -> None:
    fit = StepFit()
    before = fitted(2_000, 0.04, fit)
    after = fitted(4_000, 0.01, fit, seed=2)
    assert before.seconds == pytest.approx(0.04, abs=0.002)
    assert after.seconds == pytest.approx(0.01, abs=0.002)


@pytest.mark.parametrize(
    ("seconds", "sigma", "used"),
    [
        (0.012, 0.0005, 0.012),
        (0.012, 0.0021, 0.04),  # perhaps more than half of the constant
        (0.021, 0.0001, 0.04),  # the constant fits roughly
        (-0.06, 0.0026, 0.04),  # not precise
        (0.2, 0.001, 0.04),  # never above it: whatever delays answers adds to it
        (-0.03, 0.001, 0.0),
    ],
)
def test_it_replaces_a_constant_that_is_surely_twice_as_much(seconds: float, sigma: float, used: float) -> None:
    assert ShortStep(seconds, sigma).instead_of(0.04) == used


def test_zero_is_never_replaced() -> None:
    assert ShortStep(0.0, 0.0).instead_of(0.0) == 0.0
    assert ShortStep(-0.1, 0.0).instead_of(0.0) == 0.0
