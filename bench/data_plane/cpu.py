"""CPU seconds and resident memory of a process and its children."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def tree(pid: int) -> list[int]:
    """The process and all its descendants. Raises ``psutil.NoSuchProcess``."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def cpu_s(pids: Iterable[int]) -> float:
    """User and system seconds of these processes, their ended threads included, since they started.

    On Linux from each process's CPU clock, in nanoseconds (``clock_getcpuclockid(3)``; the id of a process clock is
    ``~pid << 3 | 2``); if that is not available from psutil, in scheduler ticks of about 10 ms.
    """
    return sum(_one(pid) for pid in pids)


def _one(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except (OSError, OverflowError):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


def rss_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes together; pages they share count once for each."""
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)
