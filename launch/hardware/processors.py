"""Processor use sampled during a run, to detect an overloaded machine.

Simulated engines answer at the times of their profile. When the processors are full they answer later, and
every figure of the run measures this machine instead of the policy.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

import msgspec
import psutil

from replayer.records.validity import INVALID_FIGURES

_SAMPLE_S = 0.25
FULL = 0.95
"""From this share of all processors on, a sample counts as full."""
SATURATED_SHARE = 0.1
"""The figures of a run with more full samples than this are invalid."""


class ProcessorUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of all processors together, as shares from 0 to 1."""

    samples: int
    mean: float
    maximum: float
    full_share: float
    """Share of samples at or above `FULL`."""
    own: float
    """Mean use by this process and its children (engines and proxy), as a share of all processors."""

    @property
    def warning(self) -> str | None:
        """Reason why the run's figures are invalid; None when they are valid."""
        if self.full_share <= SATURATED_SHARE:
            return None
        remedy = (
            "lower the clock scale or the load"
            if self.own > self.mean / 2
            else "stop the other processes on this machine"
        )
        return (
            f"the processors were full in {self.full_share:.0%} of the samples (mean use {self.mean:.0%}, of it "
            f"{self.own:.0%} by this run): engines answered later than simulated, so {INVALID_FIGURES}; "
            f"{remedy} and run again"
        )


class ProcessorSampler:
    """Asynchronous context manager that samples until it is left; then `use` has the result."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._began_s = self._own_before_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def use(self) -> ProcessorUse:
        """The samples so far; read it while the children still run, or their time is lost."""
        wall_s = time.monotonic() - self._began_s
        own_s = _own_seconds() - self._own_before_s
        return summarise_samples(self._samples, own_s / (wall_s * (psutil.cpu_count() or 1)) if wall_s > 0 else 0.0)

    async def __aenter__(self) -> Self:
        psutil.cpu_percent(interval=None)  # the first call only sets the starting point
        self._began_s, self._own_before_s = time.monotonic(), _own_seconds()
        self._task = asyncio.create_task(self._sample(), name="processor-samples")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            self._samples.append(psutil.cpu_percent(interval=None) / 100)


def _own_seconds() -> float:
    """Processor seconds of this process and its living children."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def summarise_samples(samples: list[float], own: float = 0.0) -> ProcessorUse:
    """Mean, maximum and share of full samples; zeros when there is none."""
    count = len(samples)
    return ProcessorUse(
        samples=count,
        mean=sum(samples) / count if count else 0.0,
        maximum=max(samples, default=0.0),
        full_share=sum(sample >= FULL for sample in samples) / count if count else 0.0,
        own=own,
    )
