"""Learned values of cost models: given to another process whole, or not at all."""

from __future__ import annotations

import math

import pytest

from policies.costs.book import CostBook, PrefillJob
from policies.costs.formulas import PrefillModel
from policies.costs.learned import LearnedCosts
from policies.costs.short_step import UNKNOWN_STEP, StepSums
from tests.policies.costs.test_short_step import answers


def taught() -> CostBook:
    book = CostBook()
    for new_tokens, seconds in ((200, 0.3), (4_000, 0.9), (30_000, 9.0)):
        for _ in range(5):
            book.prefilled(PrefillJob("d", new_tokens, 0, 0, 0), seconds)
    for each in answers(450, 0.012):
        book.steps.observe(each)
    return book


def test_a_book_that_starts_from_them_knows_the_same() -> None:
    book, other = taught(), CostBook()
    assert LearnedCosts.of(book).give(other)
    assert other.prefill == book.prefill
    assert other.short_prefills == book.short_prefills
    assert other.steps.short_step == book.steps.short_step != UNKNOWN_STEP
    assert other.at(0.0).short_step.seconds == pytest.approx(0.012, abs=0.001)
    assert LearnedCosts.of(other) == LearnedCosts.of(book)
    for each in answers(200, 0.03, seed=2):
        other.steps.observe(each)
    assert other.steps.answers == 448 + 200  # of the 450, two were in no full batch
    assert other.steps.short_step.seconds > 0.012


def test_a_book_that_has_learned_nothing_gives_nothing() -> None:
    other = CostBook()
    assert LearnedCosts.of(CostBook()).give(other)
    assert other.prefill == PrefillModel()
    assert other.steps.short_step == UNKNOWN_STEP


def test_values_that_correct_other_constants_are_not_taken() -> None:
    other = CostBook(PrefillModel(fixed_s=0.5))
    assert not LearnedCosts.of(taught()).give(other)
    assert other.prefill == PrefillModel(fixed_s=0.5)
    assert other.steps.answers == 0


GOOD = LearnedCosts.of(taught())


@pytest.mark.parametrize(
    "learned",
    [
        GOOD._replace(prefills={11: (math.nan, 0.1, 3)}),
        GOOD._replace(prefills={11: (9.0, 0.1, 3)}),
        GOOD._replace(prefills={11: (0.1, -0.1, 3)}),
        GOOD._replace(prefills={11: (0.1, math.inf, 3)}),
        GOOD._replace(prefills={11: (0.1, 0.1, -3)}),
        GOOD._replace(prefills={-1: (0.1, 0.1, 3)}),
        GOOD._replace(short_prefills={64: (0.1, 0.1, 3)}),
        GOOD._replace(steps=StepSums((1.0,) * 20, 5.0, 32)),
        GOOD._replace(steps=GOOD.steps._replace(sums=(math.nan, *GOOD.steps.sums[1:]))),
        GOOD._replace(steps=GOOD.steps._replace(sums=(-1.0, *GOOD.steps.sums[1:]))),
        GOOD._replace(steps=GOOD.steps._replace(weight=4.0)),  # of 448 answers
        GOOD._replace(steps=GOOD.steps._replace(weight=1e6)),
        GOOD._replace(steps=GOOD.steps._replace(weight=math.nan)),
    ],
)
def test_values_that_nothing_leads_to_are_refused_and_change_nothing(learned: LearnedCosts) -> None:
    other = CostBook()
    with pytest.raises(ValueError, match="no "):
        learned.give(other)
    assert LearnedCosts.of(other) == LearnedCosts.of(CostBook())


def test_sums_that_do_not_belong_together_are_of_no_use_but_do_no_harm() -> None:
    other = CostBook()
    assert GOOD._replace(steps=StepSums((1e300,) * 21, 400.0, 448)).give(other)
    assert not other.steps.short_step.known
    assert other.steps.short_step.instead_of(0.04) == 0.04
