"""Memory, file descriptors and threads of the proxy over time, and their growth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import psutil


class ProcessSample(msgspec.Struct, frozen=True):
    """The proxy's process at one moment."""

    at_s: float
    """Since the start of the run."""
    rss_mb: float
    descriptors: int
    threads: int
    cpu_s: float
    """Processor time used so far."""


class Trend(msgspec.Struct, frozen=True):
    """Theil-Sen slope of a quantity: the median of the slopes between all pairs of samples."""

    first: float
    last: float
    per_hour: float
    over_window: float
    """The slope times the window."""


class Sampler:
    """Samples one process until cancelled."""

    def __init__(self, process: psutil.Process, every_s: float = 1.0) -> None:
        self._process = process
        self._every_s = every_s
        self._started_s = time.monotonic()
        self.samples: list[ProcessSample] = []

    async def run(self) -> None:
        """Sample until cancelled, or until the process ends."""
        while self._process.is_running():
            self.samples.append(self.now())
            await asyncio.sleep(self._every_s)

    def now(self) -> ProcessSample:
        """One sample. Raises psutil.Error when the process is gone."""
        with self._process.oneshot():
            times = self._process.cpu_times()
            return ProcessSample(
                round(time.monotonic() - self._started_s, 2),
                round(self._process.memory_info().rss / 2**20, 2),
                self._process.num_fds(),
                self._process.num_threads(),
                round(times.user + times.system, 2),
            )


def trend(at_s: Sequence[float], values: Sequence[float]) -> Trend:
    """Slope of ``values`` over ``at_s``; 0 for fewer than three samples."""
    if len(values) < 3:
        return Trend(values[0] if values else 0.0, values[-1] if values else 0.0, 0.0, 0.0)
    from scipy import stats  # takes most of a second to import

    slope = float(stats.theilslopes(values, at_s).slope)
    window_s = at_s[-1] - at_s[0]
    return Trend(values[0], values[-1], round(slope * 3600, 3), round(slope * window_s, 3))
