"""Facts about an engine that its calibration needs and does not measure."""

from __future__ import annotations

import msgspec


class CalibratedEngine(msgspec.Struct, kw_only=True, frozen=True):
    """Facts about the engine that are not measured."""

    name: str
    """Of the profile."""
    source: str
    pool_tokens: int
    kv_bytes_per_token: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    expert_miss: float | None = None
    """Share of its experts that one token leaves out; 0: dense; None: the points decide."""
    transport: str | None = None
    """KV transport between the engines; None: transfers were not measured."""
