"""Pieces of a hand-off over TCP, and the number of them that Mooncake's queue takes.

vLLM's connector joins blocks that are neighbours on both sides. In a KV pool that has served for minutes none are, so a
hand-off has one piece for each block and layer, of K and of V. Mooncake 0.3.13 and later queue the pieces of a transfer
over TCP, and refuse the whole transfer if they do not fit (docs/instruments-h100.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

QUEUE_VARIABLE = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
"""Environment variable with the size of Mooncake's queue of pieces for one peer."""
QUEUED_PIECES = 65_000
"""Pieces that Mooncake 0.3.14 takes by default at any speed: some 65,500 fit, and more wait for at most a second."""
_QUEUED_PIECES_0_3_13 = 2_048
"""The same for 0.3.13: 2,050 were taken and 2,500 refused."""
_LARGEST_QUEUE_0_3_13 = 65_535
"""A larger setting of `QUEUE_VARIABLE` is ignored by 0.3.13."""
TCP_QUEUE: Mapping[str, str] = {
    QUEUE_VARIABLE: str(_LARGEST_QUEUE_0_3_13),
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": str(_LARGEST_QUEUE_0_3_13),
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
}
"""Variables of engines that the launcher starts for TCP: the largest queue of 0.3.13, and pieces beyond it wait for a
minute instead of a second. On busy processors a hand-off is late by more than that second, and then refused."""
_LARGE_BLOCK = 128
_LARGE_QUEUE = 1_000_000


@dataclass(frozen=True, slots=True)
class Pieces:
    """Dimensions of one engine that decide how many pieces a hand-off of a worn pool has."""

    layers: int
    block_tokens: int
    max_tokens: int
    """Longest prompt."""

    @property
    def most(self) -> int:
        """Pieces of the longest prompt."""
        return 2 * self.layers * -(-self.max_tokens // self.block_tokens)

    def longest_tokens(self, limit: int) -> int:
        """Longest prompt, in whole blocks, with at most ``limit`` pieces."""
        return limit // (2 * self.layers) * self.block_tokens


def queued_pieces(environment: Mapping[str, str], mooncake: str | None = None) -> int:
    """Pieces that Mooncake's queue takes at once, by an engine's environment and Mooncake's version.

    None: taken for 0.3.14.
    """
    old = mooncake is not None and mooncake.startswith("0.3.13")
    given = environment.get(QUEUE_VARIABLE, "")
    if given.isdecimal() and int(given) > 0 and not (old and int(given) > _LARGEST_QUEUE_0_3_13):
        return int(given)
    return _QUEUED_PIECES_0_3_13 if old else QUEUED_PIECES


def too_many_pieces(pieces: Pieces, limit: int) -> tuple[str, str] | None:
    """Finding and remedy if the longest prompt has more than ``limit`` pieces; None if it has not."""
    if pieces.most <= limit:
        return None
    found = (
        f"over TCP, prompts longer than {pieces.longest_tokens(limit):,} tokens cannot be handed over once the KV pool "
        f"is worn: with blocks of {pieces.block_tokens} tokens and {pieces.layers} layers, {pieces.max_tokens:,} "
        f"tokens are up to {pieces.most:,} pieces, and Mooncake's queue takes {limit:,}. Such a pull fails at once; "
        "its request waits until the proxy gives up, and D keeps its KV blocks until it restarts"
    )
    larger = f"vllm.block_size: {_LARGE_BLOCK}, " if pieces.block_tokens < _LARGE_BLOCK else ""
    return found, (
        f'set {larger}env.{QUEUE_VARIABLE}: "{_LARGE_QUEUE}" (Mooncake 0.3.14; 0.3.13 takes at most '
        f"{_LARGEST_QUEUE_0_3_13}), use nvlink or rdma, or lower vllm.max_model_len"
    )
