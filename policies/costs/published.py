"""Published KV transfers over RDMA: the one copy that the cost model, the h20 profile and its checks read.

Source: the agentic-kvc reports, Mooncake 0.3.10 and 0.3.11 under vLLM 0.18.1 with Qwen3-Coder-30B-A3B (98,304 bytes of
KV per token) through a 200 Gbps NIC. Idle times are those of MB2, one transfer at a time between two H20s; slowdowns
under load those of MB6, between two H100s.
"""

from __future__ import annotations

from typing import NamedTuple


class PublishedTransfer(NamedTuple):
    """Five transfers of one size between two idle instances of one host, and five between hosts."""

    tokens: int
    size_bytes: int
    median_s: float
    """Within one host; between hosts it was 1 to 9 % less."""
    range_s: tuple[float, float] | None = None
    """Fastest and slowest of both runs, if they differ."""


class PublishedSlowdown(NamedTuple):
    """Factor by which bandwidth was lower with ``streams`` requests decoding on each of the two instances."""

    streams: int
    factor: float


_MIB = 1 << 20

RDMA_TRANSFERS = (
    PublishedTransfer(512, 48 * _MIB, 0.0053),
    PublishedTransfer(1_024, 96 * _MIB, 0.0104),
    PublishedTransfer(2_048, 192 * _MIB, 0.0206),
    PublishedTransfer(4_096, 384 * _MIB, 0.0415),
    PublishedTransfer(8_192, 768 * _MIB, 0.0837),
    PublishedTransfer(16_384, 1_536 * _MIB, 0.1671),
    PublishedTransfer(32_768, 3_072 * _MIB, 0.3209),
    PublishedTransfer(65_536, 6_144 * _MIB, 1.895, (0.6535, 2.3752)),
    PublishedTransfer(131_072, 12_288 * _MIB, 2.835, (1.283, 9.1586)),
)
"""By size. Up to 3 GiB repeats agree within 4 %, but for one slow first transfer and one outlier."""

RDMA_STEADY_BYTES_PER_S = 9.7e9
"""The reports' own figure for everything up to ``RDMA_STEADY_BYTES``."""
RDMA_STEADY_BYTES = 3 << 30

RDMA_SLOWDOWNS = (PublishedSlowdown(4, 8.76 / 4.53), PublishedSlowdown(12, 8.76 / 3.33))
"""65,536 tokens at 4.53 and 3.33 GB/s instead of 8.76. The reports' 8 and 24 streams are totals over both instances.

By bandwidth, which falls with load as their text says; wall times (747, 2,423, 2,015 ms) do not follow it.
"""
