"""Checks of the machine: limits, memory, NUMA, and the environment variables that affect KV transfers."""

from __future__ import annotations

from collections.abc import Iterator

from launch.doctor.facts import Facts, FleetEngineFacts
from launch.doctor.findings import Result, check, gibibytes, note, ok, problem, warning
from launch.fleet.checks import ALLOCATOR_VARIABLES, NVLINK_VARIABLE
from replayer.records.counted import counted

_NOFILE_MINIMUM, _NOFILE_ADVISED = 4096, 65536
_SHM_ADVISED_BYTES = 1 << 30
_CPU_ENGINE_BYTES = 1400 << 20
"""Memory of one engine on the CPU with the tiny model: eight took 10.8 GB, four 5.7 GB."""
_GPU_ENGINE_BYTES = 8 << 30
"""Host memory of one engine on a GPU, weights already on the device (rule of thumb)."""
_FORCE_TCP = "MC_FORCE_TCP"


@check(
    "limits",
    looks_at="ulimit -n and ulimit -l",
    why="every connection is a file; RDMA and EFA lock the memory they read and write",
    worst="problem",
)
def limits(facts: Facts) -> Iterator[Result]:
    """Open files and locked memory."""
    nofile, memlock = facts.host.nofile, facts.host.memlock
    summary = f"open files: {_shown(nofile.soft)}"
    if nofile.soft is not None and nofile.soft < _NOFILE_MINIMUM:
        yield problem(summary, f"ulimit -n {_NOFILE_ADVISED} (LimitNOFILE= of a systemd unit)")
    elif nofile.soft is not None and nofile.soft < _NOFILE_ADVISED:
        yield note(summary, f"for thousands of open streams: ulimit -n {_NOFILE_ADVISED}")
    else:
        yield ok(summary)
    if memlock.soft is None:
        yield ok("locked memory: unlimited")
        return
    summary = f"locked memory: {memlock.soft >> 10:,} KiB"
    fix = "ulimit -l unlimited (LimitMEMLOCK=infinity; docker run --ulimit memlock=-1)"
    if facts.protocols() & {"rdma", "efa"}:
        yield problem(f"{summary}, and the fleet's transport locks whole KV pools", fix)
    elif facts.rdma.kernel_devices:
        yield warning(f"{summary}, too little for this machine's RDMA adapters", fix)
    else:
        yield note(f"{summary}; enough without RDMA")


