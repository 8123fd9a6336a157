"""Checks of the connections between engines: ports, addresses, clocks."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from launch.doctor.facts import Facts
from launch.doctor.findings import Result, check, note, ok, problem, warning
from launch.fleet.layout import is_loopback
from launch.freshness.proof import CLOCK_TOLERANCE_S

_CLOCK_ERROR_S = 0.5


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
