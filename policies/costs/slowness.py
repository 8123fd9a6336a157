"""Slowness of instances: how many times as long a prefill takes on each as on the fleet's middle one.

One prefill model serves all instances. Where their GPUs differ, or one is slower than it should be, first tokens come
earlier or later than it expects on some of them, whatever the size of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
Slownesses = Mapping[str, float]
"""Factors by instance; those that are not in it have 1."""
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
    differs, by ``CLEAR``, all count as equal: so nothing changes in a fleet of equal instances.
    """

    __slots__ = ("_at_s", "_centred", "_differ", "_means", "_middle", "_model", "_prefills", "_variance", "measured")

    def __init__(self) -> None:
        self._means: dict[str, _Mean] = {}
        """Relative to the model as it was at first."""
        self._middle = 0.0
        """Median of the means that count."""
        self._model = 0.0
        """Growth of the model since (`recentre`)."""
        self._variance = _PRIOR_VARIANCE
        self._prefills = 0
        self._differ = False
        self._centred = True
        """Nothing is to be taken out of the means: all count as equal, and did when that was done last."""
        self._at_s = 0.0
        self.measured: Slownesses = ALL_ALIKE
        """Values by the prefills of each instance alone; empty while all count as equal."""

    def forget(self, instance: str) -> None:
        """The instance left the fleet, has another GPU, or may be repaired: nothing is known of it."""
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
        observed = self._model + max(-_LARGEST, min(_LARGEST, log(actual_s / expected_s)))
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
        """The logarithm by which the model of all instances is to grow, to be that of the middle one.

        Otherwise both move: the model follows the instances that get prefills, and the means of the others, to which it
        is related, stay where they are. 0 while all count as equal, but for the first time after they did not. O(1).
        """
        if self._centred and not self._differ:
            return 0.0
        self._centred = not self._differ
        grown, self._model = self._middle - self._model, self._middle
        return grown

    def among(self, now_s: float, *instances: Iterable[str]) -> Slownesses:
        """Values for a decision among the instances of all groups; empty while all count as equal. O(n).

        That of an instance without a prefill for ``FRESH_S`` approaches the fastest one of these, and one of which
        nothing is known has the fastest one's, so that they are tried. Others may serve another model.
        """
        if not self._differ:
            return ALL_ALIKE
        means, middle, names = self._means, self._middle, [name for group in instances for name in group]
        known = {name: mean for name in names if (mean := means.get(name)) and mean.prefills >= LEAST_PREFILLS}
        if not known:
            return ALL_ALIKE
        sure = [mean.value for mean in known.values() if mean.number >= LEAST_PREFILLS]
        fastest = min(sure or [mean.value for mean in known.values()])
        unknown = exp(fastest - middle)
        return {
            name: exp(fastest - middle + (mean.value - fastest) * mean.trusted(now_s))
            if (mean := known.get(name))
            else unknown
            for name in names
        }

    def _renew(self, now_s: float) -> None:
        """Judge whether instances differ. O(n log n)."""
        self._at_s = now_s
        self._means = {name: mean for name, mean in self._means.items() if now_s - mean.latest_s < FORGOTTEN_S}
        known = {name: mean for name, mean in self._means.items() if mean.prefills >= LEAST_PREFILLS}
        middle = self._middle = _median([mean.value for mean in known.values()]) if known else self._model
        if len(known) < 2:
            self._differ = False
        elif self._differ:
            self._differ = any(abs(mean.value - middle) > ALIKE for mean in known.values())
        else:
            self._differ = any(
                abs(mean.value - middle) - _SIGMAS * sqrt(self._variance / mean.number) > CLEAR
                for mean in known.values()
                if mean.number >= LEAST_PREFILLS  # worth that many now, too
            )
        self._centred = self._centred and not self._differ
        self.measured = {name: exp(mean.value - middle) for name, mean in known.items()} if self._differ else ALL_ALIKE


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
