"""Gather the facts of this machine. Read-only; the checks judge them.

Unreadable values stay None. Every external command has a time limit.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from launch.doctor import facts
from launch.doctor.probes import fabric
from launch.doctor.probes.clocks import ask_clocks
from launch.doctor.probes.commands import answer
from launch.doctor.probes.conditions import ask_proxy
from launch.doctor.probes.deep import HandOffs, gather_deep
from launch.doctor.probes.python import ask_python
from launch.engines.commands import ProcessSpec, engine_specs
from launch.engines.dimensions import pieces_of, smallest_write_bytes
from launch.engines.flags import start_problems
from launch.engines.vllm import resolve_python
from launch.fleet.file import FleetFile, ports_in_use
from launch.hardware.gpus import NvmlLibrary, read_inventory
from policies.types import Role
from warmroute_tls import NO_FILES, TlsFiles

_LIBRARIES = ("libibverbs.so.1", "libnuma.so.1", "libtcmalloc_minimal.so.4")
_STA_UNSYNC = 0x40
_TIMEX_BYTES = 512
"""Larger than any C library's struct timex."""
_DEFAULT_PYTHON = ".venv-engines/bin/python"


def gather(
    fleet: FleetFile | None = None,
    *,
    source: str = "",
    engine_python: str | None = None,
    library: NvmlLibrary | None = None,
    environment: Mapping[str, str] | None = None,
    proxy: str | None = None,
    proxy_files: TlsFiles = NO_FILES,
    deep: bool = False,
    hand_offs: HandOffs | None = None,
) -> facts.Facts:
    """All facts about this machine, and about a fleet when one is given.

    Args:
        fleet: the fleet to run here.
        source: the fleet's file.
        engine_python: the engines' Python; default: the fleet's, `.venv-engines`, or this one.
        library: an object with NVML's functions; default: ``pynvml``.
        environment: the environment that engines would inherit; default: this process's.
        proxy: URL of a running proxy whose conditions are read; default: the fleet's.
        proxy_files: certificates for TLS with this proxy.
        deep: also test the running fleet, and ask nvidia-smi and Mooncake for their topologies.
        hand_offs: makes the hand-offs of that.
    """
    inherited = dict(os.environ if environment is None else environment)
    wanted = _fleet(fleet, source, inherited) if fleet is not None else None
    # Libraries are looked up as the first engine would: its LD_LIBRARY_PATH decides which libfabric is loaded.
    engine = wanted.engines[0].environment if wanted is not None else inherited
    python = ask_python(_python(engine_python, fleet), engine)
    return facts.Facts(
        host=_host(),
        gpus=read_inventory(library),
        engine_python=python,
        rdma=fabric.rdma(),
        efa=fabric.efa(engine),
        environment=inherited,
        fleet=wanted,
        clocks=ask_clocks(fleet) if fleet is not None else [],
        proxy=ask_proxy(fleet, proxy, proxy_files),
        deep=gather_deep(python, engine, fleet, wanted, hand_offs) if deep else None,
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


def _knows(name: str) -> bool | None:
    found = fabric.library_path(name, os.environ)
    return True if found else (False if fabric.linker_cache() else None)


def _own_clock() -> tuple[bool | None, float | None]:
    """Synchronisation status of the kernel's clock, and its bound on the error in seconds."""
    if sys.platform == "linux" and struct.calcsize("l") == 8:
        buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: read only
        if ctypes.CDLL(None).adjtimex(buffer) >= 0:
            _, _, _, max_error_us, _, status = struct.unpack_from("I4x4li", buffer.raw)
            synchronised = not status & _STA_UNSYNC
            return synchronised, max_error_us / 1e6 if synchronised else None
    output, _ = answer(["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    return ({"yes": True, "no": False}.get(output.strip()) if output else None), None


def _fleet(fleet: FleetFile, source: str, inherited: Mapping[str, str]) -> facts.FleetFacts:
    return facts.FleetFacts(
        source=source,
        engines=[_engine(fleet, spec, inherited) for spec in engine_specs(fleet)],
        busy_ports=ports_in_use(fleet),
        start_problems=start_problems(fleet, inherited),
    )


def _engine(fleet: FleetFile, spec: ProcessSpec, inherited: Mapping[str, str]) -> facts.FleetEngineFacts:
    member = spec.member
    role = member.role if member is not None else Role.NONE
    real = fleet.kind == "vllm" and member is not None
    return facts.FleetEngineFacts(
        name=spec.name,
        kind=spec.kind,
        command=list(spec.command),
        environment=spec.complete_environment(inherited),
        host=fleet.reached_as,
        role=role.value,
        protocol=member.vllm.transfer.protocol.value if real and member and role is not Role.NONE else None,
        device=member.vllm.device if real and member else "cpu",
        least_write_bytes=smallest_write_bytes(member) if real and member else None,
        pieces=pieces_of(member) if real and member else None,
    )
