"""Gather the facts of this machine. Read-only; the checks judge them.

Unreadable values stay None. Every external command has a time limit.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from launch.doctor import facts
from launch.doctor.probe_clocks import ask_clocks
from launch.doctor.probe_conditions import ask_proxy
from launch.doctor.probe_python import ask_python
from launch.engines.commands import KINDS, ProcessSpec, engine_specs
from launch.engines.vllm import resolve_python
from launch.fleet.file import FleetFile, ports_in_use
from launch.hardware.gpus import NvmlLibrary, read_inventory
from policies.types import Role

_COMMAND_S = 10.0
_LIBRARIES = ("libibverbs.so.1", "libnuma.so.1", "libtcmalloc_minimal.so.4")
_STA_UNSYNC = 0x40
_TIMEX_BYTES = 512
"""Larger than any C library's struct timex."""
_DEFAULT_PYTHON = ".venv-engines/bin/python"
_INFINIBAND = Path("/sys/class/infiniband")
_EFA_FI_INFO = "/opt/amazon/efa/bin/fi_info"


def gather(
    fleet: FleetFile | None = None,
    *,
    source: str = "",
    engine_python: str | None = None,
    library: NvmlLibrary | None = None,
    environment: Mapping[str, str] | None = None,
    proxy: str | None = None,
) -> facts.Facts:
    """All facts about this machine, and about a fleet when one is given.

    Args:
        fleet: the fleet to run here.
        source: the fleet's file.
        engine_python: the engines' Python; default: the fleet's, `.venv-engines`, or this one.
        library: an object with NVML's functions; default: ``pynvml``.
        environment: the environment that engines would inherit; default: this process's.
        proxy: URL of a running proxy whose conditions are read; default: the fleet's.
    """
    inherited = dict(os.environ if environment is None else environment)
    return facts.Facts(
        host=_host(),
        gpus=read_inventory(library),
        engine_python=ask_python(_python(engine_python, fleet)),
        rdma=_rdma(),
        efa=_efa(inherited),
        environment=inherited,
        fleet=_fleet(fleet, source, inherited) if fleet is not None else None,
        clocks=ask_clocks(fleet) if fleet is not None else [],
        proxy=ask_proxy(fleet, proxy),
    )


def _python(given: str | None, fleet: FleetFile | None) -> str:
    if given is not None:
        return resolve_python(given)
    if fleet is not None and fleet.kind == "vllm":
        return resolve_python(fleet.members[0].vllm.python)
    named = resolve_python(os.environ.get("WARMROUTE_ENGINE_PYTHON", _DEFAULT_PYTHON))
    return named if Path(named).exists() else sys.executable


def _host() -> facts.Host:
    memory = psutil.virtual_memory()
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    synchronised, error_s = _own_clock()
    return facts.Host(
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        shm_total_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        nofile=_limit(resource.RLIMIT_NOFILE),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        cpus=psutil.cpu_count() or 1,
        libraries={name: found for name in _LIBRARIES if (found := _knows(name)) is not None},
        clock_synchronised=synchronised,
        clock_error_s=error_s,
    )


def _limit(which: int) -> facts.Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return facts.Limit(soft, hard)


def _linker_cache() -> dict[str, str]:
    """Library name -> path, as the dynamic linker's cache has them; empty where there is no cache."""
    text = _output([shutil.which("ldconfig") or "/sbin/ldconfig", "-p"]) or ""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow:
            found.setdefault(name.partition(" ")[0], path)
    return found


def _library_path(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The path a program would load a library from; None when it is not found."""
    for directory in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        if (Path(directory) / name).exists():
            return str(Path(directory) / name)
    return _linker_cache().get(name)


def _knows(name: str) -> bool | None:
    return True if _library_path(name) else (False if _linker_cache() else None)


def _own_clock() -> tuple[bool | None, float | None]:
    """Synchronisation status of the kernel's clock, and its bound on the error in seconds."""
    if sys.platform == "linux" and struct.calcsize("l") == 8:
        buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: read only
        if ctypes.CDLL(None).adjtimex(buffer) >= 0:
            _, _, _, max_error_us, _, status = struct.unpack_from("I4x4li", buffer.raw)
            synchronised = not status & _STA_UNSYNC
            return synchronised, max_error_us / 1e6 if synchronised else None
    output = _output(["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    return ({"yes": True, "no": False}.get(output.strip()) if output else None), None


def _rdma() -> facts.Rdma:
    devices = sorted(path.name for path in _INFINIBAND.glob("*"))
    listed = _output(["ibv_devices"])
    return facts.Rdma(
        kernel_devices=devices,
        active_devices=[name for name in devices if _has_active_port(_INFINIBAND / name)],
        verbs_devices=None if listed is None else _verbs_devices(listed),
    )


def _has_active_port(device: Path) -> bool:
    try:
        return any("ACTIVE" in path.read_text() for path in device.glob("ports/*/state"))
    except OSError:
        return False


def _verbs_devices(listed: str) -> list[str]:
    """Names in the output of ``ibv_devices``, whose first two lines are a heading."""
    return [line.split()[0] for line in listed.splitlines()[2:] if line.strip()]


def _efa(environment: Mapping[str, str]) -> facts.Efa:
    devices = []
    for path in sorted(_INFINIBAND.glob("*")):
        driver = path / "device" / "driver"
        if driver.exists() and driver.resolve().name == "efa":
            devices.append(path.name)
    fi_info = shutil.which("fi_info") or (_EFA_FI_INFO if Path(_EFA_FI_INFO).exists() else None)
    output = _output([fi_info, "-p", "efa"]) if fi_info else None
    return facts.Efa(
        devices=devices,
        fi_info=fi_info,
        provider_ok=None if fi_info is None else output is not None and "provider: efa" in output,
        libfabric=_library_path("libfabric.so.1", environment),
    )


def _fleet(fleet: FleetFile, source: str, inherited: Mapping[str, str]) -> facts.FleetFacts:
    return facts.FleetFacts(
        source=source,
        engines=[_engine(fleet, spec, inherited) for spec in engine_specs(fleet)],
        busy_ports=ports_in_use(fleet),
        start_problems=KINDS[fleet.kind].problems(fleet, inherited),
    )


def _engine(fleet: FleetFile, spec: ProcessSpec, inherited: Mapping[str, str]) -> facts.FleetEngineFacts:
    kept = {name: value for name, value in inherited.items() if name not in spec.drop_environment}
    member = spec.member
    role = member.role if member is not None else Role.NONE
    real = fleet.kind == "vllm" and member is not None
    return facts.FleetEngineFacts(
        name=spec.name,
        kind=spec.kind,
        command=list(spec.command),
        environment={**kept, **spec.environment},
        host=fleet.reached_as,
        role=role.value,
        protocol=member.vllm.transfer.protocol.value if real and member and role is not Role.NONE else None,
        device=member.vllm.device if real and member else "cpu",
    )


def _output(command: list[str]) -> str | None:
    """A command's standard output; None when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
