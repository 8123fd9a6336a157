"""Checks of RDMA and EFA: adapters, device files, libfabric, settings."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from launch.doctor.facts import Facts, FleetEngineFacts
from launch.doctor.findings import Result, check, note, ok, problem, warning
from launch.doctor.versions import EFA_PACKAGES, installed
from launch.fleet.fabric import bench_sizes, instances_with, share_of_peak

_LEAST_API = (1, 18)
"""Interface of libfabric that Mooncake's EFA transport requests; AWS's installer has it from 1.26 on."""
_MOUNT = (
    "install the host's release of AWS's EFA installer in the container, or mount the host's /opt/amazon/efa, "
    "libefa.so.1 and libibverbs.so.1 (docs/efa-rdma.md)"
)


@check(
    "rdma",
    looks_at="/sys/class/infiniband, port states, `ibv_devices`",
    why="protocol rdma needs an adapter that libibverbs sees; where there is one, Mooncake may use it whatever the "
    "configured protocol",
    worst="problem",
)
def rdma(facts: Facts) -> Iterator[Result]:
    """RDMA can be used."""
    found, asked = facts.rdma, "rdma" in facts.protocols()
    if not found.kernel_devices:
        if asked:
            yield problem(
                "the fleet is configured for rdma, but there is no RDMA adapter", "choose tcp, or nvlink on one host"
            )
        else:
            yield note("no RDMA adapter")
        return
    names = ", ".join(found.kernel_devices)
    if not found.active_devices:
        summary, fix = f"RDMA adapters {names}: no port is active", "see `ibstat`; bring the link up"
        yield problem(summary, fix) if asked else warning(summary, fix)
        return
    if found.verbs_devices is not None and set(found.verbs_devices) != set(found.kernel_devices):
        hidden = ", ".join(sorted(set(found.kernel_devices) - set(found.verbs_devices))) or "none"
        summary = f"libibverbs does not show {hidden} of {names}"
        fix = (
            "install the adapter's provider library (Debian: ibverbs-providers) and pass /dev/infiniband to containers"
        )
        yield problem(summary, fix) if asked else warning(summary, fix)
        return
    unchecked = " (ibv_devices is not installed: not checked through libibverbs)" if found.verbs_devices is None else ""
    yield ok(f"RDMA adapters {names}{unchecked}")
    if facts.protocols() == {"tcp"} and not any("MC_FORCE_TCP" in engine.environment for engine in facts.engines()):
        yield note(
            "protocol tcp on a machine with RDMA: Mooncake may use the adapter anyway",
            "set MC_FORCE_TCP=1 in the fleet's env to force TCP; the launcher reports the transport in the log",
        )


@check(
    "device-files",
    looks_at="/dev/infiniband/uverbs*: there, and readable and writable by this user",
    why="Mooncake opens adapters through them and leaves out those that it cannot open; containers get none by default",
    worst="problem",
)
def device_files(facts: Facts) -> Iterator[Result]:
    """The engines' user can open the adapters."""
    found, asked = facts.rdma, bool(facts.protocols() & {"rdma", "efa"})
    if not found.kernel_devices:
        return
    fault = problem if asked else warning
    if found.missing_files:
        yield fault(
            f"{', '.join(found.missing_files)} not found",
            "pass them to the container (docker run --device=/dev/infiniband), or load the kernel module ib_uverbs",
        )
    if found.denied_files:
        yield fault(
            f"{', '.join(found.denied_files)}: this user may not read and write them",
            "give the engines' user access (group of the files, or a udev rule with MODE 0666)",
        )
    if not found.missing_files and not found.denied_files:
        yield ok("the adapters' device files can be opened")


