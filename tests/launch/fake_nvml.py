"""A stand-in for the NVIDIA driver's library, with NVML's own function names and its real exceptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


@dataclass
class FakeGpu:
    """One GPU; None for values its driver does not support."""

    uuid: str = "GPU-0000"
    name: str = "NVIDIA H200"
    memory_used: int = 600 << 20
    memory_total: int = 141 * GIB
    processes: list[tuple[int, int | None]] | None = field(default_factory=list)
    nvlinks: list[int] | None = field(default_factory=lambda: [1] * 18)
    nvlink_kib: tuple[int, int] | None = (1000, 2000)
    numa_node: int | None = 0
    lost: bool = False


class FakeNvml:
    """NVML with the GPUs given; ``fails`` is raised by nvmlInit."""

    def __init__(self, *gpus: FakeGpu, fails: int | None = None, p2p: int = pynvml.NVML_P2P_STATUS_OK) -> None:
        self.gpus = list(gpus)
        self.fails = fails
        self.p2p = p2p
        self.opened = 0
        self.reads = 0

    def nvmlInit(self) -> None:
        if self.fails is not None:
            raise pynvml.NVMLError(self.fails)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        assert self.opened > 0, "closed twice"
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        assert self.opened, "NVML is not open"
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetNumaNodeId(self, gpu: FakeGpu) -> int:
        return self._reported(gpu, gpu.numa_node)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return self._reported(gpu, SimpleNamespace(total=gpu.memory_total, used=gpu.memory_used))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        found: list[tuple[int, int | None]] = self._reported(gpu, gpu.processes)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in found]

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        if gpu.nvlinks is None or link >= len(gpu.nvlinks):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return gpu.nvlinks[link]

    def nvmlDeviceGetTopologyCommonAncestor(self, first: FakeGpu, second: FakeGpu) -> int:
        return pynvml.NVML_TOPOLOGY_NODE if first.numa_node == second.numa_node else pynvml.NVML_TOPOLOGY_SYSTEM

    def nvmlDeviceGetP2PStatus(self, first: FakeGpu, second: FakeGpu, index: int) -> int:
        assert index in {0, pynvml.NVML_P2P_CAPS_INDEX_NVLINK}
        return self.p2p

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        self.reads += 1
        return self._reported(gpu, SimpleNamespace(gpu=87, memory=40))

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        return self._reported(gpu, 1980)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return self._reported(gpu, 512_250)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return self._reported(gpu, 61)

    def nvmlDeviceGetPcieThroughput(self, gpu: FakeGpu, counter: int) -> int:
        return self._reported(gpu, 3000 + counter)

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[Any]) -> Any:
        reported = gpu.nvlink_kib
        code = pynvml.NVML_SUCCESS if reported is not None else pynvml.NVML_ERROR_NOT_SUPPORTED
        values = dict(zip((138, 139), reported or (0, 0), strict=True))
        return [
            SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(ullVal=values[number])) for number, _scope in fields
        ]

    @staticmethod
    def _reported(gpu: FakeGpu, value: Any) -> Any:
        if gpu.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value
