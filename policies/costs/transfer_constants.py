"""Published constants of KV transfers: a formula for each transport, and points beyond its range."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from types import MappingProxyType
from typing import NamedTuple

from policies.costs.published import RDMA_STEADY_BYTES, RDMA_STEADY_BYTES_PER_S, RDMA_TRANSFERS
from policies.types import Transport

KV_BYTES_PER_TOKEN = 98_304
"""Qwen3-Coder-30B-A3B at TP=1 (48 layers, 4 KV heads of 128, bf16). Another size is learned as another bandwidth."""


class TransferFormula(NamedTuple):
    """``setup + streams * stream_setup + bytes / bandwidth * (1 + slowdown * streams) * (1 + crowd * others)`` seconds.

    Where the transport has ``REGIMES``, their time replaces ``bytes / bandwidth`` from the size of the first one on.
    ``streams`` are requests decoding on the busier side, ``others`` other transfers in progress in the fleet.
    """

    setup_s: float
    stream_setup_s: float
    bytes_per_s: float
    slowdown: float
    crowd: float


TRANSFER_FORMULAS: Mapping[Transport, TransferFormula] = MappingProxyType(
    {
        # D legs of vLLM 0.20.2 with Mooncake between two H200s, idle and with 4 and 12 streams a side: over NVLink
        # 65k tokens (6.4 GB) took 0.12-0.15 s, 0.3-1.6 s and 1.3-1.7 s; over TCP 3.4-4.3 s idle. The slowdown over
        # TCP is that of Mooncake 0.3.14 from a worn pool (15-18 MB/s between two H100s beside 4 and 12 streams: some
        # 10 ms for each piece of memory, so less from long free ranges); 0.3.10 took 20-23 s.
        Transport.NVLINK: TransferFormula(0.025, 0.009, 60e9, 1.0, 1.0),
        Transport.TCP: TransferFormula(0.030, 0.060, 1.8e9, 12.5, 4.0),
        # Mooncake through a 200 Gbps NIC: `policies.costs.published`. The slowdown is 15 % off either of its points.
        Transport.RDMA: TransferFormula(0.040, 0.010, RDMA_STEADY_BYTES_PER_S, 0.17, 1.0),
        # EFA's published peaks are 300 GB/s and more for registered megabyte blocks; KV blocks are smaller.
        Transport.EFA: TransferFormula(0.030, 0.010, 20.0e9, 0.15, 1.0),
    }
)


class Regime(NamedTuple):
    """Transfers up to ``size_bytes``, beyond the range of the formula's bandwidth."""

    size_bytes: float
    seconds: float
    """Median of transfers of just that size between idle instances."""
    sigma: float
    """Standard deviation of log(time / median) there, taken from the slowest of five: the quantile 5/6, z = 1."""


REGIMES: Mapping[Transport, tuple[Regime, ...]] = MappingProxyType(
    {
        Transport.RDMA: (
            Regime(RDMA_STEADY_BYTES, RDMA_STEADY_BYTES / RDMA_STEADY_BYTES_PER_S, 0.0),
            *(
                Regime(each.size_bytes, each.median_s, log(each.range_s[1] / each.median_s))
                for each in RDMA_TRANSFERS
                if each.range_s is not None
            ),
        )
    }
)
"""Points beyond which the time is no longer linear in bytes, by size.

The first is the end of the linear part; in between, time and sigma are linear in bytes, and beyond the last point
bandwidth and sigma are constant.
"""


class TransferConstants(NamedTuple):
    """Formula and regimes of each transport: the published ones, or those that a calibration has replaced."""

    formulas: Mapping[Transport, TransferFormula] = TRANSFER_FORMULAS
    regimes: Mapping[Transport, tuple[Regime, ...]] = REGIMES


PUBLISHED = TransferConstants()
