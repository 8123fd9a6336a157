"""Instances of different speed: found surely, never where they are alike, and tried again."""

from __future__ import annotations

import random
from math import inf

import pytest

from policies.costs.book import CostBook, PrefillJob
from policies.costs.formulas import PrefillModel
from policies.costs.slowness import ALL_ALIKE, FORGOTTEN_S, FRESH_S, HALF_LIFE_S, LEAST_PREFILLS, Slowness


def learned(speeds: dict[str, float], prefills: int, seed: int, spread: float = 0.2) -> Slowness:
    """After prefills on instances in a random order, one a second; times are log-normal around those of their speed."""
    draw, slowness = random.Random(seed), Slowness()
    for now_s in range(prefills):
        name = draw.choice(list(speeds))
        slowness.observe(name, 1.0, draw.lognormvariate(0.0, spread) / speeds[name], float(now_s))
    return slowness


@pytest.mark.parametrize("seed", range(20))
def test_equal_instances_are_never_taken_as_different(seed: int) -> None:
    draw, slowness = random.Random(seed), Slowness()
    names = [f"inst-{number}" for number in range(16)]
    busier = {name: draw.uniform(1.0, 1.1) for name in names}
    for number in range(3_000):
        name = draw.choice(names)
        slowness.observe(name, 1.0, busier[name] * draw.lognormvariate(0.0, 0.3), number / 5)
        assert slowness.measured is ALL_ALIKE


@pytest.mark.parametrize("seed", range(5))
def test_the_slowness_of_every_instance_is_relative_to_the_middle_one(seed: int) -> None:
    found = learned({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.25}, 400, seed).measured
    assert found.keys() == {"a", "b", "c", "d"}
    assert found["d"] == pytest.approx(4.0, rel=0.25)
    for name in "abc":
        assert found[name] == pytest.approx(1.0, rel=0.15)
    two = learned({"a": 1.0, "b": 0.5}, 400, seed).measured
    assert two["b"] / two["a"] == pytest.approx(2.0, rel=0.25)
    assert two["a"] * two["b"] == pytest.approx(1.0)


def test_few_prefills_are_enough_for_a_large_difference_and_one_is_not() -> None:
    slowness = Slowness()
    for now_s in range(LEAST_PREFILLS):
        slowness.observe("fast", 1.0, 1.0, float(now_s))
    slowness.observe("slow", 1.0, 40.0, 6.0)
    assert slowness.measured is ALL_ALIKE
    for now_s in range(7, 17):
        slowness.observe("slow", 1.0, 6.0, float(now_s))
        slowness.observe("fast", 1.0, 1.0, float(now_s))
    assert slowness.measured["slow"] / slowness.measured["fast"] == pytest.approx(6, rel=0.2)


def test_one_stall_does_not_make_an_instance_slow() -> None:
    slowness = learned({"a": 1.0, "b": 1.0}, 40, 1)
    slowness.observe("a", 1.0, 1e9, 40.0)
    assert slowness.measured is ALL_ALIKE


def test_an_instance_that_is_as_fast_as_the_others_again_is_found_to_be() -> None:
    slowness = learned({"a": 1.0, "b": 1.0, "c": 0.3}, 200, 2)
    assert slowness.measured["c"] > 2
    draw = random.Random(3)
    for now_s in range(200, 400):
        slowness.observe(draw.choice("abc"), 1.0, draw.lognormvariate(0.0, 0.2), float(now_s))
    assert slowness.measured is ALL_ALIKE


def test_an_instance_without_prefills_comes_to_be_tried_again() -> None:
    slowness = learned({"a": 1.0, "b": 1.0, "c": 0.25}, 200, 2)
    before, until = slowness.among(200.0, "abc")["c"], 200.0 + FRESH_S + HALF_LIFE_S
    for now_s in range(200, int(until)):
        slowness.observe("ab"[now_s % 2], 1.0, 1.0, float(now_s))
        if now_s < 190 + FRESH_S:
            assert slowness.among(float(now_s), "abc")["c"] == pytest.approx(before, rel=0.1)
    assert slowness.among(until, "abc")["c"] == pytest.approx(before**0.5, rel=0.15)
    assert slowness.measured["c"] == pytest.approx(before, rel=0.15)
    # One prefill shows that it is as slow as before, and some that it is not.
    slow = learned({"a": 1.0, "b": 1.0, "c": 0.25}, 200, 2)
    slow.observe("c", 1.0, 4.0, until)
    assert slow.among(until, "abc")["c"] == pytest.approx(before, rel=0.15)
    for number in range(12):
        slowness.observe("c", 1.0, 1.0, until + number)
    assert slowness.among(until + 12, "abc").get("c", 1.0) < 1.6


