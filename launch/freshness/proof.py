"""Proof that a fleet is fresh: no state of an earlier run can affect the run to be measured.

A baseline measured on warm engines once inflated TTFT twofold and faked a 44 % gain. So every arm starts from engines
whose own metrics show that they are new, and the metrics are kept beside the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import httpx
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from launch.freshness.gpus import FOREIGN, UNKNOWN, GpuProof, fleet_gpus, judge_gpus, process_tree
from launch.hardware.gpus import GpuInventory, read_inventory
from launch.run import guard
from launch.run.files import replace_file, required
from launch.run.processes import same_process
from launch.run.state import ProcessState

FRESH_FILE = "fresh.json"
SCHEMA = 2
CLOCK_TOLERANCE_S = 2.0
"""Linux gives process start times relative to a boot time in whole seconds, so they may lie up to a second early."""
_TIMEOUT_S = 5.0
_REQUIRED_AND_ZERO = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
_WORK_COUNTERS = ("vllm:prefix_cache_queries_total", "vllm:prompt_tokens_total")
"""Every prompt an engine ever computed is in one of these, so at least one must be reported."""
_ZERO_IF_REPORTED = (
    *_WORK_COUNTERS,
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)
"""A counter with labels of its own may be absent until it first counts; names as vLLM 0.18.1 and later export them."""
_START_TIME = "process_start_time_seconds"


class StaleEngineError(RuntimeError):
    """A fleet that is not fresh; the message names every instance and the reason."""


class EngineFacts(msgspec.Struct, kw_only=True):
    """Facts that one engine reported."""

    instance: str
    url: str
    metrics: dict[str, float]
    """Summed over an engine's labels."""
    engine_ids: list[str]
    """From the bootstrap server; empty for an engine without one."""
    version: str | None = None
    """From /version; None when the engine has none."""
    pid: int = 0
    """0 for an engine this launcher did not start."""
    process_started_unix_s: float | None = None
    """Creation time of the process, or its guard, by the operating system; None for one on another machine."""
    command_sha256: str | None = None
    """SHA-256 of the engine's command line, its arguments joined by NUL."""
    problems: list[str] = msgspec.field(default_factory=list)


class FreshProof(msgspec.Struct, kw_only=True):
    """The facts about a whole fleet at one moment."""

    checked_unix_s: float
    since_unix_s: float
    """The engines must have started after this."""
    previous_engine_ids: list[str]
    engines: list[EngineFacts]
    gpus: GpuProof = msgspec.field(default_factory=lambda: GpuProof(status=UNKNOWN, reason="not asked"))
    schema: int = SCHEMA

    @property
    def fresh(self) -> bool:
        """True if there is no reason against any engine, or against exclusive use of the GPUs."""
        return self.gpus.status != FOREIGN and not any(engine.problems for engine in self.engines)

    @property
    def warnings(self) -> list[str]:
        """Facts that the proof could not establish."""
        return [f"GPUs not proved to be the fleet's own: {self.gpus.reason}"] if self.gpus.status == UNKNOWN else []

    @property
    def engine_ids(self) -> set[str]:
        """All engine ids, for the next arm's proof."""
        return {engine_id for engine in self.engines for engine_id in engine.engine_ids}


async def prove_fresh(
    processes: Sequence[ProcessState],
    *,
    since_unix_s: float,
    previous_engine_ids: Collection[str] = (),
    path: Path | None = None,
    gpus: GpuInventory | None = None,
    gpus_before: GpuInventory | None = None,
) -> FreshProof:
    """Read every engine's metrics and check them; proxies among the processes are left out.

    Args:
        processes: the fleet's processes.
        since_unix_s: start of the arm; an engine that started earlier is stale.
        previous_engine_ids: ids of the previous arm's engines, none of which may appear again.
        path: file for the proof, also written when it fails.
        gpus: the machine's GPUs now; default: from NVML.
        gpus_before: the GPUs right before the fleet started.

    Raises:
        StaleEngineError: an engine is not fresh, or does not report a required metric, or another process computes on a
            GPU of the fleet.
        StartError: the proof cannot be written.
    """
    engines = [process for process in processes if process.kind != "proxy"]
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
        facts = await asyncio.gather(*(_ask(engine, client) for engine in engines))
    for found in facts:
        found.problems += _problems(found, since_unix_s, previous_engine_ids)
    repeated = _repeated_ids(facts)
    for found in facts:
        found.problems += [
            f"shares engine id {one} with another instance" for one in found.engine_ids if one in repeated
        ]
    inventory = gpus if gpus is not None else await asyncio.to_thread(read_inventory)
    own_pids = process_tree([process.pid for process in processes if process.pid > 0])
    proof = FreshProof(
        checked_unix_s=time.time(),
        since_unix_s=since_unix_s,
        previous_engine_ids=sorted(previous_engine_ids),
        engines=list(facts),
        gpus=judge_gpus(inventory, fleet_gpus(engines, inventory), own_pids, gpus_before),
    )
    if path is not None:
        _write(path, proof)
    if not proof.fresh:
        reasons = [f"{found.instance}: {problem}" for found in facts for problem in found.problems]
        fix = "Restart its engines before measuring." if reasons else ""
        if proof.gpus.foreign:
            reasons += proof.gpus.foreign
            fix += " End the other processes on its GPUs, or give it other GPUs."
        raise StaleEngineError(f"the fleet is not fresh: {'; '.join(reasons)}. {fix.strip()}")
    return proof


