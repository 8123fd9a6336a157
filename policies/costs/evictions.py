"""Prices of evictions: what a session that returns must have computed again."""

from __future__ import annotations

from policies.costs.formulas import PrefillModel


def recomputed_s(tokens: float, context_tokens: float, prefill: PrefillModel) -> float:
    """Seconds to compute evicted contexts again, one after the other.

    Args:
        tokens: evicted, of contexts of ``context_tokens`` each; of the last one perhaps a part.
        context_tokens: above 0.
        prefill: learned times.
    """
    if tokens <= 0:
        return 0.0
    at_once = min(tokens, context_tokens)
    return prefill.seconds(at_once, 0.0) * tokens / at_once
