"""Prompts of random token ids that no engine has cached."""

from __future__ import annotations

import random
import uuid
from typing import NamedTuple


class TokenRange(NamedTuple):
    """Token ids of prompts: ``low`` <= id < ``high``. Ordinary entries of the vocabulary, no special tokens."""

    low: int = 1_000
    high: int = 100_000


ORDINARY = TokenRange()


class Prompts:
    """Source of prompts. Equal seeds and nonces give equal prompts; a fresh nonce keeps earlier runs' caches out.

    Args:
        tokens: ids to draw from.
        seed: of the draws.
        nonce: changes every prompt; default: a fresh one. It belongs in the record.
    """

    def __init__(self, tokens: TokenRange = ORDINARY, seed: int = 0, nonce: str | None = None) -> None:
        self.seed = seed
        self.nonce = uuid.uuid4().hex if nonce is None else nonce
        self._tokens = tokens
        self._draw = random.Random(f"{seed}/{self.nonce}")

    def fresh(self, tokens: int) -> list[int]:
        """A new prompt."""
        low, high = self._tokens
        width = high - low
        return [low + int(each * width) for each in (self._draw.random() for _ in range(tokens))]
