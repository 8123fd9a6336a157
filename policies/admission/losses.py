"""Losses: what the fleet recomputes because the contexts that it had computed were evicted.

A prefix that another instance still holds was not evicted: its session moved, which is the routing policy's choice.
"""

from __future__ import annotations

from collections.abc import Collection
from math import exp2, log
from typing import NamedTuple

from policies.costs.formulas import PrefillModel

HALF_LIFE_S = 30.0
"""Half-life of the time lost by recomputation."""
_LOG_2 = log(2.0)


class _Lost(NamedTuple):
    """Time lost until ``at_s``, weighted."""

    seconds: float = 0.0
    at_s: float = 0.0

    def by(self, now_s: float) -> float:
        return self.seconds * exp2(min(self.at_s - now_s, 0.0) / HALF_LIFE_S) if self.seconds else 0.0

    def plus(self, seconds: float, now_s: float) -> _Lost:
        return _Lost(max(0.0, self.by(now_s) + seconds), max(now_s, self.at_s))


_NOTHING = _Lost()


class Losses:
    """Tokens recomputed, and their time with the latest counting most. Single writer, O(1) per call."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens recomputed that the fleet had computed for the same session and evicted since."""
        self._all = _NOTHING
        self._each: dict[str, _Lost] = {}
        """By the instance that recomputed; of those in the fleet."""
        self.reports_cached = False
        """An engine has reported cached tokens: where none does, 0 may mean that it cannot."""

    def sent(
        self,
        instance: str,
        model: PrefillModel,
        prompt_tokens: int,
        before_tokens: int,
        held_tokens: int,
        now_s: float,
    ) -> None:
        """Count what of a prompt the fleet had computed and evicted, as predicted.

        Args:
            instance: computes the prompt.
            before_tokens: computed by the fleet for this session before.
            held_tokens: the most predicted to be cached on an instance, be it the one that computes the prompt or not.
        """
        if before_tokens > held_tokens:
            self._count(instance, model, prompt_tokens, before_tokens, held_tokens, 1, now_s)

    def reported(
        self,
        instance: str,
        model: PrefillModel,
        prompt_tokens: int,
        before_tokens: int,
        predicted_tokens: int,
        cached_tokens: int,
        now_s: float,
        elsewhere_tokens: int = 0,
    ) -> None:
        """Correct the prediction by what the engine reported.

        What was cached at the decision may be evicted before its turn comes in the engine's queue. Until an engine has
        reported cached tokens, 0 may mean that it reports none, and corrects nothing.

        Args:
            instance: computed the prompt.
            predicted_tokens: predicted to be cached on the instance that computed the prompt.
            cached_tokens: cached there, as its engine reported.
            elsewhere_tokens: the most predicted to be cached on another instance; no report corrects them.
        """
        if cached_tokens:
            self.reports_cached = True
        elif not self.reports_cached:
            cached_tokens = predicted_tokens
        predicted_tokens = max(predicted_tokens, elsewhere_tokens)
        held_tokens = max(cached_tokens, elsewhere_tokens)
        if before_tokens > held_tokens:
            self.tokens += before_tokens - held_tokens
        if held_tokens == predicted_tokens:
            return
        if before_tokens > predicted_tokens:
            self._count(instance, model, prompt_tokens, before_tokens, predicted_tokens, -1, now_s)
        if before_tokens > held_tokens:
            self._count(instance, model, prompt_tokens, before_tokens, held_tokens, 1, now_s)

    def share(self, instances: int, now_s: float, among: Collection[str] = ()) -> float:
        """Share of the time of ``instances`` that recomputing took, weighted by 2 ** (-age / HALF_LIFE_S).

        ``among``: only what these instances recomputed; empty: all.
        """
        if not self._all.seconds or not instances:
            return 0.0
        if among:
            lost_s = sum([self._each.get(name, _NOTHING).by(now_s) for name in among])
        else:
            lost_s = self._all.by(now_s)
        return lost_s * _LOG_2 / (HALF_LIFE_S * instances)

    def shares(self, now_s: float) -> dict[str, float]:
        """Share of its own time that each instance lost."""
        return {name: lost.by(now_s) * _LOG_2 / HALF_LIFE_S for name, lost in self._each.items()}

    def add_instance(self, instance: str) -> None:
        """Idempotent."""
        self._each.setdefault(instance, _NOTHING)

    def remove_instance(self, instance: str) -> None:
        """The instance has left the fleet."""
        self._each.pop(instance, None)

    def _count(
        self, instance: str, model: PrefillModel, prompt_tokens: int, before: int, held: int, sign: int, now_s: float
    ) -> None:
        seconds = model.seconds(prompt_tokens - held, held) - model.seconds(prompt_tokens - before, before)
        if seconds > 0.0:
            self._all = self._all.plus(sign * seconds, now_s)
            if (lost := self._each.get(instance)) is not None:
                self._each[instance] = lost.plus(sign * seconds, now_s)
