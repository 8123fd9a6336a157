"""EFA and RDMA: the environment that engines need, and the published rules for sizes of writes and queues.

Rules and figures are those of Mooncake's guide to its EFA transport ("AWS EFA Transport for Mooncake"). None was
verified by this project: it has run on no such hardware (docs/efa-rdma.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from launch.fleet.sections import FabricSettings
from policies.types import Transport

AWS_LIBRARIES = ("/opt/amazon/efa/lib", "/opt/amazon/efa/lib64")
"""Directories of the libfabric that AWS's installer brings: Debian's layout, Red Hat's layout."""
BLOCK_BYTES = 1 << 20
"""Size of one write that comes within a few percent of the peak."""
MAX_WR = 256
"""Writes in flight per adapter in the published rule; later Mooncake takes the device's own depth (2048 or 4096)."""
BATCH = 128
"""Writes per call at which the source measured its peaks."""
_FABRICS = frozenset({Transport.EFA, Transport.RDMA})
_VARIABLES: Mapping[str, tuple[str, frozenset[Transport]]] = {
    "nics": ("MC_TE_FILTERS", _FABRICS),
    "max_wr": ("MC_MAX_WR", _FABRICS),
    "max_cqe": ("MC_MAX_CQE_PER_CTX", _FABRICS),
    "cqs_per_nic": ("MC_NUM_CQ_PER_CTX", _FABRICS),
    "gid_index": ("MC_GID_INDEX", frozenset({Transport.RDMA})),
    "traffic_class": ("MC_IB_TC", frozenset({Transport.RDMA})),
    "slice_bytes": ("MC_SLICE_SIZE", frozenset({Transport.RDMA})),
    "device_rdma": ("FI_EFA_USE_DEVICE_RDMA", frozenset({Transport.EFA})),
    "tx_depth": ("FI_EFA_TX_SIZE", frozenset({Transport.EFA})),
    "cq_threads": ("MC_EFA_CQ_THREADS", frozenset({Transport.EFA})),
}
"""Key of `FabricSettings` -> its variable, and the transports it is for."""


@dataclass(frozen=True, slots=True)
class EfaInstance:
    """An AWS instance type with EFA, and its published GPU-to-GPU peak between two hosts."""

    name: str
    fleet: str
    """The shipped fleet file for it."""
    gpu: str
    nics: int
    gbit_per_nic: int
    peak_write_bytes_per_s: float | None
    """None: not published."""


EFA_INSTANCES = (
    EfaInstance("p5.48xlarge", "efa-p5", "H100", 32, 100, 388.90e9),
    EfaInstance("p5e.48xlarge", "efa-p5e", "H200", 32, 100, None),
    EfaInstance("p5en.48xlarge", "efa-p5en", "H200", 16, 200, 365.66e9),
    EfaInstance("p6-b200.48xlarge", "efa-p6", "B200", 8, 400, 302e9),
    EfaInstance("p6-b300.48xlarge", "efa-p6-b300", "B300", 16, 400, 780.33e9),
)
_WRITE_SWEEP = (
    (64 << 10, 97.11e9),
    (128 << 10, 190.82e9),
    (256 << 10, 324.90e9),
    (512 << 10, 357.62e9),
    (1 << 20, 352.59e9),
    (2 << 20, 366.87e9),
)
"""Bytes of a write -> bytes per second, GPU to GPU on two p5en hosts, 16 threads of 128 writes."""


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """Sizes with which `transfer_engine_bench` reaches an instance's peak."""

    threads: int
    batch: int
    block_bytes: int
    buffer_bytes: int
    """The least that holds every write in flight."""

    def command(self, target: str | None = None) -> tuple[str, ...]:
        """Command line for the receiver (None), or for the sender to ``host:port``."""
        common = (
            "--protocol=efa",
            "--metadata_server=P2PHANDSHAKE",
            f"--buffer_size={self.buffer_bytes}",
            "--gpu_id=-1",
        )
        if target is None:
            return ("transfer_engine_bench", "--mode=target", *common)
        sizes = (f"--threads={self.threads}", f"--batch_size={self.batch}", f"--block_size={self.block_bytes}")
        return (
            "transfer_engine_bench",
            "--mode=initiator",
            *common,
            f"--segment_id={target}",
            "--operation=write",
            "--duration=10",
            *sizes,
            "--report_unit=GB",
        )


def fabric_environment(transport: Transport, settings: FabricSettings) -> dict[str, str]:
    """Variables of an engine with this transport; none with TCP and NVLink."""
    variables = {}
    if transport is Transport.EFA:
        # With shared memory, a transfer between two processes of one host ends in a segmentation fault
        # (https://github.com/ofiwg/libfabric/issues/12328).
        variables = {"FI_PROVIDER": "efa", "FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    for key, (name, transports) in _VARIABLES.items():
        value = getattr(settings, key)
        if transport not in transports or value is None:
            continue
        if isinstance(value, tuple):
            variables[name] = ",".join(value)
        else:
            variables[name] = str(int(value))
    return variables


def library_directories(transport: Transport, settings: FabricSettings) -> tuple[str, ...]:
    """Directories that an engine's LD_LIBRARY_PATH begins with."""
    if settings.library_path is not None:
        return settings.library_path if transport in _FABRICS else ()
    return AWS_LIBRARIES if transport is Transport.EFA else ()


def misplaced_keys(transport: Transport, settings: FabricSettings) -> dict[str, str]:
    """Keys that are given and not for this transport -> the transports they are for, as text."""
    wanted = {key: transports for key, (_, transports) in _VARIABLES.items()} | {"library_path": _FABRICS}
    return {
        key: " or ".join(sorted(transports))
        for key, transports in wanted.items()
        if key in settings.model_fields_set and transport not in transports
    }


def writes_in_flight(nics: int, depth: int = MAX_WR) -> int:
    """Most writes that ``nics`` adapters hold: threads x batch must not exceed it, or senders wait and time out."""
    return nics * depth


def bench_sizes(nics: int) -> BenchSizes:
    """Sizes for `transfer_engine_bench`: half of what the adapters hold, as in the source on 16 and on 32 of them."""
    threads = max(1, writes_in_flight(nics) // (2 * BATCH))
    return BenchSizes(threads, BATCH, BLOCK_BYTES, threads * BATCH * BLOCK_BYTES)


def least_write_bytes(kv_heads: int, head_size: int, value_bytes: int, block_tokens: int) -> int:
    """Bytes of the smallest write of vLLM's connector: one block of one layer, K and V apart.

    It joins blocks that are neighbours on both sides, so writes of a long prompt are usually larger.
    """
    return kv_heads * head_size * value_bytes * block_tokens


def share_of_peak(write_bytes: int) -> float:
    """Published share of the peak (0 to 1) with writes of this size, on p5en; linear in log size between points."""
    peak = max(rate for _, rate in _WRITE_SWEEP)
    (smallest, slowest), largest = _WRITE_SWEEP[0], _WRITE_SWEEP[-1]
    if write_bytes <= smallest:
        # Below the sweep the cost of a write dominates: the rate is in proportion to its size.
        return slowest / peak * write_bytes / smallest
    for (low, low_rate), (high, high_rate) in pairwise(_WRITE_SWEEP):
        if low <= write_bytes <= high:
            part = log2(write_bytes / low) / log2(high / low)
            return (low_rate + part * (high_rate - low_rate)) / peak
    return largest[1] / peak


def instances_with(nics: int) -> tuple[str, ...]:
    """Names of the instance types with this number of adapters."""
    return tuple(one.name for one in EFA_INSTANCES if one.nics == nics)
