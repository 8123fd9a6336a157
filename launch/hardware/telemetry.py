"""GPU telemetry while something runs: one CSV row for each GPU and sample, and the latest sample for Prometheus.

`TelemetrySampler` owns its NVML connection, its file and its one worker thread; leaving it ends all three. NVML's PCIe
counters block for 20 ms each, so reading happens in the thread, never in the event loop.
"""

from __future__ import annotations

import asyncio
import csv
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from launch.hardware.gpus import GpuProcess, Handle, Nvml, NvmlLibrary, NvmlUnavailable, or_none

TELEMETRY_FILE = "telemetry.csv"
_ALL_LINKS = 0xFFFFFFFF
"""NVML's scope for a field: the sum over all NVLinks of the GPU."""
_KIB = 1024
_KB = 1000


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment, with None where GPU or driver gives no value; the fields are the CSV's columns."""

    unix_s: float
    gpu: int
    uuid: str
    utilisation_percent: int | None
    """Share of the last moments in which a kernel ran."""
    memory_used_bytes: int | None
    sm_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    pcie_tx_bytes_per_s: int | None
    """Over 20 ms."""
    pcie_rx_bytes_per_s: int | None
    nvlink_tx_bytes: int | None
    """Counter of data sent over all NVLinks since the driver was loaded; subtract two samples for a rate."""
    nvlink_rx_bytes: int | None
    processes: list[GpuProcess] | None
    """In the CSV ``pid:bytes`` separated by spaces."""

    def row(self) -> list[str]:
        """The values as the CSV has them: empty for None."""
        cells = []
        for name in COLUMNS:
            value = getattr(self, name)
            if name == "processes":
                value = " ".join(f"{one.pid}:{one.memory_bytes or ''}" for one in value or ())
            cells.append("" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value))
        return cells


COLUMNS = GpuSample.__struct_fields__


def read_samples(nvml: Nvml, uuids: list[str]) -> list[GpuSample]:
    """All GPUs now, one after the other; takes some 40 ms for each (PCIe counters)."""
    return [_sample(nvml, index, handle, uuids[index]) for index, handle in enumerate(nvml.handles)]


