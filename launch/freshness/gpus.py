"""Check for other processes on the fleet's GPUs.

NVML lists the processes of a GPU by pid. Inside a container it lists none, or host pids, which have no meaning inside.
So "nothing foreign" is claimed only where the list demonstrably covers our own processes, or where the GPU's memory is
idle; otherwise the answer is `unknown`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import psutil

from launch.hardware.gpus import Gpu, GpuInventory, GpuProcess, read_inventory
from launch.run.state import ProcessState

OK, FOREIGN, UNKNOWN, NONE = "ok", "foreign", "unknown", "none"
IDLE_BYTES = 1 << 30
"""A GPU with less memory in use is idle: the driver's own share is some 0.6 GB on a data-centre GPU, a CUDA context in
some process 0.5 GB more."""
_SETTLE_POLL_S = 0.5


class GpuProof(msgspec.Struct, kw_only=True):
    """Evidence on exclusive use of the fleet's GPUs."""

    status: str
    """ok; foreign: other processes are present; unknown: cannot be determined here; none: the fleet uses no GPU."""
    reason: str
    gpus: list[int] = []
    """Indices of the GPUs in question."""
    foreign: list[str] = []
    """One sentence per fact against it."""


def judge_gpus(
    inventory: GpuInventory,
    wanted: Collection[int] | None,
    own_pids: Collection[int],
    before: GpuInventory | None = None,
    exists: Callable[[int], bool] = psutil.pid_exists,
) -> GpuProof:
    """Judge NVML's data on the fleet's GPUs.

    Args:
        inventory: the GPUs now.
        wanted: indices of the GPUs the fleet may use; None: any.
        own_pids: every process of the fleet, children included.
        before: the GPUs right before the fleet started, when nothing on them can have been the fleet's.
        exists: true for a pid in this (container's) process table.
    """
    if wanted is not None and not wanted:
        return GpuProof(status=NONE, reason="no engine of the fleet uses a GPU")
    if not inventory.gpus:
        return GpuProof(status=NONE, reason=inventory.reason or "no GPU")
    chosen = [gpu for gpu in inventory.gpus if wanted is None or gpu.index in wanted]
    pids = {process.pid for gpu in chosen for process in gpu.processes or ()}
    covered = bool(pids & set(own_pids))
    foreign: list[str] = []
    unknown: list[str] = []
    for gpu in chosen:
        there, unsure = _judge_one(gpu, own_pids, covered, exists)
        foreign += there
        unknown += unsure
    indices = {gpu.index for gpu in chosen}
    foreign += [
        f"GPU {gpu.index}: {_gb(gpu.memory_used_bytes)} were in use before the fleet started"
        for gpu in (before.gpus if before else ())
        if gpu.index in indices and gpu.memory_used_bytes >= IDLE_BYTES
    ]
    status, reason = OK, "NVML sees no process on these GPUs but the fleet's"
    if foreign:
        status, reason = FOREIGN, "; ".join(foreign)
    elif unknown:
        idle = "; they were idle before the fleet started" if before and before.gpus else ""
        status, reason = UNKNOWN, "; ".join(unknown) + idle
    return GpuProof(status=status, reason=reason, gpus=sorted(indices), foreign=foreign)


def _judge_one(
    gpu: Gpu, own_pids: Collection[int], covered: bool, exists: Callable[[int], bool]
) -> tuple[list[str], list[str]]:
    """Facts against one GPU, and facts that cannot be determined. ``covered``: NVML lists some pid of the fleet."""
    if gpu.processes is None:
        return [], [f"GPU {gpu.index}: NVML does not list its processes"]
    others = [process for process in gpu.processes if process.pid not in own_pids]
    if covered:
        foreign = [f"GPU {gpu.index}: {_described(one)} is not of this fleet" for one in others if exists(one.pid)]
        unknown = [
            f"GPU {gpu.index}: {_described(one)} is not in this machine's process table"
            for one in others
            if not exists(one.pid)
        ]
        return foreign, unknown
    if gpu.memory_used_bytes < IDLE_BYTES and not others:
        return [], []
    return [], [
        f"GPU {gpu.index}: {_gb(gpu.memory_used_bytes)} in use, but NVML lists no process of the fleet there, as it "
        "does in a container without the host's process ids"
    ]


def fleet_gpus(
    engines: Sequence[ProcessState],
    inventory: GpuInventory,
    environment: Callable[[int], Mapping[str, str]] | None = None,
) -> set[int] | None:
    """Indices of the GPUs the engines may use, from what each received as CUDA_VISIBLE_DEVICES; None: any of them.

    Args:
        engines: the fleet's engines; simulated ones use none.
        inventory: the machine's GPUs.
        environment: reads a process's environment; default: from the operating system.
    """
    read = environment or _environment
    indices: set[int] = set()
    for engine in engines:
        if engine.kind == "sim":
            continue
        visible = read(engine.pid).get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return None
        for entry in filter(None, (part.strip() for part in visible.split(","))):
            if entry.lstrip("-").isdigit():
                if int(entry) < 0:  # CUDA stops at the first invalid entry; -1 hides all that follow
                    break
                indices.add(int(entry))
            else:
                indices |= {gpu.index for gpu in inventory.gpus if gpu.uuid.startswith(entry)}
    return indices


def process_tree(pids: Collection[int]) -> set[int]:
    """The processes and all their descendants."""
    found = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            found |= {pid, *(child.pid for child in process.children(recursive=True))}
        except psutil.Error:
            continue
    return found


async def idle_inventory(limit_s: float) -> GpuInventory:
    """The GPUs once they are idle, or as they are after ``limit_s``: drivers free a dead process's memory late."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        inventory = await asyncio.to_thread(read_inventory)
        if all(gpu.memory_used_bytes < IDLE_BYTES for gpu in inventory.gpus) or loop.time() > deadline:
            return inventory
        await asyncio.sleep(_SETTLE_POLL_S)


def _environment(pid: int) -> Mapping[str, str]:
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}


def _described(process: GpuProcess) -> str:
    memory = f", {_gb(process.memory_bytes)}" if process.memory_bytes is not None else ""
    return f"process {process.pid} ({process.name or 'unnamed'}{memory})"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
