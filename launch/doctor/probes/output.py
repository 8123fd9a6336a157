"""Parsers of the output of libfabric's tools, AWS's EFA installer, ``nvidia-smi topo -m`` and Mooncake's topology."""

from __future__ import annotations

import re

import msgspec

from launch.doctor.facts import FabricEntry, GpuPaths, NearNics

_KEYS = {"fabric": "fabric", "domain": "domain", "version": "version", "type": "endpoint", "protocol": "protocol"}


def fabric_entries(text: str) -> list[FabricEntry]:
    """Entries of ``fi_info``: a line ``provider: NAME``, then indented lines ``key: value``; others are left out."""
    found: list[dict[str, str]] = []
    for line in text.splitlines():
        key, colon, value = line.strip().partition(":")
        if not colon:
            continue
        if key == "provider":
            found.append({"provider": value.strip()})
        elif found and key in _KEYS:
            found[-1][_KEYS[key]] = value.strip()
    return [FabricEntry(**one) for one in found]


def libfabric_versions(text: str) -> tuple[str | None, tuple[int, int] | None]:
    """Version of libfabric and newest interface, from ``fi_info --version``."""
    version = re.search(r"^libfabric:\s*(\S+)", text, re.M)
    return version.group(1) if version else None, _pair(re.search(r"^libfabric api:\s*(\d+)\.(\d+)", text, re.M))


def installer_version(text: str) -> str | None:
    """Version in ``/opt/amazon/efa_installed_packages``, whose first line is a comment with it."""
    found = re.search(r"^#\s*EFA installer version:\s*(\S+)", text, re.M)
    return found.group(1) if found else None


def newest_abi(library: bytes) -> tuple[int, int] | None:
    """Newest ``EFA_x.y`` among the symbol versions in a library's string table; None without any.

    libefa has those that it defines, libfabric those of libefa that it needs.
    """
    found = re.findall(rb"\x00EFA_(\d+)\.(\d+)(?=\x00)", library)
    return max(((int(major), int(minor)) for major, minor in found), default=None)


_GPU, _COLUMN = re.compile(r"GPU\d+"), re.compile(r"(?:GPU|NIC)\d+|mlx\w+|rdmap\w+|efa\w*")
_PATH = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def topology_matrix(text: str) -> GpuPaths | None:
    """The matrix and legend of ``nvidia-smi topo -m``; None where there is no matrix.

    Columns are separated by tabs or, in copies, by spaces; older drivers name adapters in the heading instead of a
    legend, and the columns after the matrix (CPU and NUMA affinity, NUMA id of the GPU) are not always there.
    """
    lines = _ANSI.sub("", text).splitlines()
    start = next((place for place, line in enumerate(lines) if _GPU.match(line.strip())), None)
    if start is None:
        return None
    columns = [word for word in lines[start].split() if _COLUMN.fullmatch(word)]
    after = [name.strip() for name in re.split(r"\t+|\s{2,}", lines[start].strip()) if name.strip().endswith(_LATER)]
    nics = {name: name for name in columns if not _GPU.fullmatch(name)}
    paths: dict[str, dict[str, str]] = {}
    numa: dict[str, str] = {}
    for line in lines[start + 1 :]:
        words = line.split()
        if legend := re.fullmatch(r"\s*(NIC\d+): (\S+)\s*", line):
            nics[legend.group(1)] = legend.group(2)
        elif words and _GPU.fullmatch(words[0]) and all(map(_PATH.fullmatch, words[1 : len(columns) + 1])):
            cells = words[1 : len(columns) + 1]
            paths[words[0]] = {name: path for name, path in zip(columns, cells, strict=False) if path != "X"}
            rest = words[len(columns) + 1 :]
            if "NUMA Affinity" in after and len(rest) > 1 and re.fullmatch(r"[\d,-]+", rest[1]):
                numa[words[0]] = rest[1]
    return GpuPaths(gpus=list(paths), nics=nics, paths=paths, numa=numa) if paths else None


_LATER = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


def near_nics(text: str) -> dict[str, NearNics] | None:
    """Mooncake's topology, from what ``transfer_engine_topology_dump`` prints; None where there is none.

    A sentence, then JSON: place of memory -> [preferred adapters, others]. The log may be among it.
    """
    body = text[text.find("{") : text.rfind("}") + 1]
    try:
        found = msgspec.json.decode(body.encode(), type=dict[str, tuple[list[str], list[str]]])
    except msgspec.MsgspecError:
        return None
    return {place: NearNics(preferred=first, others=others) for place, (first, others) in found.items()}


def _pair(match: re.Match[str] | None) -> tuple[int, int] | None:
    return (int(match.group(1)), int(match.group(2))) if match else None