def _sample(nvml: Nvml, index: int, handle: Handle, uuid: str) -> GpuSample:
    import pynvml

    library = nvml.library
    use = or_none(lambda: library.nvmlDeviceGetUtilizationRates(handle))
    memory = or_none(lambda: library.nvmlDeviceGetMemoryInfo(handle))
    power_mw = or_none(lambda: library.nvmlDeviceGetPowerUsage(handle))
    tx_kb_s = or_none(lambda: library.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES))
    rx_kb_s = or_none(lambda: library.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES))
    nvlink_tx, nvlink_rx = _nvlink_bytes(library, handle)
    return GpuSample(
        unix_s=time.time(),
        gpu=index,
        uuid=uuid,
        utilisation_percent=use.gpu if use else None,
        memory_used_bytes=memory.used if memory else None,
        sm_clock_mhz=or_none(lambda: library.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        power_w=power_mw / 1000 if power_mw is not None else None,
        temperature_c=or_none(lambda: library.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        pcie_tx_bytes_per_s=tx_kb_s * _KB if tx_kb_s is not None else None,
        pcie_rx_bytes_per_s=rx_kb_s * _KB if rx_kb_s is not None else None,
        nvlink_tx_bytes=nvlink_tx,
        nvlink_rx_bytes=nvlink_rx,
        processes=nvml.processes(handle),
    )


def _nvlink_bytes(library: NvmlLibrary, handle: Handle) -> tuple[int | None, int | None]:
    """Data sent and received over all NVLinks; None where the GPU has none or its driver does not count."""
    import pynvml

    wanted = [
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
    ]
    values = or_none(lambda: library.nvmlDeviceGetFieldValues(handle, wanted))
    if values is None:
        return None, None
    sent, received = (
        int(value.value.ullVal) * _KIB if value.nvmlReturn == pynvml.NVML_SUCCESS else None for value in values
    )
    return sent, received


class TelemetrySampler:
    """Asynchronous context manager that samples every GPU until it is left.

    Each sample is flushed to the file at once, so a run that dies keeps its samples. Without a GPU nothing is written
    and `problem` has the reason; nothing is raised, because a run on simulated or CPU engines has no GPU. A sample or a
    write that fails stops the sampling and sets `problem`.

    Args:
        path: the CSV file, replaced when it exists; None keeps the samples for `latest` and Prometheus only.
        interval_s: time between the starts of two samples.
        library: an object with NVML's functions; default: ``pynvml``.
        on_sample: called after each sample, in the event loop.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        interval_s: float = 1.0,
        library: NvmlLibrary | None = None,
        on_sample: Callable[[list[GpuSample]], None] = lambda samples: None,
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s must be above 0, not {interval_s:g}")
        self.path = path
        self.interval_s = interval_s
        self.latest: list[GpuSample] = []
        self.samples = 0
        """Moments sampled so far."""
        self.problem: str | None = None
        """Reason why sampling did not start or has stopped; None while it works."""
        self._nvml = Nvml(library)
        self._on_sample = on_sample
        self._stop = asyncio.Event()
        self._open = False
        self._uuids: list[str] = []
        self._file: IO[str] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """True while samples are being taken."""
        return self._task is not None and not self._task.done()

    async def __aenter__(self) -> Self:
        try:
            self._nvml.__enter__()
        except NvmlUnavailable as error:
            self.problem = str(error)
            return self
        self._open = True
        try:
            if not self._nvml.handles:
                self.problem = "the NVIDIA driver is there but has no GPU"
                return self
            self._start()
        except OSError as error:
            self.problem = f"{self.path} cannot be written ({error.strerror})"
        finally:
            if self._task is None:
                self._close()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        try:
            if self._task is not None:
                await self._task  # ends after the sample in progress
        finally:
            self._close()

    async def finished(self) -> None:
        """Wait until sampling ends: never, unless it fails or there is nothing to sample."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def _start(self) -> None:
        library = self._nvml.library
        self._uuids = [
            or_none(lambda handle=handle: library.nvmlDeviceGetUUID(handle)) or ""  # type: ignore[misc]
            for handle in self._nvml.handles
        ]
        if self.path is not None:
            self._file = self.path.open("w", newline="", encoding="utf-8")
            csv.writer(self._file).writerow(COLUMNS)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpu-telemetry")
        self._task = asyncio.create_task(self._sample(), name="gpu-telemetry")

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._stop.is_set():
            try:
                self.latest = await loop.run_in_executor(self._thread, self._read_and_write)
            except OSError as error:
                self.problem = f"{self.path} cannot be written ({error.strerror}); sampling stopped"
                return
            self.samples += 1
            self._on_sample(self.latest)
            # A sample that took longer than the interval delays the next; missed ones are not made up for.
            due = max(due + self.interval_s, loop.time())
            try:
                async with asyncio.timeout_at(due):
                    await self._stop.wait()
            except TimeoutError:
                continue

    def _read_and_write(self) -> list[GpuSample]:
        samples = read_samples(self._nvml, self._uuids)
        if self._file is not None:
            csv.writer(self._file).writerows(sample.row() for sample in samples)
            self._file.flush()
        return samples

    def _close(self) -> None:
        """Release everything; the thread first, since it uses the rest."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self.problem = f"{self.path} cannot be written ({error.strerror})"
        finally:
            self._file = None
            if self._open:
                self._nvml.__exit__(None, None, None)
                self._open = False


_GAUGES: tuple[tuple[str, str, Callable[[GpuSample], Any]], ...] = (
    (
        "utilisation_ratio",
        "Share of the last moments in which a kernel ran",
        lambda s: _scaled(s.utilisation_percent, 0.01),
    ),
    ("memory_used_bytes", "GPU memory in use, the driver's own included", lambda s: s.memory_used_bytes),
    ("sm_clock_hertz", "Clock of the streaming multiprocessors", lambda s: _scaled(s.sm_clock_mhz, 1e6)),
    ("power_watts", "Power drawn", lambda s: s.power_w),
    ("temperature_celsius", "Temperature of the GPU", lambda s: s.temperature_c),
    ("pcie_tx_bytes_per_second", "PCIe traffic sent, over 20 ms", lambda s: s.pcie_tx_bytes_per_s),
    ("pcie_rx_bytes_per_second", "PCIe traffic received, over 20 ms", lambda s: s.pcie_rx_bytes_per_s),
    ("processes", "Processes computing on the GPU", lambda s: None if s.processes is None else len(s.processes)),
)
_COUNTERS: tuple[tuple[str, str, Callable[[GpuSample], Any]], ...] = (
    ("nvlink_tx_bytes", "Data sent over all NVLinks since the driver was loaded", lambda s: s.nvlink_tx_bytes),
    ("nvlink_rx_bytes", "Data received over all NVLinks since the driver was loaded", lambda s: s.nvlink_rx_bytes),
)


class TelemetryCollector(Collector):
    """The sampler's latest sample as ``warmroute_gpu_...`` metrics, labelled by index and UUID."""

    def __init__(self, sampler: TelemetrySampler) -> None:
        self._sampler = sampler

    def collect(self) -> Iterator[Metric]:
        """Metrics of the latest sample; a missing value has no series."""
        samples = self._sampler.latest
        for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, what, read in metrics:
                family = kind(f"warmroute_gpu_{name}", what, labels=["gpu", "uuid"])
                for sample in samples:
                    if (value := read(sample)) is not None:
                        family.add_metric([str(sample.gpu), sample.uuid], value)
                yield family


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