@check(
    "efa",
    looks_at="EFA devices, `fi_info -p efa`, the loaded libfabric",
    why="protocol efa needs libfabric's efa provider to open every adapter with reliable datagrams",
    worst="problem",
)
def efa(facts: Facts) -> Iterator[Result]:
    """EFA can be used."""
    found, asked = facts.efa, "efa" in facts.protocols()
    if not found.devices:
        if asked:
            yield problem(
                "the fleet is configured for efa, but there is no EFA device",
                "choose tcp or rdma, or an EFA instance type",
            )
        else:
            yield note("no EFA device")
        return
    names = ", ".join(found.devices)
    opened = found.domains()
    closed = sorted(set(found.devices) - set(opened))
    if found.entries is None:
        yield warning(
            f"EFA devices {names}; fi_info is not installed, so the provider was not checked",
            "install AWS's EFA software (/opt/amazon/efa)",
        )
    elif not opened:
        said = f" ({found.error})" if found.error else ""
        yield problem(
            f"EFA devices {names}, but `fi_info -p efa` finds no provider{said}",
            "install AWS's EFA software and its libfabric",
        )
    elif closed:
        yield warning(
            f"`fi_info -p efa` opens {len(opened)} of {len(found.devices)} EFA devices, not {', '.join(closed)}",
            "pass all of /dev/infiniband to the container, and see `ibv_devinfo` for the others",
        )
    else:
        yield ok(f"EFA devices {names}, provider found by {found.fi_info}")
    if found.libfabric is not None and "/amazon/" not in found.libfabric:
        yield warning(
            f"the loaded libfabric is {found.libfabric}, not AWS's",
            "put /opt/amazon/efa/lib (or lib64) first in LD_LIBRARY_PATH",
        )


@check(
    "libfabric",
    looks_at="libfabric and libefa that Mooncake loads or bundles, their versions, the efa driver, the EFA installer",
    why="two copies of libfabric in one process leave one without a provider, and NCCL then falls back to TCP; one of "
    "another release than libefa or the driver fails at the first call",
    worst="problem",
)
def libfabric(facts: Facts) -> Iterator[Result]:
    """One libfabric, with EFA, and new enough."""
    found, python, asked = facts.efa, facts.engine_python, "efa" in facts.protocols()
    if not asked and not found.devices:
        return
    fault = problem if asked else warning
    bad = list(_mooncake_libraries(facts))
    if found.api is not None and found.api < _LEAST_API:
        bad.append(
            (
                f"libfabric {found.libfabric_version} offers interface {_dotted(found.api)}; Mooncake's EFA transport "
                f"requests {_dotted(_LEAST_API)}",
                "install release 1.26 or later of AWS's EFA installer",
            )
        )
    if found.needed_abi is not None and found.offered_abi is not None and found.needed_abi > found.offered_abi:
        bad.append(
            (
                f"{found.libfabric} needs EFA_{_dotted(found.needed_abi)} of libefa, which has up to "
                f"EFA_{_dotted(found.offered_abi)}",
                _MOUNT,
            )
        )
    for summary, fix in bad:
        yield fault(summary, fix)
    if not bad and found.libfabric is not None:
        versions = (
            ("libfabric", found.libfabric_version),
            ("efa driver", found.driver),
            ("EFA installer", found.installer),
        )
        known = ", ".join(f"{name} {version}" for name, version in versions if version)
        loads = "" if python.mooncake_linked else "; not checked with Mooncake"
        yield ok(f"{known or found.libfabric}{loads}")


def _mooncake_libraries(facts: Facts) -> Iterator[tuple[str, str]]:
    """Faults of the libfabric that the engines' Mooncake has, with their remedies."""
    python = facts.engine_python
    package = installed(python.packages).mooncake_package
    if package is None:
        return
    if python.mooncake_bundled:
        preloaded = all("libfabric" in one.environment.get("LD_PRELOAD", "") for one in _over_efa(facts))
        if not preloaded:
            yield (
                f"{package} bundles {', '.join(python.mooncake_bundled)} beside the system's libfabric",
                "install one that does not, or preload the system's "
                "(env: {LD_PRELOAD: /opt/amazon/efa/lib/libfabric.so.1})",
            )
    elif not python.mooncake_linked and "libfabric.so.1" not in python.mooncake_missing:
        yield (
            f"{package} is built without EFA: it does not load libfabric",
            f"install {', '.join(EFA_PACKAGES[:2])}, or build Mooncake with -DUSE_EFA=ON -DUSE_CUDA=ON",
        )