def test_two_late_prefills_after_a_long_time_do_not_make_an_instance_slow() -> None:
    for gap_s in (200.0, 400.0, 1_000.0):
        slowness = learned({"a": 1.0, "b": 1.0, "c": 1.0}, 120, 8)
        for number in range(2):
            slowness.observe("c", 1.0, 3.0, 120.0 + gap_s + number)
            assert slowness.measured is ALL_ALIKE


def test_a_value_is_forgotten_after_a_long_time() -> None:
    slowness = learned({"a": 1.0, "b": 1.0, "c": 0.125}, 200, 2)
    slowness.observe("a", 1.0, 1.0, 190.0 + FORGOTTEN_S)
    assert slowness.measured
    slowness.observe("a", 1.0, 1.0, 200.0 + FORGOTTEN_S)
    assert slowness.measured is ALL_ALIKE


def test_an_instance_of_which_nothing_is_known_counts_as_the_fastest_of_those_that_may_be_chosen() -> None:
    slowness = learned({"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.5}, 300, 6)
    slowness.forget("a")
    found = slowness.among(300.0, ["new", "a", "b", "c", "d"])
    assert found["new"] == found["a"] == found["b"] == min(found.values())
    # Those of another model do not count: all that serve this one are slow.
    found = slowness.among(300.0, ["new", "c", "d"])
    assert found["new"] == min(found["c"], found["d"]) > 0.9
    idle = slowness.among(300.0 + FRESH_S + 5 * HALF_LIFE_S, ["c", "d"])
    assert idle["c"] == pytest.approx(min(found["c"], found["d"]), rel=0.1)
    assert slowness.among(300.0, ["new", "newer"]) is ALL_ALIKE


def test_one_instance_alone_has_no_slowness_and_those_that_left_do_not_count() -> None:
    slowness = learned({"a": 1.0, "b": 0.3}, 100, 4)
    assert slowness.measured
    slowness.forget("b")
    assert slowness.measured is ALL_ALIKE
    slowness.forget("never known")
    assert learned({"a": 0.2}, 100, 4).measured is ALL_ALIKE


@pytest.mark.parametrize(("expected_s", "actual_s"), [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, inf)])
def test_impossible_times_are_left_out(expected_s: float, actual_s: float) -> None:
    slowness = learned({"a": 1.0, "b": 0.3}, 100, 5)
    before = dict(slowness.measured)
    slowness.observe("a", expected_s, actual_s, 99.0)
    assert slowness.measured == before


JOB = PrefillJob("slow", 20_000, 0, 0, 0)


def book_with(**factors: float) -> CostBook:
    """A book that has seen prefills of 20,000 tokens take so many times what the published constants say, in turns."""
    book, expected_s = CostBook(), PrefillModel().seconds(20_000, 0)
    for now_s in range(40):
        for name, factor in factors.items():
            book.prefilled(JOB._replace(instance=name), factor * expected_s)
            book.compare(JOB._replace(instance=name), 20_000, 0, factor * expected_s, float(now_s))
    return book


def test_a_first_token_of_a_slow_instance_is_predicted_late_and_does_not_change_the_model_of_all() -> None:
    book, fresh_s = book_with(a=1.0, b=1.0, slow=4.0), PrefillModel().seconds(20_000, 0)
    assert book.at(39.0, ["a", "b", "slow"]).slowness["slow"] == pytest.approx(4.0, rel=0.1)
    assert book.prefill.seconds(20_000, 0) == pytest.approx(fresh_s, rel=0.1)
    assert book.prefilled(JOB, 4 * fresh_s) == pytest.approx(4 * fresh_s, rel=0.15)
    assert book.prefilled(JOB._replace(instance="a"), fresh_s) == pytest.approx(fresh_s, rel=0.1)
    book.forget("slow")
    assert not book.at(39.0, ["a", "b"]).slowness


@pytest.mark.parametrize(
    "factors", [{"a": 1.0, "b": 2.0, "c": 2.0, "d": 2.0}, {"a": 1.0, "b": 1.0, "c": 3.0, "d": 3.0, "e": 3.0}]
)
def test_the_model_stays_where_it_is_if_only_the_fast_instances_get_prefills(factors: dict[str, float]) -> None:
    book, expected_s = book_with(**factors), PrefillModel().seconds(20_000, 0)
    for now_s in range(40, 140):
        book.prefilled(JOB._replace(instance="a"), expected_s)
        book.compare(JOB._replace(instance="a"), 20_000, 0, expected_s, float(now_s))
        for name, factor in factors.items():  # what a prefill on each instance is taken to need
            whole_s = book.prefill.seconds(20_000, 0) * book.at(float(now_s), factors).slowness.get(name, 1.0)
            assert 0.6 < whole_s / expected_s < 1.25 * factor, (name, now_s)


@pytest.mark.parametrize("leave", ["forget", "restarted"])
def test_the_model_fits_those_that_remain_when_the_middle_instance_is_one_of_them_no_more(leave: str) -> None:
    book, expected_s = book_with(a=1.0, b=1.0, c=4.0, d=4.0, e=4.0), PrefillModel().seconds(20_000, 0)
    for name in "cde":
        getattr(book, leave)(name)
        for each in "ab":
            value = book.prefill.seconds(20_000, 0) * book.at(39.0, "ab").slowness.get(each, 1.0)
            assert value == pytest.approx(expected_s, rel=0.1)


def test_an_instance_of_unknown_speed_teaches_the_model_nothing_while_others_differ() -> None:
    book, expected_s = book_with(a=1.0, b=1.0, c=4.0), PrefillModel().seconds(20_000, 0)
    for _ in range(50):
        book.prefilled(JOB._replace(instance="producer"), 4 * expected_s)
    assert book.prefill.seconds(20_000, 0) == pytest.approx(expected_s, rel=0.1)


def test_what_the_engine_had_cached_counts_where_it_reports_it() -> None:
    book = CostBook()
    whole_s = book.prefill.seconds(40_000, 0)
    evicting, keeping = PrefillJob("evicting", 20_000, 20_000, 0, 0), PrefillJob("keeping", 40_000, 0, 0, 0)
    book.compare(evicting, 40_000, 100, whole_s, 0.0)
    for now_s in range(20):
        # The proxy had expected half of the prompt in a cache that was evicted.
        book.compare(evicting, 40_000, 0, whole_s, float(now_s))
        book.compare(keeping, 40_000, 0, whole_s, float(now_s))
    assert not book.slowness.measured
    # An engine that has never reported any may be unable to: then what was expected counts.
    for now_s in range(20, 40):
        book.compare(
            evicting._replace(instance="silent"), 40_000, 0, book.prefill.seconds(20_000, 20_000), float(now_s)
        )
    assert not book.slowness.measured


def test_the_prompt_is_as_long_as_the_engine_says() -> None:
    book = CostBook()
    for now_s in range(30):
        for name, estimate in (("text", 30_000), ("ids", 20_000)):
            seconds = book.prefill.seconds(20_000, 0)
            book.compare(PrefillJob(name, estimate, 0, 0, 0), 20_000, 0, seconds, float(now_s))
    assert not book.slowness.measured


@pytest.mark.parametrize(
    ("job", "prompt_tokens"),
    [
        (JOB._replace(prefilling=1, pending_tokens=100), 20_000),  # waited for another prefill
        (JOB._replace(room=False), 20_000),  # waited for blocks
        (JOB, 1_000),  # mostly scheduling
    ],
)
def test_what_may_have_waited_says_nothing_of_the_instance(job: PrefillJob, prompt_tokens: int) -> None:
    book = CostBook()
    for now_s in range(50):
        book.compare(JOB._replace(instance="a"), 20_000, 0, 1.0, float(now_s))
        book.compare(job, prompt_tokens, 0, 100.0, float(now_s))
    assert not book.slowness.measured
