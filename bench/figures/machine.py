"""Description of this machine, stored beside benchmark figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from replayer.records.version import installed_version


def machine() -> dict[str, str]:
    """Processor, cores and versions on this machine, as text by name."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "xxhash": version("xxhash"),
        "warmroute": installed_version(),
    }
