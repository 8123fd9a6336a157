"""Slowness of instances: how many times as long a prefill takes on each as on the fleet's middle one.

One prefill model serves all instances. Where their GPUs differ, or one is slower than it should be, first tokens come
earlier or later than it expects on some of them, whatever the size of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, isfinite, log, sqrt
from types import MappingProxyType

LEAST_PREFILLS = 6
"""Prefills on an instance before it counts."""
WEIGHT = 0.05
"""Weight of a prefill in the instance's mean; the first ones weigh as in a plain mean."""
CLEAR = log(1.25)
"""Logarithm of the factor by which an instance must surely differ from the middle one. Streams that decode beside a
prefill make it longer, so equal instances differ too.
"""
ALIKE = log(1.15)
"""Logarithm of the factor within which all instances must be to be taken as alike again."""
_SIGMAS = 3.0
_LARGEST = log(50.0)
"""A prefill counts at most by this factor, so that one stall does not decide."""
_PRIOR_VARIANCE = 0.1
_PRIOR_WEIGHT = 10
_LEAST_SHARE = 0.01
"""Share of a prefill in the variance, which all instances have in common."""
_LARGEST_NUMBER = 2 / WEIGHT - 1
"""Prefills that a mean with this weight is worth."""

Slownesses = Mapping[str, float]
"""By instance; those that are not in it have 1."""
ALL_ALIKE: Slownesses = MappingProxyType({})


class Slowness:
    """Learns the slowness of each instance. Single writer: the cost models' owner.

    The mean of ``log(actual / expected)`` of each instance, less the median of these means. While no instance surely
    differs, by ``CLEAR``, all count as equal: so nothing changes in a fleet of equal instances.
    """

    __slots__ = ("_means", "_prefills", "_variance", "known")

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, int]] = {}
        """By instance: mean logarithm, and number of prefills."""
        self._variance = _PRIOR_VARIANCE
        self._prefills = 0
        self.known: Slownesses = ALL_ALIKE
        """Present values; empty while all count as equal."""

    def observe(self, instance: str, expected_s: float, actual_s: float) -> None:
        """Learn from a prefill that nothing else delayed.

        Args:
            instance: where it ran.
            expected_s: what the prefill model expects of any instance.
            actual_s: seconds to its first token.
        """
        if not (expected_s > 0 and actual_s > 0 and isfinite(actual_s)):
            return
        observed = max(-_LARGEST, min(_LARGEST, log(actual_s / expected_s)))
        mean, number = self._means.get(instance, (observed, 0))
        error = observed - mean
        if number:
            self._prefills += 1
            share = max(_LEAST_SHARE, 1 / (self._prefills + _PRIOR_WEIGHT))
            self._variance += share * (error * error * number / (number + 1) - self._variance)
        number += 1
        self._means[instance] = (mean + max(WEIGHT, 1 / number) * error, number)
        self._settle()

    def forget(self, instance: str) -> None:
        """The instance left the fleet."""
        if self._means.pop(instance, None) is not None:
            self._settle()

    def _settle(self) -> None:
        """Compute ``known``. O(n log n)."""
        means = {name: mean for name, mean in self._means.items() if mean[1] >= LEAST_PREFILLS}
        middle = _median([mean for mean, _ in means.values()]) if means else 0.0
        if len(means) < 2:
            differ = False
        elif self.known:
            differ = any(abs(mean - middle) > ALIKE for mean, _ in means.values())
        else:
            differ = any(
                abs(mean - middle) - _SIGMAS * sqrt(self._variance / min(number, _LARGEST_NUMBER)) > CLEAR
                for mean, number in means.values()
            )
        self.known = {name: exp(mean - middle) for name, (mean, _) in means.items()} if differ else ALL_ALIKE


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
