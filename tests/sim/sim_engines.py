"""Small engines, prompts and a stepping loop for the simulator's tests."""

from __future__ import annotations

import math
from typing import Any

from sim.core.content import chain_keys, token_bytes
from sim.core.engine import Engine
from sim.core.sequence import KvTransfer, Request
from sim.core.timing import StepTiming
from sim.core.types import EngineConfig, TokenEvent

BLOCK = 4
TIMING = StepTiming(
    frontend_s=0.0,
    frontend_token_s=0.0,
    decode_s=0.010,
    decode_experts_s=0.0,
    expert_miss=0.5,
    decode_context_s=1e-6,
    prefill_s=0.001,
    prefill_token_s=0.001,
    prefill_context_s=1e-6,
    prefill_floor_s=0.010,
    mixed_stream_s=0.0,
)


def transfer_seconds(size_bytes: int, streams: float, transfers: int) -> float:
    """1 MB/s, whatever the load."""
    return size_bytes / 1e6


def make_engine(timing: StepTiming = TIMING, **config: Any) -> Engine:
    """An engine with blocks of 4 tokens, 1,000 bytes of KV a token, and 64 blocks by default."""
    defaults: dict[str, Any] = {"num_blocks": 64, "block_tokens": BLOCK, "kv_bytes_per_token": 1000}
    merged = defaults | config
    merged.setdefault("max_model_len", merged["num_blocks"] * merged["block_tokens"])
    return Engine(EngineConfig(**merged), timing, transfer_seconds)


def make_request(name: str, ids: list[int] | range, max_tokens: int = 1, **more: Any) -> Request:
    """A request for token ids."""
    return Request.from_tokens(name, token_bytes(ids), BLOCK, max_tokens=max_tokens, **more)


def keys_of(ids: list[int] | range) -> list[int]:
    """Chained keys of the full blocks of token ids."""
    return chain_keys(token_bytes(ids), BLOCK)


def p_leg(name: str, ids: list[int] | range, transfer_id: str = "t", **more: Any) -> Request:
    """The prefill leg of a hand-off."""
    transfer = KvTransfer(do_remote_decode=True, transfer_id=transfer_id)
    return make_request(name, ids, 1, kv_transfer=transfer, **{"min_tokens": 1, **more})


def d_leg(name: str, ids: list[int] | range, transfer_id: str = "t", source: str = "p", **more: Any) -> Request:
    """The decode leg of a hand-off; ``source`` is P's engine id and, in a virtual fleet, its name."""
    transfer = KvTransfer(
        do_remote_prefill=True, transfer_id=transfer_id, remote_engine_id=source, remote_bootstrap_addr=source
    )
    return make_request(name, ids, **{"max_tokens": 4, "kv_transfer": transfer, **more})


def drain(engine: Engine, now_s: float = 0.0, horizon_s: float = math.inf) -> tuple[list[TokenEvent], float]:
    """Step until no work is left; returns the events and the time."""
    events: list[TokenEvent] = []
    while True:
        end_s = engine.step_end_s or engine.begin_step(now_s, horizon_s)
        if end_s is None:
            next_s = engine.next_event_s()
            if math.isinf(next_s) or next_s <= now_s:
                return events, now_s
            now_s = next_s
            continue
        now_s = end_s
        events += engine.end_step()


def accounted(engine: Engine) -> bool:
    """True if every block has exactly the owners that reference it."""
    state = engine.state()
    total = state.free_blocks + state.used_blocks + state.held_blocks + state.leaked_blocks
    return total == state.total_blocks
