"""Gather what RDMA and EFA need: adapters, device files, libfabric and its provider."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from launch.doctor.facts import Efa, Rdma
from launch.doctor.probes.commands import answer
from launch.doctor.probes.output import fabric_entries, installer_version, libfabric_versions, newest_abi

_INFINIBAND = Path("/sys/class/infiniband")
_VERBS = Path("/sys/class/infiniband_verbs")
_DEVICE_FILES = Path("/dev/infiniband")
_DRIVER_VERSION = Path("/sys/module/efa/version")
_INSTALLED = Path("/opt/amazon/efa_installed_packages")
_AWS_FI_INFO = "/opt/amazon/efa/bin/fi_info"


def linker_cache() -> dict[str, str]:
    """Library name -> path, as the dynamic linker's cache has them; empty where there is no cache."""
    text = answer([shutil.which("ldconfig") or "/sbin/ldconfig", "-p"])[0] or ""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow:
            found.setdefault(name.partition(" ")[0], path)
    return found


def library_path(name: str, environment: Mapping[str, str]) -> str | None:
    """The path a program would load a library from; None when it is not found."""
    for directory in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        if (Path(directory) / name).exists():
            return str(Path(directory) / name)
    return linker_cache().get(name)


def rdma(sys: Path = _INFINIBAND, verbs: Path = _VERBS, files: Path = _DEVICE_FILES) -> Rdma:
    """RDMA adapters of this machine, and their device files."""
    devices = sorted(path.name for path in sys.glob("*"))
    listed, _ = answer(["ibv_devices"])
    wanted = sorted(files / path.name for path in verbs.glob("uverbs*"))
    if devices and not wanted:
        wanted = [files / "uverbs0"]  # without the kernel module ib_uverbs no adapter has its file
    there = [path for path in wanted if path.exists()]
    return Rdma(
        kernel_devices=devices,
        active_devices=[name for name in devices if _has_active_port(sys / name)],
        verbs_devices=None if listed is None else verbs_devices(listed),
        missing_files=[str(path) for path in wanted if path not in there],
        denied_files=[str(path) for path in there if not os.access(path, os.R_OK | os.W_OK)],
    )


def verbs_devices(listed: str) -> list[str]:
    """Names in the output of ``ibv_devices``, whose first two lines are a heading."""
    return [line.split()[0] for line in listed.splitlines()[2:] if line.strip()]


def efa(environment: Mapping[str, str], sys: Path = _INFINIBAND) -> Efa:
    """EFA devices, and libfabric as a process with this environment would have it."""
    devices = []
    for path in sorted(sys.glob("*")):
        driver = path / "device" / "driver"
        if driver.exists() and driver.resolve().name == "efa":
            devices.append(path.name)
    fi_info = shutil.which("fi_info") or (_AWS_FI_INFO if Path(_AWS_FI_INFO).exists() else None)
    entries, error, version, api = None, "", None, None
    if fi_info is not None:
        output, error = answer([fi_info, "-p", "efa"], environment)
        entries = fabric_entries(output or "")
        version, api = libfabric_versions(answer([fi_info, "--version"], environment)[0] or "")
    libfabric = library_path("libfabric.so.1", environment)
    return Efa(
        devices=devices,
        fi_info=fi_info,
        entries=entries,
        error=error,
        libfabric=libfabric,
        libfabric_version=version,
        api=api,
        needed_abi=_abi(libfabric),
        offered_abi=_abi(library_path("libefa.so.1", environment)),
        driver=(_text(_DRIVER_VERSION) or "").strip() or None,
        installer=installer_version(_text(_INSTALLED) or ""),
    )


def _abi(library: str | None) -> tuple[int, int] | None:
    try:
        return newest_abi(Path(library).read_bytes()) if library else None
    except OSError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _has_active_port(device: Path) -> bool:
    try:
        return any("ACTIVE" in path.read_text() for path in device.glob("ports/*/state"))
    except OSError:
        return False
