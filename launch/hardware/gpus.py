"""GPUs of this machine and their processes, read from NVML (the driver's own library, through ``pynvml``).

`Nvml` is opened once, read any number of times, and closed; it takes any object with NVML's function names, so a test
can stand in for the driver. Without a driver the inventory is empty and has a reason. A value that a GPU or driver does
not support is None, never a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import msgspec
import psutil

T = TypeVar("T")
Handle = Any
"""NVML's opaque device handle."""


class NvmlLibrary(Protocol):
    """The part of ``pynvml`` used here, by NVML's own names; every call may raise ``pynvml.NVMLError``."""

    def nvmlInit(self) -> Any: ...
    def nvmlShutdown(self) -> Any: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlSystemGetCudaDriverVersion(self) -> int: ...
    def nvmlSystemGetProcessName(self, pid: int) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle: ...
    def nvmlDeviceGetUUID(self, handle: Handle) -> str: ...
    def nvmlDeviceGetName(self, handle: Handle) -> str: ...
    def nvmlDeviceGetNumaNodeId(self, handle: Handle) -> int: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> list[Any]: ...
    def nvmlDeviceGetNvLinkState(self, handle: Handle, link: int) -> int: ...
    def nvmlDeviceGetTopologyCommonAncestor(self, first: Handle, second: Handle) -> int: ...
    def nvmlDeviceGetP2PStatus(self, first: Handle, second: Handle, index: int) -> int: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any: ...
    def nvmlDeviceGetClockInfo(self, handle: Handle, kind: int) -> int: ...
    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int: ...
    def nvmlDeviceGetPcieThroughput(self, handle: Handle, counter: int) -> int: ...
    def nvmlDeviceGetFieldValues(self, handle: Handle, fields: list[Any]) -> Any: ...


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process that computes on a GPU."""

    pid: int
    """As NVML reports it: in a container it may be the host's pid, which has no meaning inside."""
    name: str
    """Empty when neither the kernel nor NVML reports it."""
    memory_bytes: int | None


class GpuPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Path from one GPU to another of this machine."""

    gpu: int
    """Index of the other GPU."""
    path: str
    """Nearest common ancestor in the PCIe tree: same board, one switch, switches, host bridge, NUMA node, system."""
    nvlink: bool | None
    """True if peer-to-peer copies go over NVLink; None when the driver does not report it."""
    peer_read: bool | None
    """True if one GPU can read the other's memory at all."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    """Includes the driver's own share (some 0.6 GB on a data-centre GPU)."""
    numa_node: int | None = None
    nvlinks_up: int | None = None
    """Active NVLink lanes; None when the GPU has none or does not report them."""
    processes: list[GpuProcess] | None = None
    """None when NVML does not report it."""
    peers: list[GpuPeer] = []


class GpuInventory(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of the machine, or the reason why none could be read."""

    gpus: list[Gpu] = []
    reason: str | None = None
    """Reason for an empty inventory; None when NVML answered."""
    driver_version: str | None = None
    cuda_driver_version: tuple[int, int] | None = None
    """Newest CUDA the driver can run: major, minor."""

    def kinds(self) -> str:
        """Number and name of each kind, ``2 x NVIDIA H100 80GB HBM3``; empty without a GPU."""
        return ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in self.gpus).items())


class NvmlUnavailable(RuntimeError):
    """NVML cannot be used here; the message gives the reason."""


def pynvml_library() -> NvmlLibrary:
    """The ``pynvml`` module; importing it needs no driver."""
    import pynvml

    library: NvmlLibrary = pynvml
    return library


