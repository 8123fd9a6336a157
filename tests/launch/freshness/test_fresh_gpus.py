"""Processes on the fleet's GPUs: foreign ones are named, and undetermined ones are unknown, never ok."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import pytest

from launch.freshness.gpus import FOREIGN, NONE, OK, UNKNOWN, fleet_gpus, judge_gpus, process_tree
from launch.hardware.gpus import Gpu, GpuInventory, GpuProcess
from launch.run.state import ProcessState

GB = 10**9
OWN = {100, 101}


def gpu(index: int, used_gb: float, *pids: int, listed: bool = True) -> Gpu:
    processes = [GpuProcess(pid=pid, name=f"p{pid}", memory_bytes=GB) for pid in pids]
    return Gpu(
        index=index,
        uuid=f"GPU-{index}{index}",
        name="H200",
        memory_total_bytes=141 * GB,
        memory_used_bytes=int(used_gb * GB),
        processes=processes if listed else None,
    )


def inventory(*gpus: Gpu) -> GpuInventory:
    return GpuInventory(gpus=list(gpus), reason=None if gpus else "no NVIDIA driver")


def exists(pid: int) -> bool:
    return pid < 1000


@pytest.mark.parametrize(
    ("gpus", "wanted", "status", "words"),
    [
        ([gpu(0, 120, 101)], {0}, OK, "but the fleet's"),
        ([gpu(0, 120, 101), gpu(1, 0.6)], {0, 1}, OK, "but the fleet's"),
        ([gpu(0, 0.6)], None, OK, "but the fleet's"),  # idle: no process can be there
        ([gpu(0, 120, 101), gpu(1, 50, 700)], {0}, OK, "but the fleet's"),  # the other's GPU is not ours
        ([gpu(0, 120, 101, 700)], {0}, FOREIGN, "GPU 0: process 700 (p700, 1.0 GB) is not of this fleet"),
        ([gpu(0, 120, 101), gpu(1, 50, 700)], None, FOREIGN, "GPU 1: process 700"),
        ([gpu(0, 120, 101, 5000)], {0}, UNKNOWN, "is not in this machine's process table"),
        ([gpu(0, 120)], {0}, UNKNOWN, "NVML lists no process of the fleet"),
        ([gpu(0, 120, 5000)], {0}, UNKNOWN, "in a container"),
        ([gpu(0, 120, 700)], {0}, UNKNOWN, "in a container"),  # the host's 700 need not be this 700
        ([gpu(0, 120, listed=False)], {0}, UNKNOWN, "does not list its processes"),
        ([gpu(0, 120, 700)], set(), NONE, "no engine of the fleet uses a GPU"),
        ([], None, NONE, "no NVIDIA driver"),
    ],
)
def test_verdicts(gpus: list[Gpu], wanted: set[int] | None, status: str, words: str) -> None:
    proof = judge_gpus(inventory(*gpus), wanted, OWN, exists=exists)
    assert (proof.status, words in proof.reason) == (status, True), proof
    assert bool(proof.foreign) == (status == FOREIGN)


def test_memory_in_use_before_the_start_is_foreign_even_where_pids_cannot_be_reported() -> None:
    after = inventory(gpu(0, 120), gpu(1, 120))
    used = judge_gpus(after, {0}, OWN, inventory(gpu(0, 30), gpu(1, 0.6)), exists)
    assert (used.status, used.foreign) == (FOREIGN, ["GPU 0: 30.0 GB were in use before the fleet started"])
    idle = judge_gpus(after, {0}, OWN, inventory(gpu(0, 0.6), gpu(1, 30)), exists)
    assert idle.status == UNKNOWN
    assert idle.reason.endswith("they were idle before the fleet started")


def engine(name: str, kind: str, pid: int) -> ProcessState:
    return ProcessState(name=name, kind=kind, pid=pid, created_unix_s=0, url="", log="")


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (["0", "1"], {0, 1}),
        (["0,1", "3"], {0, 1, 3}),
        (["GPU-11", "0"], {0, 1}),
        (["", "-1"], set()),
        (["0,-1,1"], {0}),
        (["0", None], None),
    ],
)
def test_the_fleets_gpus_are_what_its_engines_received(visible: list[str | None], found: set[int] | None) -> None:
    engines = [engine("sim", "sim", 1), *(engine(f"e{n}", "vllm", 10 + n) for n in range(len(visible)))]

    def environment(pid: int) -> Mapping[str, str]:
        value = visible[pid - 10]
        return {} if value is None else {"CUDA_VISIBLE_DEVICES": value}

    machine = inventory(*(gpu(index, 0) for index in range(4)))
    assert fleet_gpus(engines, machine, environment) == found


async def test_a_process_tree_has_the_children_and_the_dead_are_left_out() -> None:
    child = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        assert {os.getpid(), child.pid} <= process_tree([os.getpid(), 2**22 + 1])
    finally:
        child.kill()
        await child.wait()
    assert process_tree([2**22 + 1]) == set()
