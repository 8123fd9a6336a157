"""Published measurements of one and two engines against the simulator: interference, transfers, savings of isolation.

Published: the agentic-kvc reports (H20, vLLM 0.18.1; transfers between busy engines on two H100s). The h20 profile was
fitted to the interference figures at 8 streams and interpolates the transfer figures, so these tables show how well the
model's form fits them, not that it predicts anything.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.costs.published import RDMA_SLOWDOWNS, RDMA_TRANSFERS
from sim.core.engine import Engine
from sim.core.sequence import keyed_request
from sim.core.types import EngineConfig
from sim.hardware import HardwareProfile, load_profile
from sim.virtual import VirtualFleet

PROFILE = "h20"
BLOCK_TOKENS = 64
STREAMS = 8
STREAM_CONTEXT_TOKENS = 1_024
SETTLE_S = 10.0


class Interference(NamedTuple):
    """A prefill among 8 decoding streams."""

    prefill_tokens: int
    ttft_s: float
    tpot_s: float
    """Burst average: the prefill's time over the tokens a stream got during it."""


PUBLISHED_INTERFERENCE = (
    Interference(2_048, 0.143, 0.032),
    Interference(8_192, 0.583, 0.114),
    Interference(32_768, 4.520, 0.388),
    Interference(65_536, 15.615, 0.757),
    Interference(131_072, 56.991, 1.419),
)
PUBLISHED_BASE_TPOT_S = 0.0077


def _engine(profile: HardwareProfile) -> Engine:
    config = EngineConfig(
        num_blocks=profile.kv.pool_tokens // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        max_num_seqs=profile.max_num_seqs,
        max_model_len=profile.max_model_len,
        kv_bytes_per_token=profile.kv.bytes_per_token,
    )
    return Engine(config, profile.timing, profile.transport().seconds)


def simulate_interference(prefill_tokens: int) -> tuple[Interference, float]:
    """(the same burst on a simulated engine, a stream's TPOT before it in seconds)"""
    fleet = VirtualFleet({"engine": _engine(load_profile(PROFILE))})
    blocks = STREAM_CONTEXT_TOKENS // BLOCK_TOKENS
    for number in range(STREAMS):
        keys = list(range(number * blocks, (number + 1) * blocks))
        request = keyed_request(f"stream-{number}", keys, STREAM_CONTEXT_TOKENS, 20_000, (number + 1) << 40)
        fleet.submit("engine", request)
    for _ in fleet.run(SETTLE_S):
        pass
    before = sum(event.tokens for _, event in fleet.run(2 * SETTLE_S) if event.request_id == "stream-0")
    sent_s, tokens = fleet.now_s, 0
    keys = list(range(1 << 32, (1 << 32) + prefill_tokens // BLOCK_TOKENS))
    fleet.submit("engine", keyed_request("prefill", keys, prefill_tokens, 1, 1 << 60))
    for _, event in fleet.run():
        if event.request_id == "stream-0":
            tokens += event.tokens
        elif event.request_id == "prefill":
            ttft_s = event.time_s - sent_s
            return Interference(prefill_tokens, ttft_s, ttft_s / tokens), SETTLE_S / before
    raise RuntimeError("the prefill never finished")


def interference_table() -> str:
    """Interference of prefill and decode (published / simulated)."""
    lines = [
        "| prefill among 8 streams | TTFT published / simulated | TPOT during it | penalty on TPOT |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for theirs in PUBLISHED_INTERFERENCE:
        ours, base_s = simulate_interference(theirs.prefill_tokens)
        lines.append(
            f"| {theirs.prefill_tokens:,} | {theirs.ttft_s:.3f} / {ours.ttft_s:.3f} s "
            f"| {theirs.tpot_s * 1e3:.0f} / {ours.tpot_s * 1e3:.0f} ms "
            f"| {theirs.tpot_s / PUBLISHED_BASE_TPOT_S:.0f}x / {ours.tpot_s / base_s:.0f}x |"
        )
    return "\n".join(lines)


def transfer_table() -> str:
    """Time of KV transfers (published / simulated), and the decode time saved by isolating the prefill."""
    profile = load_profile(PROFILE)
    transport = profile.transport()
    lines = [
        "| tokens | idle transfer published / simulated | decode time the prefill takes from 8 streams |",
        "| ---: | ---: | ---: |",
    ]
    for each in RDMA_TRANSFERS:
        tokens = each.tokens
        seconds = transport.seconds(tokens * profile.kv.bytes_per_token, 0, 1)
        stolen = ""
        if tokens in {prefill.prefill_tokens for prefill in PUBLISHED_INTERFERENCE}:
            burst, base_s = simulate_interference(tokens)
            stolen = f"{STREAMS * burst.ttft_s * (1 - base_s / burst.tpot_s):.1f} s"
        lines.append(f"| {tokens:,} | {each.median_s * 1e3:,.1f} / {seconds * 1e3:,.1f} ms | {stolen} |")
    size = 65_536 * profile.kv.bytes_per_token
    lines += ["", "| 65,536 tokens, streams on each side | slowdown published / simulated |", "| ---: | ---: |"]
    for streams, slowdown in RDMA_SLOWDOWNS:
        simulated = transport.seconds(size, streams, 1) / transport.seconds(size, 0, 1)
        lines.append(f"| {streams} | {slowdown:.1f}x / {simulated:.1f}x |")
    return "\n".join(lines)
