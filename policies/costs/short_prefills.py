"""First tokens after short prefills: predicted from what they took before, as their work does not explain it."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from types import MappingProxyType
from typing import NamedTuple

from policies.costs.estimates import LearnedRatio, bucket_of, nearest_bucket
from policies.costs.formulas import PrefillModel


class ShortPrefills(NamedTuple):
    """Learned ratio of the time to a first token to the one expected from queue and work, for short prefills.

    Before a short prefill the engine reads the whole prompt and ends the step in progress; both take longer than the
    new tokens. The ratio is for predictions alone: a decision that took this time for work would spare an instance
    what does not load it. Kept per power of two of the new tokens, as in `PrefillModel`. Immutable; ``observe`` returns
    another one.
    """

    below_tokens: int = PrefillModel().smallest_tokens
    """Prefills of at least so many new tokens are `PrefillModel`'s own."""
    weight: float = 0.1
    ratios: Mapping[int, LearnedRatio] = MappingProxyType({})

    def predict(self, new_tokens: int, expected_s: float) -> float:
        """Seconds to the first token where ``expected_s`` are expected from queue and work."""
        if new_tokens >= self.below_tokens or not self.ratios:
            return expected_s
        return expected_s * exp(nearest_bucket(self.ratios, bucket_of(new_tokens)).log_ratio)

    def observe(self, new_tokens: int, expected_s: float, seconds: float) -> ShortPrefills:
        """The estimates after a first token that took ``seconds``."""
        if new_tokens >= self.below_tokens:
            return self
        bucket = bucket_of(new_tokens)
        learned = nearest_bucket(self.ratios, bucket).learn(expected_s, seconds, 0.0, self.weight)
        return self._replace(ratios={**self.ratios, bucket: learned})
