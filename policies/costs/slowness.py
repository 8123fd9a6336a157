"""Slowness of instances: how many times as long a prefill takes on each as on the fleet's middle one.

One prefill model serves all instances. Where their GPUs differ, or one is slower than it should be, first tokens come
earlier or later than it expects on some of them, whatever the size of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, exp2, isfinite, log, sqrt
from types import MappingProxyType
from typing import NamedTuple

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
FRESH_S = 30.0
"""Time without a prefill on an instance for which its mean counts in full."""
HALF_LIFE_S = 120.0
"""Half-life of its difference from the fastest one after that. A slow instance gets few requests, so it has to be tried
again: it may not be slow any more.
"""
_WORTH_S = 40.0
"""Half-life, after that too, of the number of prefills that a mean is worth: few new ones are enough to change it then.
"""
FORGOTTEN_S = 600.0
"""Time without a prefill after which nothing is known of an instance."""
_SIGMAS = 3.0
_LARGEST = log(8.0)
"""A prefill counts at most by this factor, so that few stalls do not decide."""
_PRIOR_VARIANCE = 0.1
_PRIOR_WEIGHT = 10
_LEAST_SHARE = 0.01
"""Share of a prefill in the variance, which all instances have in common."""
_LARGEST_NUMBER = 2 / WEIGHT - 1
"""Prefills that a mean with this weight is worth."""
_RENEWED_S = 1.0
"""Time for which present values are kept."""

Slownesses = Mapping[str, float]
"""By instance; those that are not in it have 1."""
ALL_ALIKE: Slownesses = MappingProxyType({})


class _Mean(NamedTuple):
    """Mean logarithm of actual over expected time."""

    value: float
    number: float
    """Prefills that it is worth at the time of the latest one."""
    prefills: int
    latest_s: float
    """Time of the latest one."""

    def plus(self, observed: float, now_s: float) -> _Mean:
        """With one more prefill; after a time without any the others count less."""
        before = self.number * exp2(min(0.0, self.latest_s + FRESH_S - now_s) / _WORTH_S)
        number = min(before, _LARGEST_NUMBER) + 1
        return _Mean(self.value + max(WEIGHT, 1 / number) * (observed - self.value), number, self.prefills + 1, now_s)

    def trusted(self, now_s: float) -> float:
        """Share of its difference from the fastest one that still counts."""
        return exp2(min(0.0, self.latest_s + FRESH_S - now_s) / HALF_LIFE_S)


class Slowness:
    """Learns the slowness of each instance. Single writer: the cost models' owner.

    The mean of ``log(actual / expected)`` of each instance, less the median of these means. While no instance surely
    differs, by ``CLEAR``, all count as equal: so nothing changes in a fleet of equal instances. One of which nothing is
    known counts as the fastest one while others differ, so that it is tried.
    """

    __slots__ = ("_at_s", "_differ", "_instances", "_means", "_prefills", "_values", "_variance")

    def __init__(self) -> None:
        self._instances: dict[str, None] = {}
        self._means: dict[str, _Mean] = {}
        self._variance = _PRIOR_VARIANCE
        self._prefills = 0
        self._differ = False
        self._values = ALL_ALIKE
        self._at_s = 0.0

    def add(self, instance: str) -> None:
        """The instance joined the fleet. Idempotent."""
        self._instances[instance] = None

    def forget(self, instance: str) -> None:
        """The instance left the fleet."""
        self._instances.pop(instance, None)
        self.restarted(instance)

    def restarted(self, instance: str) -> None:
        """The instance may have another GPU, or be repaired: nothing is known of it."""
        if self._means.pop(instance, None) is not None:
            self._renew(self._at_s)

    def observe(self, instance: str, expected_s: float, actual_s: float, now_s: float) -> None:
        """Learn from a prefill that nothing else delayed.

        Args:
            instance: where it ran.
            expected_s: what the prefill model expects of any instance.
            actual_s: seconds to its first token.
            now_s: time of the observation.
        """
        if not (expected_s > 0 and actual_s > 0 and isfinite(actual_s)):
            return
        self.add(instance)
        observed = max(-_LARGEST, min(_LARGEST, log(actual_s / expected_s)))
        mean = self._means.get(instance)
        if mean is not None and now_s - mean.latest_s >= FORGOTTEN_S:
            mean = None
        if mean is not None:
            error = observed - mean.value
            self._prefills += 1
            share = max(_LEAST_SHARE, 1 / (self._prefills + _PRIOR_WEIGHT))
            self._variance += share * (error * error * mean.number / (mean.number + 1) - self._variance)
        self._means[instance] = (mean or _Mean(observed, 0.0, 0, now_s)).plus(observed, now_s)
        self._renew(now_s)

    def recentre(self) -> float:
        """Take the median out of all means, and return it: the model of all instances is to grow by it.

        Otherwise both move: the model follows the instances that get prefills, and the means of the others, to which it
        is related, stay where they are. 0 while all count as equal.
        """
        if not self._differ:
            return 0.0
        middle = _median([mean.value for mean in self._known().values()])
        self._means = {name: mean._replace(value=mean.value - middle) for name, mean in self._means.items()}
        return middle

    def at(self, now_s: float) -> Slownesses:
        """Values at a time; empty while all count as equal. Computed once a second."""
        if self._differ and now_s - self._at_s > _RENEWED_S:
            self._renew(now_s)
        return self._values

    @property
    def latest(self) -> Slownesses:
        """The values computed last."""
        return self._values

    def _known(self) -> dict[str, _Mean]:
        return {name: mean for name, mean in self._means.items() if mean.prefills >= LEAST_PREFILLS}

    def _renew(self, now_s: float) -> None:
        """Compute the values of a time. O(n log n)."""
        self._at_s = now_s
        self._means = {name: mean for name, mean in self._means.items() if now_s - mean.latest_s < FORGOTTEN_S}
        known = self._known()
        if len(known) < 2:
            self._differ, self._values = False, ALL_ALIKE
            return
        middle = _median([mean.value for mean in known.values()])
        sure = {name: mean for name, mean in known.items() if mean.number >= LEAST_PREFILLS} or known
        fastest = min([mean.value for mean in sure.values()])
        values = {name: fastest + (mean.value - fastest) * mean.trusted(now_s) for name, mean in known.items()}
        if self._differ:
            now_middle = _median(list(values.values()))
            self._differ = any(abs(value - now_middle) > ALIKE for value in values.values())
        else:
            self._differ = any(
                abs(mean.value - middle) - _SIGMAS * sqrt(self._variance / mean.number) > CLEAR
                for mean in sure.values()
                if mean.number >= LEAST_PREFILLS
            )
        if self._differ:
            self._values = {name: exp(values.get(name, fastest) - middle) for name in self._instances}
        else:
            self._values = ALL_ALIKE


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
