"""Types of an engine's interface: configuration, token events, a count of its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sim.core.handoff import LoadFailurePolicy

TransferSeconds = Callable[[int, float, int], float]
"""(bytes, streams running on each side, transfers in flight) -> seconds"""


class EngineDeadError(Exception):
    """The engine core has died, as vLLM's does on requests it cannot handle; only a restart helps."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of one engine. Sizes are in tokens unless the name says blocks.

    Raises:
        ValueError: a size is below 1, or ``max_model_len`` does not fit the KV pool.
    """

    num_blocks: int
    block_tokens: int = 64
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 200_000
    role: str = "kv_both"
    """``kv_both``, ``kv_producer``, ``kv_consumer`` or ``none``."""
    engine_id: str = "engine"
    kv_bytes_per_token: int = 98_304
    abort_timeout_s: float = 480.0
    """Seconds for which P holds blocks that no engine pulls (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)."""
    load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.HANG
    priority_scheduling: bool = False
    """Waiting requests are computed by priority, then in order of arrival (``--scheduling-policy priority``)."""
    long_prefill_token_threshold: int = 0
    """Most tokens of a step for one request, so that others share it (vLLM's flag of this name); 0: the whole step."""

    def __post_init__(self) -> None:
        if not 0 <= self.long_prefill_token_threshold <= self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold {self.long_prefill_token_threshold} is not in 0 .. "
                f"{self.max_model_len}, the longest request"
            )
        if min(self.block_tokens, self.max_num_batched_tokens, self.max_num_seqs) < 1:
            raise ValueError("block_tokens, max_num_batched_tokens and max_num_seqs must be at least 1")
        if self.max_model_len > self.num_blocks * self.block_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit the KV pool of {self.num_blocks} blocks of "
                f"{self.block_tokens} tokens: lower max_model_len or enlarge the pool"
            )


class TokenEvent(NamedTuple):
    """Tokens a request got when a step ended; ``tokens`` is 0 only for one that failed."""

    request_id: str
    tokens: int
    first: bool
    finish_reason: str | None
    """``length``, ``stop`` or ``error``; None while the request continues."""
    cached_tokens: int
    transfer_id: str | None
    """Set when the request finished as a P leg and its blocks are held under this id."""
    time_s: float
    """Engine time of the last of the tokens."""


class EngineState(NamedTuple):
    """A count of everything, for tests and the state endpoint. Blocks are distinct; the four kinds add up to all."""

    running: int
    waiting: int
    pulling: int
    total_blocks: int
    free_blocks: int
    used_blocks: int
    held_blocks: int
    leaked_blocks: int
    cached_blocks: int
    holds: int
    expired_holds: int
    evictions: int
