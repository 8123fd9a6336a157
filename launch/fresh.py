"""Proof that a fleet is fresh: nothing an earlier run left behind can help or hurt the run about to be measured.

A baseline measured on warm engines once inflated TTFT twofold and faked a 44 % gain; so every arm starts from engines
whose own figures say that they are new, and the figures are kept beside the run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from launch.state import ProcessState

FRESH_FILE = "fresh.json"
CLOCK_TOLERANCE_S = 2.0
"""Linux gives process start times relative to a boot time in whole seconds, so they may lie up to a second early."""
_TIMEOUT_S = 5.0
_MUST_BE_ZERO = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
)
_START_TIME = "process_start_time_seconds"


class StaleEngineError(RuntimeError):
    """A fleet that is not fresh; the message names every instance and the fact against it."""


class EngineFacts(msgspec.Struct, kw_only=True):
    """What one engine said of itself."""

    instance: str
    url: str
    metrics: dict[str, float]
    engine_ids: list[str]
    """From the bootstrap server; empty for an engine without one."""
    problems: list[str] = msgspec.field(default_factory=list)


class FreshProof(msgspec.Struct, kw_only=True):
    """The facts about a whole fleet at one moment."""

    checked_unix_s: float
    since_unix_s: float
    """The engines must have started after this."""
    previous_engine_ids: list[str]
    engines: list[EngineFacts]

    @property
    def fresh(self) -> bool:
        """Whether nothing speaks against any engine."""
        return not any(engine.problems for engine in self.engines)

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
) -> FreshProof:
    """Ask every engine for its figures and check them; proxies among the processes are left out.

    Args:
        processes: the fleet's processes.
        since_unix_s: start of the arm; an engine that started earlier is stale.
        previous_engine_ids: ids of the engines of the arm before, none of which may appear again.
        path: where to write the proof, also when it fails.

    Raises:
        StaleEngineError: an engine is not fresh, or does not tell a figure that is needed.
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
    proof = FreshProof(
        checked_unix_s=time.time(),
        since_unix_s=since_unix_s,
        previous_engine_ids=sorted(previous_engine_ids),
        engines=list(facts),
    )
    if path is not None:
        _write(path, proof)
    if not proof.fresh:
        told = "; ".join(f"{found.instance}: {problem}" for found in facts for problem in found.problems)
        raise StaleEngineError(f"the fleet is not fresh: {told}. Restart its engines before measuring.")
    return proof


def _write(path: Path, proof: FreshProof) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(proof), indent=2) + b"\n")


async def _ask(engine: ProcessState, client: httpx.AsyncClient) -> EngineFacts:
    facts = EngineFacts(instance=engine.name, url=engine.url, metrics={}, engine_ids=[])
    try:
        response = await client.get(f"{engine.url}/metrics")
        response.raise_for_status()
        wanted = {*_MUST_BE_ZERO, _START_TIME}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name in wanted:
                    facts.metrics[sample.name] = facts.metrics.get(sample.name, 0.0) + sample.value
    except (httpx.HTTPError, ValueError) as error:
        facts.problems.append(f"/metrics cannot be read ({type(error).__name__}: {error})")
    if engine.bootstrap_url is not None:
        try:
            response = await client.get(f"{engine.bootstrap_url}/query")
            response.raise_for_status()
            facts.engine_ids = [str(rank["engine_id"]) for rank in response.json().values()]
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            facts.problems.append(f"bootstrap /query cannot be read ({type(error).__name__}: {error})")
    return facts


def _problems(facts: EngineFacts, since_unix_s: float, previous: Collection[str]) -> list[str]:
    if not facts.metrics:
        return []
    problems = []
    for name in _MUST_BE_ZERO:
        value = facts.metrics.get(name)
        if value is None:
            problems.append(f"does not tell {name}")
        elif value != 0 or math.isnan(value):
            problems.append(f"{name} is {value:g}, not 0")
    started = facts.metrics.get(_START_TIME)
    if started is None:
        problems.append(f"does not tell {_START_TIME}")
    elif started < since_unix_s - CLOCK_TOLERANCE_S:
        problems.append(f"started {since_unix_s - started:.1f} s before the arm did")
    problems += [f"engine id {one} was already there in the arm before" for one in facts.engine_ids if one in previous]
    return problems


def _repeated_ids(facts: Sequence[EngineFacts]) -> set[str]:
    ids = [engine_id for found in facts for engine_id in found.engine_ids]
    return {engine_id for engine_id in ids if ids.count(engine_id) > 1}
