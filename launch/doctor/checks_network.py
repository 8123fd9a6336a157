"""Checks of the connections between engines: RDMA, EFA, ports, addresses, clocks."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from launch.doctor.facts import Facts
from launch.doctor.findings import Result, check, note, ok, problem, warning
from launch.fleet.layout import is_loopback
from launch.freshness.proof import CLOCK_TOLERANCE_S

_CLOCK_ERROR_S = 0.5


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
    "efa",
    looks_at="EFA devices, `fi_info -p efa`, the loaded libfabric, FI_EFA_ENABLE_SHM_TRANSFER",
    why="over EFA, two processes of one host that exchange GPU memory end in a segmentation fault unless libfabric's "
    "shared-memory path is off",
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
    if found.provider_ok is False:
        yield problem(
            f"EFA devices {names}, but `fi_info -p efa` finds no provider",
            "install AWS's EFA software and its libfabric",
        )
    elif found.provider_ok is None:
        yield warning(
            f"EFA devices {names}; fi_info is not installed, so the provider was not checked",
            "install AWS's EFA software (/opt/amazon/efa)",
        )
    else:
        yield ok(f"EFA devices {names}, provider found by {found.fi_info}")
    if found.libfabric is not None and "/amazon/" not in found.libfabric:
        yield warning(
            f"the loaded libfabric is {found.libfabric}, not AWS's",
            "put /opt/amazon/efa/lib (or lib64) first in LD_LIBRARY_PATH",
        )
    using = [engine for engine in facts.engines() if engine.protocol == "efa" or facts.fleet is None]
    open_path = [one.name for one in using if one.environment.get("FI_EFA_ENABLE_SHM_TRANSFER") != "0"]
    if open_path:
        summary = f"FI_EFA_ENABLE_SHM_TRANSFER is not 0 for {', '.join(open_path)}"
        fix = "set FI_EFA_ENABLE_SHM_TRANSFER=0 where engines of one host exchange KV"
        yield problem(summary, fix) if asked else warning(summary, fix)


@check(
    "ports",
    looks_at="every port of the fleet: engines, bootstrap, KV events, MASTER_PORT, proxy",
    why="an engine that cannot listen exits after it has loaded its weights",
    worst="problem",
)
def ports(facts: Facts) -> Iterator[Result]:
    """The fleet's ports are free."""
    if facts.fleet is None:
        return
    running = [one.name for one in facts.clocks if one.error is None]
    busy = facts.fleet.busy_ports
    if busy and running:
        yield note(
            f"{len(busy)} of the fleet's ports are in use, and {', '.join(running)} answer there",
            "expected if this fleet is already running; else stop the processes that listen there",
        )
    elif busy:
        for summary in busy:
            yield problem(summary, "stop the process that listens there or move the base ports in the fleet file")
    if not facts.fleet.busy_ports:
        yield ok("all ports of the fleet are free")


@check(
    "clock",
    looks_at="the kernel's status of its clock (adjtimex, else timedatectl)",
    why="start times and latencies are compared between hosts",
    worst="warning",
)
def clock(facts: Facts) -> Iterator[Result]:
    """This machine's clock is synchronised."""
    error = facts.host.clock_error_s
    if facts.host.clock_synchronised is None:
        yield note("the clock's synchronisation status is not available here")
    elif not facts.host.clock_synchronised:
        several = any(not is_loopback(urlsplit(one.url).hostname or "") for one in facts.clocks)
        summary, fix = "the clock is not synchronised", "run chrony or systemd-timesyncd on the host"
        yield warning(summary, fix) if several else note(f"{summary}; matters with several hosts only", fix)
    elif error is not None and error > _CLOCK_ERROR_S:
        yield warning(f"the clock may be {error:.2f} s off by the kernel's own bound", "see `chronyc tracking`")
    else:
        yield ok("the clock is synchronised" + (f" (to {error * 1000:.0f} ms or better)" if error is not None else ""))


@check(
    "clock-peers",
    looks_at="the Date header of the answers of the fleet's engines, peers and proxy against the local clock",
    why=f"an engine counts as fresh by its start time, with {CLOCK_TOLERANCE_S:g} s of tolerance",
    worst="problem",
)
def clock_peers(facts: Facts) -> Iterator[Result]:
    """The clocks of the fleet's other machines agree."""
    silent = [one for one in facts.clocks if one.error is not None]
    close = []
    for one in facts.clocks:
        if one.error is not None:
            continue
        if one.offset_s == 0:
            close.append(one.name)
            continue
        direction = "ahead" if one.offset_s > 0 else "behind"
        summary = f"{one.name} ({one.url}): its clock is at least {abs(one.offset_s):.1f} s {direction}"
        fix = "synchronise both hosts' clocks (chrony)"
        yield problem(summary, fix) if abs(one.offset_s) > CLOCK_TOLERANCE_S else warning(summary, fix)
    if close:
        yield ok(f"clocks agree within the precision of a Date header: {', '.join(close)}")
    if silent and len(silent) < len(facts.clocks):
        names = "; ".join(f"{one.name} ({one.error})" for one in silent)
        yield note(f"clocks not compared: {names}")
    elif silent:
        yield note("clocks not compared: no process of the fleet answers yet")