def _write(path: Path, proof: FreshProof) -> None:
    with required():
        replace_file(path, msgspec.json.format(msgspec.json.encode(proof), indent=2) + b"\n")


async def _ask(engine: ProcessState, client: httpx.AsyncClient) -> EngineFacts:
    facts = EngineFacts(instance=engine.name, url=engine.url, metrics={}, engine_ids=[])
    if engine.pid > 0 and same_process(engine.pid, engine.created_unix_s):
        facts.pid, facts.process_started_unix_s = engine.pid, engine.created_unix_s
        facts.command_sha256 = _command_sha256(engine.pid)
    try:
        response = await client.get(f"{engine.url}/metrics")
        response.raise_for_status()
        wanted = {*_REQUIRED_AND_ZERO, *_ZERO_IF_REPORTED, _START_TIME}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name in wanted:
                    facts.metrics[sample.name] = facts.metrics.get(sample.name, 0.0) + sample.value
    except (httpx.HTTPError, ValueError) as error:
        facts.problems.append(f"/metrics cannot be read ({type(error).__name__}: {error})")
    facts.version = await _version(engine.url, client)
    if engine.bootstrap_url is not None:
        try:
            response = await client.get(f"{engine.bootstrap_url}/query")
            response.raise_for_status()
            facts.engine_ids = [str(rank["engine_id"]) for rank in response.json().values()]
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            facts.problems.append(f"bootstrap /query cannot be read ({type(error).__name__}: {error})")
    return facts


async def _version(url: str, client: httpx.AsyncClient) -> str | None:
    try:
        response = await client.get(f"{url}/version")
        response.raise_for_status()
        return str(response.json()["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def _command_sha256(pid: int) -> str | None:
    try:
        command = psutil.Process(pid).cmdline()
    except psutil.Error:
        return None
    if guard.__file__ in command:  # its own arguments differ from start to start: the launcher's pid is one
        command = command[command.index(guard.__file__) + 2 :]
    return hashlib.sha256("\0".join(command).encode(errors="surrogateescape")).hexdigest()


def _problems(facts: EngineFacts, since_unix_s: float, previous: Collection[str]) -> list[str]:
    if not facts.metrics:
        return []
    metrics, process_started = facts.metrics, facts.process_started_unix_s
    problems = [f"does not report {name}" for name in _REQUIRED_AND_ZERO if name not in metrics]
    if not any(name in metrics for name in _WORK_COUNTERS):
        problems.append(f"reports none of {', '.join(_WORK_COUNTERS)}")
    for name in (*_REQUIRED_AND_ZERO, *_ZERO_IF_REPORTED):
        value = metrics.get(name, 0.0)
        if value != 0 or math.isnan(value):
            problems.append(f"{name} is {value:g}, not 0")
    # With several API servers prometheus_client exports no start time; then use the kernel's.
    started = metrics.get(_START_TIME, process_started)
    if started is None:
        problems.append(f"does not report {_START_TIME}")
    elif started < since_unix_s - CLOCK_TOLERANCE_S:
        problems.append(f"started {since_unix_s - started:.1f} s before the arm did")
    elif process_started is not None and started < process_started - CLOCK_TOLERANCE_S:
        problems.append(
            f"the process behind its URL started {process_started - started:.1f} s before the one the launcher started"
        )
    problems += [
        f"engine id {one} was already present in the previous arm" for one in facts.engine_ids if one in previous
    ]
    return problems


def _repeated_ids(facts: Sequence[EngineFacts]) -> set[str]:
    ids = [engine_id for found in facts for engine_id in found.engine_ids]
    return {engine_id for engine_id in ids if ids.count(engine_id) > 1}
