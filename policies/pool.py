"""The room rule: how far prompts may fill an instance's KV pool before one more of them waits for blocks."""

from __future__ import annotations

from policies.snapshot import Columns
from policies.types import InstanceView

POOL_SHARE = 0.9
"""Of a KV pool, what prompts may fill; outputs and partly filled blocks take the rest."""


def tokens_over(view: InstanceView, prompt_tokens: int, share: float = POOL_SHARE) -> float:
    """Tokens by which a pool would exceed its share with this prompt: KV in use, promised since, and the prompt.

    At most 0 where there is room; a pool of unknown size counts as having room.
    """
    pool = view.kv_capacity_tokens
    return view.kv_used_tokens + view.kv_promised_tokens + prompt_tokens - share * pool if pool else 0.0


def all_tokens_over(columns: Columns, prompt_tokens: int, share: float = POOL_SHARE) -> list[float]:
    """``tokens_over`` of every candidate."""
    return [
        used + promised + prompt_tokens - share * pool if pool else 0.0
        for pool, used, promised in zip(
            columns.kv_capacity_tokens, columns.kv_used_tokens, columns.kv_promised_tokens, strict=True
        )
    ]
