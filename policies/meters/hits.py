"""Achieved, reachable and ceiling hits of a request, and the loss between them by cause.

For one prompt of n tokens, each bounded by n:

| tokens | definition |
| --- | --- |
| achieved A | served from the prefix cache, as the engine that computed the prompt reported |
| predicted P | predicted for that engine |
| reachable B | predicted for the best candidate |
| ceiling C | held by one infinite cache that sees every prompt of the fleet |

C - A = (C - B) + (B - P) + (P - A): eviction, routing and prediction. Where a later term is larger than the one before
it (an engine had more than predicted), the earlier ones are raised to it, so no loss is negative and the sum is exact.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.predict.predictor import cacheable_tokens
from policies.predict.prefix_tree import PrefixTree
from policies.types import Decision, RequestView


class HitTokens(NamedTuple):
    """Tokens of one prompt, or sums over several."""

    requests: float = 0
    prompt: float = 0
    achieved: float = 0
    reachable: float = 0
    ceiling: float = 0
    routing: float = 0
    """Lost because another candidate had more of the prompt."""
    eviction: float = 0
    """Lost because no candidate has any more what the fleet had computed."""
    prediction: float = 0
    """Lost because the chosen engine had less than predicted."""

    def shares(self) -> dict[str, float | None]:
        """Hit rates as shares of the prompt tokens; None without any."""
        return {name: self._share(getattr(self, name)) for name in ("achieved", "reachable", "ceiling")}

    def losses(self) -> dict[str, float]:
        """Losses as shares of the prompt tokens."""
        return {name: self._share(getattr(self, name)) or 0.0 for name in ("routing", "eviction", "prediction")}

    def _share(self, tokens: float) -> float | None:
        return round(tokens / self.prompt, 6) if self.prompt else None


def hit_tokens(prompt: int, ceiling: int, best: int, predicted: int, reported: int) -> HitTokens:
    """Split of one prompt's hits by the formula above; arguments in tokens."""
    achieved = min(reported, prompt)
    chosen = max(min(predicted, prompt), achieved)
    reachable = max(min(best, prompt), chosen)
    top = max(min(ceiling, prompt), reachable)
    return HitTokens(1, prompt, achieved, reachable, top, reachable - chosen, top - reachable, chosen - achieved)


def best_prediction(decision: Decision, predicted: int) -> int:
    """Most tokens that any candidate of a decision was predicted to have; at least ``predicted``, the chosen one's."""
    best = predicted
    for score in decision.scores:
        cached = score.cached_tokens
        if cached is not None and cached > best:
            best = cached
    return best


class CeilingCache:
    """The prefix blocks of every prompt: one cache that never evicts, up to a bound that keeps its memory finite.

    Above ``capacity_blocks`` the least recently used blocks are dropped, at 8 bytes each. Complexity of ``add`` for a
    prompt of b blocks: that of ``PrefixTree.insert``.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._tree = PrefixTree(capacity_blocks)
        self._serial = 0

    @property
    def blocks(self) -> int:
        """Blocks held."""
        return self._tree.blocks

    def add(self, request: RequestView) -> tuple[int, int]:
        """Add a computed prompt; returns the blocks and the reusable tokens of it that were held before."""
        self._serial += 1
        held = self._tree.insert(request.block_hashes, self._serial)
        return held, cacheable_tokens(request, held)

    def clear(self) -> None:
        """Drop everything: block hashes have another meaning from now on."""
        self._tree.clear()
