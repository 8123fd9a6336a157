"""Learned correction of a formula: ratio of actual to predicted time, with its uncertainty.

A formula with published constants gives a time for reference hardware; its ratio to the times of this fleet is one
number per measured quantity. It is learned as a logarithm, because times are wrong by factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp2, isfinite, log, sqrt
from typing import NamedTuple

PRIOR_SIGMA = 0.7
"""Spread of log(actual / formula) before any observation: a factor of two either way."""
_LARGEST = log(50.0)


class LearnedRatio(NamedTuple):
    """log(actual / formula) as an exponentially weighted mean and variance."""

    log_ratio: float = 0.0
    variance: float = PRIOR_SIGMA**2
    observations: int = 0
    learned_at_s: float = 0.0

    @property
    def sigma(self) -> float:
        """Standard deviation of log(actual / formula) around ``log_ratio``."""
        return sqrt(self.variance)

    @property
    def usable(self) -> bool:
        """False for values that no observations lead to, as in a damaged file."""
        return -_LARGEST <= self.log_ratio <= _LARGEST and 0 <= self.variance <= _LARGEST**2

    def learn(self, expected_s: float, actual_s: float, now_s: float, weight: float) -> LearnedRatio:
        """Return the ratio after one more observation; the first observations weigh more, as in a plain mean.

        An observation is clamped to a factor of 50, so that one stall does not dominate the mean.
        """
        if not (expected_s > 0 and actual_s > 0 and isfinite(actual_s)):
            return self
        observed = max(-_LARGEST, min(_LARGEST, log(actual_s / expected_s)))
        share = max(weight, 1.0 / (self.observations + 2))  # the prior counts as one observation
        error = observed - self.log_ratio
        return LearnedRatio(
            self.log_ratio + share * error,
            (1 - share) * (self.variance + share * error * error),
            self.observations + 1,
            now_s,
        )

    def relaxed(self, towards: LearnedRatio, now_s: float, half_life_s: float) -> LearnedRatio:
        """Return the ratio after a time without observations: it approaches ``towards`` by half every ``half_life_s``.

        A pair that was once slow is thus tried again later, and its uncertainty grows back in the meantime.
        """
        if not self.observations:
            return towards
        kept = exp2(-max(0.0, now_s - self.learned_at_s) / half_life_s)
        return self._replace(
            log_ratio=towards.log_ratio + kept * (self.log_ratio - towards.log_ratio),
            variance=towards.variance + kept * (self.variance - towards.variance),
        )


UNKNOWN = LearnedRatio()


def bucket_of(tokens: float) -> int:
    """Whole part of log2, 0 below 2."""
    return max(1, int(tokens)).bit_length() - 1


def nearest_bucket(known: Mapping[int, LearnedRatio], bucket: int) -> LearnedRatio:
    """The ratio of this bucket, else of the nearest one, the smaller of two; ``UNKNOWN`` where there is none."""
    exact = known.get(bucket)
    if exact is not None or not known:
        return exact or UNKNOWN
    # Outwards: cheaper than a comparison of all, as the nearest is a few steps away.
    low, high = bucket - 1, bucket + 1
    while (found := known.get(low) or known.get(high)) is None:
        low, high = low - 1, high + 1
    return found
