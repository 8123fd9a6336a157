"""A learned correction of a formula: how far off it has been, and how sure that is.

A formula with published constants says how long something takes on somebody's hardware; how far off it is on this
fleet, now, is one number per thing that is timed. It is learned in logarithms, because times are wrong by factors.
"""

from __future__ import annotations

from math import exp2, isfinite, log, sqrt
from typing import NamedTuple

PRIOR_SIGMA = 0.7
"""Spread of log(actual / formula) before anything was observed: a factor of two either way."""
_LARGEST = log(50.0)


class Estimate(NamedTuple):
    """log(actual / formula) as an exponentially weighted mean and variance."""

    log_ratio: float = 0.0
    variance: float = PRIOR_SIGMA**2
    observations: int = 0
    learned_at_s: float = 0.0

    @property
    def sigma(self) -> float:
        """Standard deviation of log(actual / formula) round ``log_ratio``."""
        return sqrt(self.variance)

    def learn(self, expected_s: float, actual_s: float, now_s: float, weight: float) -> Estimate:
        """The estimate after one more observation. The first ones count more than ``weight``: as a plain mean.

        One stall must not fill the memory: a single observation counts as a factor of 50 at most.
        """
        if not (expected_s > 0 and actual_s > 0 and isfinite(actual_s)):
            return self
        observed = max(-_LARGEST, min(_LARGEST, log(actual_s / expected_s)))
        share = max(weight, 1.0 / (self.observations + 2))  # the prior counts as one observation
        error = observed - self.log_ratio
        return Estimate(
            self.log_ratio + share * error,
            (1 - share) * (self.variance + share * error * error),
            self.observations + 1,
            now_s,
        )

    def relaxed(self, towards: Estimate, now_s: float, half_life_s: float) -> Estimate:
        """What is left of it after a silence: it returns to ``towards`` by half every ``half_life_s``.

        So a pair that was once slow is tried again after a while, and its uncertainty grows back meanwhile.
        """
        if not self.observations:
            return towards
        kept = exp2(-max(0.0, now_s - self.learned_at_s) / half_life_s)
        return self._replace(
            log_ratio=towards.log_ratio + kept * (self.log_ratio - towards.log_ratio),
            variance=towards.variance + kept * (self.variance - towards.variance),
        )


UNKNOWN = Estimate()
