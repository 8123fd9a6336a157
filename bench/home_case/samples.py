"""The proxy's processes and queues over time, one sample a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import psutil

THINNED_S = 5.0
"""Between the samples that are kept."""


class ProxyUse(NamedTuple):
    """Resources of the proxy's processes, its workers included."""

    rss_bytes: int
    descriptors: int
    cpu_s: float
    """Processor time used so far."""


class ProxySample(msgspec.Struct, frozen=True):
    """The proxy at one moment; None where it did not answer."""

    at_s: float
    """Wall seconds since the start of sampling."""
    rss_bytes: int
    descriptors: int
    cpu_s: float
    held: float | None
    """Requests that admission holds."""
    queued: float | None
    in_flight: float | None


def use_of(pid: int) -> ProxyUse:
    """Use of a fleet's process now: of all below its guard (`launch.run.guard`), or its own where it has none.

    Raises:
        psutil.Error: it is gone.
    """
    leader = psutil.Process(pid)
    found = []
    for process in leader.children(recursive=True):
        with suppress(psutil.Error):
            found.append(_use(process))
    rss, descriptors, cpu_s = (sum(values) for values in zip(*(found or [_use(leader)]), strict=True))
    return ProxyUse(int(rss), int(descriptors), round(cpu_s, 3))


def _use(process: psutil.Process) -> ProxyUse:
    with process.oneshot():
        times = process.cpu_times()
        return ProxyUse(process.memory_info().rss, process.num_fds(), times.user + times.system)


class ProxySampler:
    """Asynchronous context manager that samples the proxy until it is left.

    Args:
        pid: of the proxy.
        gauges: reads held, queued and in-flight requests by the names of the fields; None: no answer.
        every_s: time between two samples.
    """

    def __init__(
        self, pid: int, gauges: Callable[[], Awaitable[Mapping[str, float] | None]], every_s: float = 1.0
    ) -> None:
        self._pid = pid
        self._gauges = gauges
        self._every_s = every_s
        self._started_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self.samples: list[ProxySample] = []
        self.problem = ""
        """Reason for which sampling ended early."""

    async def __aenter__(self) -> ProxySampler:
        self._task = asyncio.create_task(self._run(), name="proxy-samples")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        [ended] = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(ended, Exception):
            self.problem = f"sampling ended early: {type(ended).__name__}: {ended}"

    async def _run(self) -> None:
        due_s = time.monotonic()
        try:
            while True:
                await self.sample()
                due_s = max(due_s + self._every_s, time.monotonic())
                await asyncio.sleep(due_s - time.monotonic())
        except psutil.Error as error:
            self.problem = f"the proxy's process cannot be read: {error}"

    async def sample(self) -> None:
        """Take one sample. Raises psutil.Error when the proxy is gone."""
        at_s, use = round(time.monotonic() - self._started_s, 2), use_of(self._pid)
        found = await self._gauges() or {}
        self.samples.append(
            ProxySample(
                at_s, *use, held=found.get("held"), queued=found.get("queued"), in_flight=found.get("in_flight")
            )
        )


def thinned(samples: Sequence[ProxySample], every_s: float = THINNED_S) -> list[ProxySample]:
    """The first and last sample, and between them one in ``every_s`` seconds."""
    kept: list[ProxySample] = []
    for sample in samples:
        if not kept or sample.at_s >= kept[-1].at_s + every_s or sample is samples[-1]:
            kept.append(sample)
    return kept