def _shown(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


@check(
    "numa",
    looks_at="/sys/devices/system/node",
    why="an engine whose threads and memory lie on different nodes pays for every access",
    worst="note",
)
def numa(facts: Facts) -> Iterator[Result]:
    """Number of NUMA nodes."""
    nodes = facts.host.numa_nodes
    if nodes is None:
        yield note("the kernel reports no NUMA nodes")
    elif nodes == 1:
        yield ok(f"one NUMA node, {facts.host.cpus} processors")
    else:
        yield note(
            f"{nodes} NUMA nodes, {facts.host.cpus} processors",
            "bind each engine to one (numactl, or omp_bind on the CPU)",
        )


@check(
    "memory",
    looks_at="available memory against the needs of the fleet's engines",
    why="the kernel kills an engine that allocates too much, or swaps it",
    worst="problem",
)
def memory(facts: Facts) -> Iterator[Result]:
    """The engines fit into memory."""
    available = facts.host.memory_available_bytes
    summary = f"{gibibytes(available)} of {gibibytes(facts.host.memory_total_bytes)} memory available"
    engines = [engine for engine in (facts.fleet.engines if facts.fleet else ()) if engine.kind == "vllm"]
    needed = sum(_needed_bytes(engine) for engine in engines)
    if needed > available:
        yield problem(
            f"{summary}; some {gibibytes(needed)} needed by {counted(len(engines), 'engine')}",
            "start fewer engines, or with smaller KV pools",
        )
    elif needed:
        yield ok(f"{summary}; some {gibibytes(needed)} needed by {counted(len(engines), 'engine')}")
    else:
        yield ok(summary)


def _needed_bytes(engine: FleetEngineFacts) -> int:
    if engine.device != "cpu":
        return _GPU_ENGINE_BYTES
    pool_gib = engine.environment.get("VLLM_CPU_KVCACHE_SPACE", "1")
    # The figure of `_CPU_ENGINE_BYTES` was measured with a pool of 1 GiB, of which little was used.
    return _CPU_ENGINE_BYTES + max(0, int(pool_gib) - 1 if pool_gib.isdigit() else 0) * 2**30


@check(
    "shared-memory",
    looks_at="size of /dev/shm",
    why="torch, NCCL and vLLM's workers exchange data there; containers start with 64 MiB",
    worst="problem",
)
def shared_memory(facts: Facts) -> Iterator[Result]:
    """/dev/shm is large enough."""
    total, free = facts.host.shm_total_bytes, facts.host.shm_free_bytes
    if total is None or free is None:
        yield warning("no /dev/shm", "mount it as tmpfs (docker run --shm-size=8g)")
    elif total <= 64 << 20:
        yield problem(f"/dev/shm has {total >> 20} MiB", "docker run --shm-size=8g, or --ipc=host")
    elif free < _SHM_ADVISED_BYTES:
        yield warning(f"/dev/shm has {gibibytes(free)} free", "enlarge it, or remove the files of dead processes")
    else:
        yield ok(f"/dev/shm: {gibibytes(free)} of {gibibytes(total)} free")


@check(
    "allocator",
    looks_at=f"expandable_segments in {' and '.join(ALLOCATOR_VARIABLES)} of the engines' inherited environment",
    why="Mooncake's NVLink transport can only share plain device memory",
    worst="problem",
)
def allocator(facts: Facts) -> Iterator[Result]:
    """The KV pool will be plain device memory."""
    bad = [
        (engine, name)
        for engine in facts.engines()
        for name in ALLOCATOR_VARIABLES
        if "expandable_segments:true" in engine.environment.get(name, "").lower().replace(" ", "")
    ]
    for engine, name in bad:
        summary = f"{name}={engine.environment[name]} for {engine.name}"
        fix = f"unset {name}, or remove expandable_segments from it"
        nvlink = engine.protocol == "nvlink" or NVLINK_VARIABLE in engine.environment
        yield problem(f"{summary}, which NVLink transfers cannot use", fix) if nvlink else warning(summary, fix)
    if not bad:
        yield ok("expandable_segments is off")


@check(
    "nvlink-variable",
    looks_at=f"{NVLINK_VARIABLE} in the engines' environment",
    why="Mooncake checks its presence, not its value: 0 turns NVLink on too; engines that exchange KV must agree",
    worst="problem",
)
def nvlink_variable(facts: Facts) -> Iterator[Result]:
    """NVLink is on exactly where it is configured."""
    if facts.fleet is None and NVLINK_VARIABLE in facts.environment:
        value = facts.environment[NVLINK_VARIABLE]
        if value.strip().lower() in {"0", "", "false", "no", "off"}:
            yield problem(
                f"{NVLINK_VARIABLE}={value} turns NVLink on, like any value",
                f"unset {NVLINK_VARIABLE} to turn it off; the launcher removes it for engines with another protocol",
            )
        else:
            yield note(f"{NVLINK_VARIABLE}={value}: NVLink is on for engines started by hand from this shell")
        return
    moving = [engine for engine in facts.engines() if engine.protocol is not None]
    with_it = [engine.name for engine in moving if NVLINK_VARIABLE in engine.environment]
    for engine in moving:
        seen = engine.environment.get(NVLINK_VARIABLE)
        if seen is not None and engine.protocol != "nvlink":
            yield problem(f"{engine.name} has {NVLINK_VARIABLE}={seen} but protocol {engine.protocol}", "unset it")
        elif seen is None and engine.protocol == "nvlink":
            yield problem(f"{engine.name} has protocol nvlink but no {NVLINK_VARIABLE}", f"set {NVLINK_VARIABLE}=1")
    if with_it and len(with_it) < len(moving):
        yield problem(
            f"only {', '.join(with_it)} have {NVLINK_VARIABLE}", "set it for all engines that exchange KV, or for none"
        )
    elif with_it:
        yield ok(f"{NVLINK_VARIABLE} is set for {counted(len(moving), 'engine')}")
    else:
        yield ok(f"{NVLINK_VARIABLE} is not set")


@check(
    "force-tcp",
    looks_at=f"{_FORCE_TCP} in the engines' environment",
    why="it forces Mooncake to TCP regardless of other settings",
    worst="problem",
)
def force_tcp(facts: Facts) -> Iterator[Result]:
    """No variable overrides the chosen transport."""
    held = [engine for engine in facts.engines() if _FORCE_TCP in engine.environment]
    wasted = [
        engine for engine in held if engine.protocol not in {None, "tcp"} or NVLINK_VARIABLE in engine.environment
    ]
    if wasted:
        yield problem(
            f"{_FORCE_TCP} is set for {', '.join(one.name for one in wasted)}: the faster transport is never used",
            f"unset {_FORCE_TCP}, or choose protocol tcp",
        )
    elif held:
        yield note(f"{_FORCE_TCP} is set: Mooncake uses TCP even where it finds an RDMA adapter")
    else:
        yield ok(f"{_FORCE_TCP} is not set")


@check(
    "metrics-directory",
    looks_at="PROMETHEUS_MULTIPROC_DIR in the engines' inherited environment",
    why="counters of earlier engines in that directory are added to those of new ones: none would prove fresh",
    worst="problem",
)
def metrics_directory(facts: Facts) -> Iterator[Result]:
    """Engines do not share a directory of counters."""
    held = [engine for engine in facts.engines() if engine.environment.get("PROMETHEUS_MULTIPROC_DIR")]
    if held:
        yield problem(
            f"PROMETHEUS_MULTIPROC_DIR={held[0].environment['PROMETHEUS_MULTIPROC_DIR']} for {held[0].name}",
            "unset it: vLLM makes a separate directory for each engine",
        )
    else:
        yield ok("PROMETHEUS_MULTIPROC_DIR is not set")
