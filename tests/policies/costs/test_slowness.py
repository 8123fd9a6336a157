"""Instances of different speed: found surely, and never where they are alike."""

from __future__ import annotations

import random
from math import inf

import pytest

from policies.costs.book import CostBook, PrefillJob
from policies.costs.formulas import PrefillModel
from policies.costs.slowness import ALL_ALIKE, LEAST_PREFILLS, Slowness


def learned(speeds: dict[str, float], prefills: int, seed: int, spread: float = 0.2) -> Slowness:
    """After prefills on instances in a random order; times are log-normal around those of their speed."""
    draw, slowness = random.Random(seed), Slowness()
    for _ in range(prefills):
        name = draw.choice(list(speeds))
        slowness.observe(name, 1.0, draw.lognormvariate(0.0, spread) / speeds[name])
    return slowness


@pytest.mark.parametrize("seed", range(20))
def test_equal_instances_are_never_taken_as_different(seed: int) -> None:
    draw, slowness = random.Random(seed), Slowness()
    names = [f"inst-{number}" for number in range(16)]
    busier = {name: draw.uniform(1.0, 1.1) for name in names}
    for _ in range(3_000):
        name = draw.choice(names)
        slowness.observe(name, 1.0, busier[name] * draw.lognormvariate(0.0, 0.3))
        assert slowness.known is ALL_ALIKE


@pytest.mark.parametrize("seed", range(5))
def test_the_slowness_of_every_instance_is_relative_to_the_middle_one(seed: int) -> None:
    half = learned({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.25}, 400, seed).known
    assert half.keys() == {"a", "b", "c", "d"}
    assert half["d"] == pytest.approx(4.0, rel=0.25)
    for name in "abc":
        assert half[name] == pytest.approx(1.0, rel=0.15)
    two = learned({"a": 1.0, "b": 0.5}, 400, seed).known
    assert two["b"] / two["a"] == pytest.approx(2.0, rel=0.25)
    assert two["a"] * two["b"] == pytest.approx(1.0)


def test_few_prefills_are_enough_for_a_large_difference_and_one_is_not() -> None:
    slowness = Slowness()
    for _ in range(LEAST_PREFILLS):
        slowness.observe("fast", 1.0, 1.0)
    slowness.observe("slow", 1.0, 40.0)
    assert slowness.known is ALL_ALIKE
    for _ in range(6):
        slowness.observe("slow", 1.0, 8.0)
        slowness.observe("fast", 1.0, 1.0)
    assert slowness.known["slow"] / slowness.known["fast"] == pytest.approx(10, rel=0.2)


def test_one_stall_does_not_make_an_instance_slow() -> None:
    slowness = learned({"a": 1.0, "b": 1.0}, 40, 1)
    slowness.observe("a", 1.0, 1e9)
    assert slowness.known is ALL_ALIKE


def test_an_instance_that_is_as_fast_as_the_others_again_is_found_to_be() -> None:
    slowness = learned({"a": 1.0, "b": 1.0, "c": 0.3}, 200, 2)
    assert slowness.known["c"] > 2
    draw = random.Random(3)
    for _ in range(400):
        slowness.observe(draw.choice("abc"), 1.0, draw.lognormvariate(0.0, 0.2))
    assert slowness.known is ALL_ALIKE


def test_one_instance_alone_has_no_slowness_and_those_that_left_do_not_count() -> None:
    slowness = learned({"a": 1.0, "b": 0.3}, 100, 4)
    assert slowness.known
    slowness.forget("b")
    assert slowness.known is ALL_ALIKE
    slowness.forget("never known")
    assert learned({"a": 0.2}, 100, 4).known is ALL_ALIKE


@pytest.mark.parametrize(("expected_s", "actual_s"), [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, inf)])
def test_impossible_times_are_left_out(expected_s: float, actual_s: float) -> None:
    slowness = learned({"a": 1.0, "b": 0.3}, 100, 5)
    before = dict(slowness.known)
    slowness.observe("a", expected_s, actual_s)
    assert slowness.known == before


JOB = PrefillJob("slow", 20_000, 0, 0, 0)


def book_with(slow: float) -> CostBook:
    """A book that knows of one slow instance among three."""
    book = CostBook()
    expected_s = book.prefill.seconds(20_000, 0)
    for _ in range(20):
        for name, factor in (("a", 1.0), ("b", 1.0), ("slow", slow)):
            book.compare(JOB._replace(instance=name), None, factor * expected_s)
    assert book.at(0.0).slowness["slow"] == pytest.approx(slow)
    return book


def test_a_first_token_of_a_slow_instance_is_predicted_late_and_does_not_change_the_model_of_all() -> None:
    book, fresh_s = book_with(4.0), PrefillModel().seconds(20_000, 0)
    assert book.prefilled(JOB, 4 * fresh_s) == pytest.approx(4 * fresh_s)
    assert book.prefill.seconds(20_000, 0) == pytest.approx(fresh_s)
    assert book.prefilled(JOB._replace(instance="a"), fresh_s) == pytest.approx(fresh_s)
    queued = JOB._replace(pending_tokens=20_000, prefilling=1)
    assert book.prefilled(queued, 6 * fresh_s) == pytest.approx(4 * (fresh_s + book.prefill.queue_s(20_000, 1)))
    book.forget("slow")
    assert not book.at(0.0).slowness


def test_what_the_engine_had_cached_counts_where_it_reports_it() -> None:
    book = CostBook()
    whole_s = book.prefill.seconds(40_000, 0)
    for _ in range(20):
        # The proxy had expected half of the prompt in a cache that was evicted.
        book.compare(PrefillJob("evicting", 20_000, 20_000, 0, 0), 0, whole_s)
        book.compare(PrefillJob("keeping", 40_000, 0, 0, 0), 0, whole_s)
    assert not book.at(0.0).slowness
    for _ in range(20):
        book.compare(PrefillJob("evicting", 20_000, 20_000, 0, 0), None, 5 * whole_s)
    assert book.at(0.0).slowness["evicting"] > 1.5


@pytest.mark.parametrize(
    "job",
    [
        JOB._replace(prefilling=1, pending_tokens=100),  # waited for another prefill
        JOB._replace(room=False),  # waited for blocks
        JOB._replace(new_tokens=1_000, cached_tokens=19_000),  # mostly scheduling
    ],
)
def test_what_may_have_waited_says_nothing_of_the_instance(job: PrefillJob) -> None:
    book = CostBook()
    for _ in range(50):
        book.compare(JOB._replace(instance="a"), None, 1.0)
        book.compare(job, None, 100.0)
    assert not book.at(0.0).slowness
