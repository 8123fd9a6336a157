"""Losses: what the fleet recomputes because the contexts that it had computed were evicted.

A prefix that another instance still holds was not evicted: its session moved, which is the routing policy's choice.
"""

from __future__ import annotations

from math import exp2, log

from policies.costs.formulas import PrefillModel

HALF_LIFE_S = 30.0
"""Half-life of the time lost by recomputation."""
_LOG_2 = log(2.0)


class Losses:
    """Tokens recomputed, and their time with the latest counting most. Single writer, O(1) per call."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens recomputed that the fleet had computed for the same session and evicted since."""
        self._lost_s = 0.0
        self._lost_at_s = 0.0
        self.reports_cached = False
        """An engine has reported cached tokens: where none does, 0 may mean that it cannot."""

    def sent(self, model: PrefillModel, prompt_tokens: int, before_tokens: int, held_tokens: int, now_s: float) -> None:
        """Count what of a prompt the fleet had computed and evicted, as predicted.

        Args:
            before_tokens: computed by the fleet for this session before.
            held_tokens: the most predicted to be cached on an instance, be it the one that computes the prompt or not.
        """
        if before_tokens > held_tokens:
            self._count(model, prompt_tokens, before_tokens, held_tokens, 1, now_s)

    def reported(
        self,
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
            self._count(model, prompt_tokens, before_tokens, predicted_tokens, -1, now_s)
        if before_tokens > held_tokens:
            self._count(model, prompt_tokens, before_tokens, held_tokens, 1, now_s)

    def share(self, instances: int, now_s: float) -> float:
        """Share of the time of ``instances`` that recomputing took, weighted by 2 ** (-age / HALF_LIFE_S)."""
        if not self._lost_s or not instances:
            return 0.0
        return self._decayed(now_s) * _LOG_2 / (HALF_LIFE_S * instances)

    def _count(self, model: PrefillModel, prompt_tokens: int, before: int, held: int, sign: int, now_s: float) -> None:
        seconds = model.seconds(prompt_tokens - held, held) - model.seconds(prompt_tokens - before, before)
        if seconds > 0.0:
            self._lost_s = max(0.0, self._decayed(now_s) + sign * seconds)
            self._lost_at_s = max(now_s, self._lost_at_s)

    def _decayed(self, now_s: float) -> float:
        return self._lost_s * exp2(min(self._lost_at_s - now_s, 0.0) / HALF_LIFE_S) if self._lost_s else 0.0
