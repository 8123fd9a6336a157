"""Conditions of an experiment: versions, commit, hardware, clocks, and load of the machine.

Unknown values are None, never a guess.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from launch.doctor.facts import EnginePython
from launch.doctor.probes.python import ask_python
from launch.engines.vllm import resolve_python
from launch.fleet.file import FleetFile
from launch.hardware.gpus import GpuInventory, read_inventory
from replayer.records.json_errors import BAD_JSON
from replayer.records.version import installed_version

ENVIRONMENT_FILE = "environment.json"
_PROJECT = Path(__file__).resolve().parents[3]
_FOLDERS = ("policies", "proxy", "launch", "replayer", "sim")
"""Packages whose versions are recorded."""
_GIT_S = 20.0
_CLOCKSOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_PREFIXES = (
    "WARMROUTE_",
    "VLLM_",
    "CUDA_",
    "NCCL_",
    "MC_",
    "OMP_",
    "MKL_",
    "PYTORCH_",
    "UCX_",
    "FI_",
    "PYTHONHASHSEED",
)
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS", re.IGNORECASE)
_LOAD_SAMPLE_S = 0.2


class GitState(msgspec.Struct, frozen=True, kw_only=True):
    """The checkout this code runs from."""

    root: str
    commit: str
    dirty: bool
    """True if tracked files differ from the commit."""


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that can change between two runs of one experiment."""

    warmroute: str
    """Version of the installed package; empty when run from bare sources."""
    python: str
    executable: str
    sources_sha256: str
    """Digest of every source file of this project, which also covers uncommitted edits."""
    git: GitState | None
    """None where the code is not in a checkout, or git is not available."""
    packages: dict[str, str]
    """Distribution -> version, of this Python."""
    engines: list[EnginePython]
    """The Pythons of vLLM engines; empty with simulated ones."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The machine."""

    hostname: str
    cpu: str | None
    cores: int | None
    """Physical."""
    processors: int | None
    """Logical."""
    usable_processors: int | None
    """Processors that this process may run on."""
    memory_bytes: int
    governor: str | None
    """CPU frequency governor."""
    gpus: GpuInventory
    """With the driver's version."""


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks that times were read from."""

    source: str | None
    """The kernel's."""
    perf_counter: str
    perf_counter_resolution_s: float
    time_resolution_s: float


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """All recorded conditions, once per experiment."""

    captured_unix_s: float
    software: Software
    hardware: Hardware
    clocks: Clocks
    system: str
    kernel: str
    variables: dict[str, str]
    """Environment variables that engines and libraries read; values of those named like secrets are left out."""
    files: dict[str, str]
    """SHA-256 of each input of the experiment, by kind."""
    command: list[str]
    schema: int = 1


class HostLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the machine right before a run."""

    measured_unix_s: float
    load_1m: float | None
    """Load average: runnable processes, mean over a minute."""
    cpu_share: float
    """Use of all processors over 0.2 s, from 0 to 1."""
    memory_available_bytes: int
    swap_used_bytes: int
    gpu_memory_used_bytes: list[int]
    """By GPU index."""
    processors: int

    @property
    def warning(self) -> str | None:
        """Reason why a run that starts now may be disturbed; None without one."""
        if self.cpu_share < 0.5:
            return None
        return (
            f"{self.cpu_share:.0%} of the processors were in use before the run started (load {self.load_1m or 0:.1f} "
            f"on {self.processors} processors): another process is using this machine"
        )


def capture(files: Mapping[str, str], fleets: Iterable[FleetFile], command: list[str]) -> Environment:
    """The environment now.

    Args:
        files: SHA-256 of the experiment's inputs, by kind.
        fleets: the arms' fleets; the packages of vLLM engines' Pythons are listed.
        command: the command line that runs the experiment.
    """
    perf = time.get_clock_info("perf_counter")
    return Environment(
        captured_unix_s=time.time(),
        software=software(fleets),
        hardware=_hardware(),
        clocks=Clocks(
            source=_first_line(_CLOCKSOURCE),
            perf_counter=perf.implementation,
            perf_counter_resolution_s=perf.resolution,
            time_resolution_s=time.get_clock_info("time").resolution,
        ),
        system=_system(),
        kernel=f"{platform.system()} {platform.release()}",
        variables=_variables(os.environ),
        files=dict(files),
        command=command,
    )


def unreadable(path: Path) -> str:
    """Reason why a file is no record of an environment, of whatever version; empty for one that is.

    Raises:
        OSError: it cannot be read.
    """
    try:
        msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except BAD_JSON as error:
        return f"not a JSON object ({error})"
    return ""


def software(fleets: Iterable[FleetFile]) -> Software:
    """Versions and commit now."""
    return Software(
        warmroute=installed_version(),
        python=platform.python_version(),
        executable=sys.executable,
        sources_sha256=sources_sha256(),
        git=git_state(_PROJECT),
        packages=_packages(),
        engines=[ask_python(python) for python in sorted(engine_pythons(fleets))],
    )


def sources_sha256() -> str:
    """One digest of this project's Python files, their names included."""
    digest = hashlib.sha256()
    paths = [*sorted(_PROJECT.glob("warmroute*.py"))]
    paths += [path for folder in _FOLDERS for path in sorted((_PROJECT / folder).rglob("*.py"))]
    for path in paths:
        digest.update(f"{path.relative_to(_PROJECT).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def engine_pythons(fleets: Iterable[FleetFile]) -> set[str]:
    """The Pythons that vLLM engines run with."""
    return {resolve_python(member.vllm.python) for fleet in fleets if fleet.kind == "vllm" for member in fleet.members}


def engines_of(now: Software, fleets: Iterable[FleetFile]) -> list[EnginePython]:
    """The Pythons of some of the fleets."""
    wanted = engine_pythons(fleets)
    return [engine for engine in now.engines if engine.executable in wanted]


def git_state(folder: Path) -> GitState | None:
    """Commit of the checkout that holds a folder; None without one.

    A package installed somewhere below another project's checkout is not that project: the folder must be the root.
    """
    root = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "HEAD")
    if root is None or commit is None or Path(root).resolve() != folder.resolve():
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if changes is None else GitState(root=root, commit=commit, dirty=bool(changes))


def host_load() -> HostLoad:
    """Current load of the machine; takes a fifth of a second."""
    share = psutil.cpu_percent(interval=_LOAD_SAMPLE_S) / 100
    try:
        load_1m: float | None = os.getloadavg()[0]
    except OSError:
        load_1m = None
    return HostLoad(
        measured_unix_s=time.time(),
        load_1m=load_1m,
        cpu_share=share,
        memory_available_bytes=psutil.virtual_memory().available,
        swap_used_bytes=psutil.swap_memory().used,
        gpu_memory_used_bytes=[gpu.memory_used_bytes for gpu in read_inventory().gpus],
        processors=psutil.cpu_count() or 1,
    )


def differences(before: Software, now: Software) -> list[str]:
    """Changes between two runs, one sentence each; empty without changes."""
    changes = []
    flat_before, flat_now = _flat(msgspec.to_builtins(before)), _flat(msgspec.to_builtins(now))
    for key in sorted(flat_before.keys() | flat_now.keys()):
        old, new = flat_before.get(key), flat_now.get(key)
        if old != new:
            changes.append(f"{key}: {_shown(old)}, now {_shown(new)}")
    return changes


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, list) and any(isinstance(value, dict) for value in values):
        values = dict(enumerate(values))
    if isinstance(values, dict):
        pairs = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in values.items()]
        return {key: leaf for name, value in pairs for key, leaf in _flat(value, name).items()}
    return {prefix: values}


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    return value[:12] if isinstance(value, str) and _DIGEST.fullmatch(value) else str(value)


def _packages() -> dict[str, str]:
    found = {}
    for one in importlib.metadata.distributions():
        name = one.metadata["Name"]
        if name:
            found[str(name).lower()] = one.version
    return dict(sorted(found.items()))


def _hardware() -> Hardware:
    try:
        usable: int | None = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        usable = None
    return Hardware(
        hostname=platform.node(),
        cpu=_cpu_model(),
        cores=psutil.cpu_count(logical=False),
        processors=psutil.cpu_count(),
        usable_processors=usable,
        memory_bytes=psutil.virtual_memory().total,
        governor=_first_line(_GOVERNOR),
        gpus=read_inventory(),
    )


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    for line in lines:
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip() or None
    return platform.processor() or platform.machine() or None


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.platform())
    except OSError:
        return platform.platform()


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "(not recorded)" if _SECRET.search(name) else value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES)
    }


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            # Reading must not write: a refreshed index could collide with a concurrent commit.
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