def or_none(read: Callable[[], T]) -> T | None:
    """The value, or None when this GPU, driver or permission does not give it."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


class Nvml:
    """An NVML session for reading; a context manager.

    Args:
        library: an object with NVML's functions; default: ``pynvml``.

    Raises:
        NvmlUnavailable: on entering, when there is no driver or it refuses.
    """

    def __init__(self, library: NvmlLibrary | None = None) -> None:
        self.library = library or pynvml_library()
        self.handles: list[Handle] = []

    def __enter__(self) -> Self:
        import pynvml

        try:
            self.library.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlUnavailable(_why_unavailable(error)) from error
        try:
            self.handles = [
                self.library.nvmlDeviceGetHandleByIndex(index) for index in range(self.library.nvmlDeviceGetCount())
            ]
        except pynvml.NVMLError as error:
            self._shut_down()
            raise NvmlUnavailable(f"the NVIDIA driver does not list its GPUs ({error})") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shut_down()

    def inventory(self) -> GpuInventory:
        """Everything about every GPU at this moment."""
        cuda = or_none(self.library.nvmlSystemGetCudaDriverVersion)
        return GpuInventory(
            gpus=[self._gpu(index) for index in range(len(self.handles))],
            reason=None if self.handles else "the NVIDIA driver is there but has no GPU",
            driver_version=or_none(self.library.nvmlSystemGetDriverVersion),
            cuda_driver_version=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
        )

    def processes(self, handle: Handle) -> list[GpuProcess] | None:
        """The processes that compute on a GPU; None when NVML does not list them."""
        found = or_none(lambda: self.library.nvmlDeviceGetComputeRunningProcesses(handle))
        if found is None:
            return None
        return [
            GpuProcess(pid=one.pid, name=self._process_name(one.pid), memory_bytes=one.usedGpuMemory) for one in found
        ]

    def _gpu(self, index: int) -> Gpu:
        library, handle = self.library, self.handles[index]
        memory = or_none(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        numa = or_none(lambda: library.nvmlDeviceGetNumaNodeId(handle))
        return Gpu(
            index=index,
            uuid=or_none(lambda: library.nvmlDeviceGetUUID(handle)) or "",
            name=or_none(lambda: library.nvmlDeviceGetName(handle)) or "unknown GPU",
            memory_total_bytes=memory.total if memory else 0,
            memory_used_bytes=memory.used if memory else 0,
            numa_node=numa,
            nvlinks_up=self._nvlinks_up(handle),
            processes=self.processes(handle),
            peers=[self._peer(handle, other) for other in range(len(self.handles)) if other != index],
        )

    def _nvlinks_up(self, handle: Handle) -> int | None:
        import pynvml

        states = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            state = or_none(lambda link=link: self.library.nvmlDeviceGetNvLinkState(handle, link))  # type: ignore[misc]
            if state is None:  # links are numbered from 0; the first missing one ends them
                break
            states.append(state)
        return sum(state == pynvml.NVML_FEATURE_ENABLED for state in states) if states else None

    def _peer(self, handle: Handle, other: int) -> GpuPeer:
        import pynvml

        library, far = self.library, self.handles[other]
        paths = {
            pynvml.NVML_TOPOLOGY_INTERNAL: "same board",
            pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
            pynvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
            pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "host bridge",
            pynvml.NVML_TOPOLOGY_NODE: "NUMA node",
            pynvml.NVML_TOPOLOGY_SYSTEM: "system (between NUMA nodes)",
        }
        level = or_none(lambda: library.nvmlDeviceGetTopologyCommonAncestor(handle, far))
        nvlink = or_none(lambda: library.nvmlDeviceGetP2PStatus(handle, far, pynvml.NVML_P2P_CAPS_INDEX_NVLINK))
        # pynvml's NVML_P2P_CAPS_INDEX_READ is the tuple (0,), because of a stray comma.
        read = or_none(lambda: library.nvmlDeviceGetP2PStatus(handle, far, 0))
        return GpuPeer(
            gpu=other,
            path="unknown" if level is None else paths.get(level, f"level {level}"),
            nvlink=None if nvlink is None else nvlink == pynvml.NVML_P2P_STATUS_OK,
            peer_read=None if read is None else read == pynvml.NVML_P2P_STATUS_OK,
        )

    def _process_name(self, pid: int) -> str:
        with suppress(psutil.Error, ValueError, OverflowError):
            return psutil.Process(pid).name()
        return or_none(lambda: self.library.nvmlSystemGetProcessName(pid)) or ""

    def _shut_down(self) -> None:
        or_none(self.library.nvmlShutdown)


def read_inventory(library: NvmlLibrary | None = None) -> GpuInventory:
    """The GPUs of this machine now; empty, with the reason, where there are none."""
    try:
        with Nvml(library) as nvml:
            return nvml.inventory()
    except NvmlUnavailable as error:
        return GpuInventory(reason=str(error))
    except ModuleNotFoundError:
        return GpuInventory(reason="nvidia-ml-py is not installed: pip install 'warmroute[lab]'")


def _why_unavailable(error: Exception) -> str:
    import pynvml

    code = getattr(error, "value", None)
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver: libnvidia-ml.so.1 is not installed"
    if code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed but its kernel module is not loaded"
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver's library and kernel module are of different versions: reboot, or reload the module"
    return f"NVML cannot be opened ({error})"
