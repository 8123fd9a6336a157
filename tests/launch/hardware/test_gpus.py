"""The GPU inventory reports NVML's values, and the reason where there are none."""

from __future__ import annotations

import os
import sys

import psutil
import pynvml
import pytest

from launch.hardware.gpus import Nvml, NvmlUnavailable, read_inventory
from tests.launch.fake_nvml import GIB, FakeGpu, FakeNvml


def test_this_machine_answers_without_raising() -> None:
    inventory = read_inventory()
    assert (inventory.reason is None) == bool(inventory.gpus)


def test_two_gpus_with_their_users_and_peers() -> None:
    library = FakeNvml(
        FakeGpu(uuid="GPU-a", processes=[(os.getpid(), 3 * GIB), (999_999_999, None)], memory_used=4 * GIB),
        FakeGpu(uuid="GPU-b", nvlinks=[1] * 17 + [0], numa_node=1),
    )
    inventory = read_inventory(library)
    assert library.opened == 0
    assert inventory.reason is None
    assert (inventory.driver_version, inventory.cuda_driver_version) == ("580.95.05", (13, 0))
    first, second = inventory.gpus
    assert (first.uuid, first.name, first.memory_used_bytes) == ("GPU-a", "NVIDIA H200", 4 * GIB)
    assert (first.nvlinks_up, second.nvlinks_up) == (18, 17)
    assert first.processes is not None
    known, unknown = first.processes
    assert (known.name, known.memory_bytes) == (psutil.Process().name(), 3 * GIB)
    assert (unknown.pid, unknown.name, unknown.memory_bytes) == (999_999_999, "", None)
    (peer,) = first.peers
    assert (peer.gpu, peer.path, peer.nvlink, peer.peer_read) == (1, "system (between NUMA nodes)", True, True)


def test_the_kinds_of_gpus_are_counted() -> None:
    library = FakeNvml(FakeGpu(uuid="a"), FakeGpu(uuid="b", name="NVIDIA H100 80GB HBM3"), FakeGpu(uuid="c"))
    assert read_inventory(library).kinds() == "2 x NVIDIA H200, 1 x NVIDIA H100 80GB HBM3"
    assert read_inventory(FakeNvml()).kinds() == ""


def test_what_a_gpu_does_not_report_is_none() -> None:
    library = FakeNvml(FakeGpu(nvlinks=None, numa_node=None, processes=None), FakeGpu(lost=True), p2p=5)
    first, lost = read_inventory(library).gpus
    assert (first.nvlinks_up, first.numa_node, first.processes) == (None, None, None)
    assert first.peers[0].nvlink is False
    assert (lost.memory_total_bytes, lost.processes) == (0, None)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "kernel module is not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "cannot be opened"),
    ],
)
def test_without_a_driver_the_inventory_has_a_reason(code: int, reason: str) -> None:
    inventory = read_inventory(FakeNvml(fails=code))
    assert inventory.gpus == []
    assert reason in (inventory.reason or "")


def test_a_driver_without_gpus_is_closed_again() -> None:
    library = FakeNvml()
    assert "no GPU" in (read_inventory(library).reason or "")
    assert library.opened == 0
    with pytest.raises(NvmlUnavailable), Nvml(FakeNvml(fails=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)):
        pass


def test_without_the_library_the_inventory_is_empty_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = read_inventory()
    assert (found.gpus, found.reason) == ([], "nvidia-ml-py is not installed: pip install 'warmroute[lab]'")
