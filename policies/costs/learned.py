"""The learned part of the cost models as plain values, from which another process over the same engines can start.

Times of transfers are left out: they hold for minutes (`policies.costs.formulas.TransferModel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from policies.costs.book import CostBook
from policies.costs.estimates import LearnedRatio
from policies.costs.short_step import StepSums

_LARGEST_BUCKET = 63
"""Powers of two of a prompt's tokens."""


class LearnedCosts(NamedTuple):
    """Learned values, and the constants that they correct."""

    constants: tuple[float, float, float]
    """Of `PrefillModel`: fixed seconds, per token, per token squared."""
    prefills: Mapping[int, tuple[float, float, int]]
    """By the power of two of the tokens: logarithm of the ratio, variance, observations."""
    short_prefills: Mapping[int, tuple[float, float, int]]
    """The same for the predictions of short ones."""
    steps: StepSums

    @classmethod
    def of(cls, book: CostBook) -> LearnedCosts:
        """The present values of a book."""
        prefill = book.prefill
        constants = (prefill.fixed_s, prefill.s_per_token, prefill.s_per_token_squared)
        return cls(constants, _plain(prefill.buckets), _plain(book.short_prefills.ratios), book.steps.sums)

    def give(self, book: CostBook) -> bool:
        """Let a book start from these values; False if its constants are others, so that the values mean nothing there.

        Raises:
            ValueError: a value is not usable; the book is unchanged.
        """
        prefills, short = _ratios(self.prefills), _ratios(self.short_prefills)
        steps = StepSums(tuple(self.steps.sums), self.steps.weight, self.steps.answers)
        steps.check()
        model = book.prefill
        if tuple(self.constants) != (model.fixed_s, model.s_per_token, model.s_per_token_squared):
            return False
        book.prefill = model.with_buckets(prefills)
        book.short_prefills = book.short_prefills._replace(ratios=short)
        book.steps.start(steps)
        return True


def _plain(ratios: Mapping[int, LearnedRatio]) -> dict[int, tuple[float, float, int]]:
    return {bucket: (each.log_ratio, each.variance, each.observations) for bucket, each in ratios.items()}


def _ratios(values: Mapping[int, tuple[float, float, int]]) -> dict[int, LearnedRatio]:
    ratios = {}
    for bucket, (log_ratio, variance, observations) in values.items():
        each = LearnedRatio(log_ratio, variance, observations)
        if not (0 <= bucket <= _LARGEST_BUCKET and observations >= 0 and each.usable):
            raise ValueError(f"no learned ratio: {bucket}: {(log_ratio, variance, observations)}")
        ratios[bucket] = each
    return ratios
