"""First tokens after short prefills: learned for predictions, unknown to decisions."""

from __future__ import annotations

import pytest

from policies.costs.book import CostBook, PrefillJob
from policies.costs.formulas import PrefillModel
from policies.costs.short_prefills import ShortPrefills


def taught(new_tokens: int, seconds: float, times: int = 40) -> ShortPrefills:
    """Estimates after equal first tokens of which 0.1 s was expected."""
    short = ShortPrefills()
    for _ in range(times):
        short = short.observe(new_tokens, 0.1, seconds)
    return short


def test_without_observations_the_expected_time_is_predicted() -> None:
    assert ShortPrefills().predict(200, 0.1) == 0.1


def test_the_ratio_is_learned_by_size_and_the_nearest_size_stands_in() -> None:
    short = taught(200, 0.2)
    assert short.predict(150, 0.3) == pytest.approx(0.6, rel=0.05)
    assert short.predict(3, 0.3) == short.predict(900, 0.3) == short.predict(150, 0.3)
    both = short.observe(900, 0.1, 0.05)
    assert both.predict(600, 0.3) < short.predict(600, 0.3)
    assert both.predict(150, 0.3) == short.predict(150, 0.3)


def test_prefills_from_the_size_on_that_the_model_learns_are_left_to_it() -> None:
    assert PrefillModel().smallest_tokens == 1_024
    assert taught(1_024, 9.0) == ShortPrefills()
    assert taught(200, 0.2).predict(1_024, 0.3) == 0.3


def test_a_prompt_whose_whole_prefix_is_cached_is_learned_from_too() -> None:
    assert taught(0, 0.2).predict(0, 0.1) == pytest.approx(0.2, rel=0.05)


def test_the_book_predicts_what_short_prefills_take_and_decides_by_their_work() -> None:
    book, job = CostBook(), PrefillJob("d", 200, 50_000, 0, 0)
    work_s = book.prefill.seconds(200, 50_000)
    assert book.prefilled(job, 3 * work_s) == work_s
    for _ in range(60):
        predicted_s = book.prefilled(job, 3 * work_s)
    assert predicted_s == pytest.approx(3 * work_s, rel=0.05)
    assert book.prefill == PrefillModel()
    assert book.at(0.0).prefill.seconds(200, 50_000) == work_s


def test_a_short_prompt_without_room_teaches_nothing() -> None:
    book = CostBook()
    book.prefilled(PrefillJob("d", 200, 50_000, 0, 0, room=False), 60.0)
    assert book.short_prefills == ShortPrefills()
