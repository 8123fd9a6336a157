"""The room rule: how far prompts may fill an instance's KV pool before one more of them waits for blocks."""

from __future__ import annotations

from collections.abc import Iterable

from policies.types import InstanceView

POOL_SHARE = 0.9
"""Of a KV pool, what prompts may fill; outputs and partly filled blocks take the rest."""


def tokens_over(view: InstanceView, prompt_tokens: int, share: float = POOL_SHARE) -> float:
    """Tokens by which a pool would exceed its share with this prompt: KV in use, promised since, and the prompt.

    At most 0 where there is room; a pool of unknown size counts as having room.
    """
    pool = view.kv_capacity_tokens
    return view.kv_used_tokens + view.kv_promised_tokens + prompt_tokens - share * pool if pool else 0.0


def all_tokens_over(
    pools: Iterable[int], used: Iterable[int], promised: Iterable[int], prompt_tokens: int, share: float = POOL_SHARE
) -> list[float]:
    """``tokens_over`` of several instances, whose pools, KV in use and KV promised since are given in one order."""
    return [
        used_tokens + promised_tokens + prompt_tokens - share * pool if pool else 0.0
        for pool, used_tokens, promised_tokens in zip(pools, used, promised, strict=True)
    ]