@check(
    "efa-variables",
    looks_at="FI_PROVIDER, FI_EFA_ENABLE_SHM_TRANSFER, FI_EFA_USE_DEVICE_RDMA, MC_MAX_WR of engines that use EFA",
    why="over EFA, two processes of one host that exchange GPU memory end in a segmentation fault unless libfabric's "
    "shared-memory path is off; the others hide the provider, emulate RDMA, or let transfers time out",
    worst="problem",
)
def efa_variables(facts: Facts) -> Iterator[Result]:
    """The variables that libfabric and Mooncake read are the ones EFA needs."""
    asked = "efa" in facts.protocols()
    fault = problem if asked else warning
    using = _over_efa(facts)

    def names(wrong: list[FleetEngineFacts]) -> str:
        return ", ".join(one.name for one in wrong)

    def those(name: str, *wrong: str) -> list[FleetEngineFacts]:
        return [one for one in using if one.environment.get(name, "").lower() in wrong]

    shared = [one for one in using if one.environment.get("FI_EFA_ENABLE_SHM_TRANSFER") != "0"]
    if shared:
        yield fault(
            f"FI_EFA_ENABLE_SHM_TRANSFER is not 0 for {names(shared)}",
            "set FI_EFA_ENABLE_SHM_TRANSFER=0 where engines of one host exchange KV",
        )
    hidden = [one for one in using if not _provider_listed(one.environment.get("FI_PROVIDER", ""))]
    if hidden:
        yield fault(f"FI_PROVIDER hides the efa provider from {names(hidden)}", "set FI_PROVIDER=efa, or unset it")
    emulated = those("FI_EFA_USE_DEVICE_RDMA", "0", "false", "no", "off")
    if emulated:
        yield warning(
            f"FI_EFA_USE_DEVICE_RDMA is off for {names(emulated)}: libfabric emulates RDMA",
            "set FI_EFA_USE_DEVICE_RDMA=1 (vllm.transfer.fabric.device_rdma: true)",
        )
    limited = [one for one in using if "MC_MAX_WR" in one.environment]
    if limited:
        yield warning(
            f"MC_MAX_WR is set for {names(limited)}: below or above the device's queue, transfers fail under load",
            "leave it out (vllm.transfer.fabric.max_wr); for a deeper queue set FI_EFA_TX_SIZE (tx_depth)",
        )


@check(
    "efa-writes",
    looks_at="the smallest write of a hand-off (model, block size) against the published sweep; the number of adapters",
    why="EFA writes are not divided or joined: 64 KiB reaches a quarter of the peak, 1 MiB nearly all of it",
    worst="note",
)
def efa_writes(facts: Facts) -> Iterator[Result]:
    """Sizes of the writes, and the command that measures the fabric."""
    found = facts.efa
    sizes = {one.least_write_bytes for one in facts.engines() if one.protocol == "efa" and one.least_write_bytes}
    for size in sorted(sizes):
        yield note(
            f"one block's K or V of one layer is {size >> 10:,} KiB: {share_of_peak(size):.0%} of the peak (published, "
            "p5en); blocks that are neighbours are written together",
            "larger vllm.block_size, if the attention backend has it",
        )
    if found.devices:
        count = len(found.devices)
        kinds = f" ({' or '.join(instances_with(count))})" if instances_with(count) else ""
        bench = bench_sizes(count)
        yield note(
            f"{count} EFA devices{kinds}; to measure them: {shlex.join(bench.command())} on one host, "
            f"{shlex.join(bench.command('HOST:PORT'))} on another"
        )


def _over_efa(facts: Facts) -> list[FleetEngineFacts]:
    """The fleet's engines with protocol efa; without a fleet, on a machine with EFA, any engine started here."""
    if facts.fleet is None:
        return facts.engines() if facts.efa.devices else []
    return [one for one in facts.engines() if one.protocol == "efa"]


def _provider_listed(value: str) -> bool:
    """True if libfabric's filter leaves the efa provider: empty, a list with it, or ``^`` and a list without it."""
    names = {name.strip().lower() for name in value.removeprefix("^").split(",") if name.strip()}
    return not names or ("efa" in names) != value.startswith("^")


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
