"""One arm of an experiment: start a fleet, prove it fresh, replay one trace, collect the proxy's records, stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from launch.engines.capacity import kv_capacity_tokens
from launch.fleet.file import FleetFile
from launch.freshness.gpus import idle_inventory
from launch.freshness.proof import FRESH_FILE, FreshProof, prove_fresh
from launch.hardware.processors import ProcessorSampler, ProcessorUse
from launch.hardware.telemetry import TELEMETRY_FILE, TelemetrySampler
from launch.run.proxy_access import ProxyAccess
from launch.run.supervisor import Fleet
from replayer.records.breakdown_rows import read_objects
from replayer.records.runs import RequestRecord, Run
from replayer.replay.plan import Plan
from replayer.replay.replay import ReplayOptions, replay_trace
from replayer.report.inputs import Row
from replayer.traces.trace import Trace

RUN_FILE = "run.jsonl"
BREAKDOWN_FILE = "breakdown.jsonl"
PROCESSORS_FILE = "processors.json"
_SETTLE_S = 0.3
"""Wait after the last request: longer than the supervisor takes to notice the end of a process."""
_TIMEOUT_S = 30.0
_GPU_IDLE_S = 10.0
"""Longest wait for the previous arm's GPU memory to be freed."""


class ArmError(RuntimeError):
    """An arm without valid figures; the message says what happened."""


@dataclass(frozen=True)
class ArmResult:
    """Records and proofs of one arm."""

    label: str
    run: Run
    breakdown: list[Row]
    processors: ProcessorUse
    proof: FreshProof
    kv_capacity_tokens: int | None = None
    """KV pool of one engine; None where engines do not report it."""
    telemetry: str = ""
    """Reason for missing or incomplete GPU telemetry; empty when ``telemetry.csv`` is complete."""

    @property
    def warnings(self) -> list[str]:
        """Reasons to distrust the figures."""
        warning = self.processors.warning
        return [*([warning] if warning else []), *self.proof.warnings]


async def run_arm(
    label: str,
    fleet: FleetFile,
    trace: Trace,
    options: ReplayOptions,
    arm_dir: Path,
    *,
    previous_engine_ids: Collection[str] = (),
    on_phase: Callable[[str], None] = lambda phase: None,
    on_start: Callable[[Plan, int], None] | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> ArmResult:
    """Start the fleet, prove it fresh, replay the trace against its proxy, collect, stop.

    Where the machine has GPUs their telemetry goes to ``telemetry.csv`` while the trace is replayed.

    Args:
        label: name of the arm in records and reports.
        fleet: engines and proxy, the policy included.
        trace: the trace to replay.
        options: settings of the replay; ``endpoint``, ``model`` and ``label`` are filled in.
        arm_dir: directory for logs, state, proof and records.
        previous_engine_ids: engine ids of the previous arm (see `launch.freshness.proof`).
        on_phase: called with "starting", "replaying", "stopping".
        on_start: passed on to the replay.
        on_record: passed on to the replay.

    Raises:
        StartError: the fleet did not start.
        StaleEngineError: an engine is not fresh.
        ArmError: a process ended during the replay, or the proxy's records cannot be read.
    """
    on_phase("starting")
    gpus_before = await idle_inventory(_GPU_IDLE_S) if fleet.kind != "sim" else None
    since_unix_s = time.time()
    async with Fleet(fleet, arm_dir, source=label, defer_warmup=True) as running:
        proof = await prove_fresh(
            running.state.processes,
            since_unix_s=since_unix_s,
            previous_engine_ids=previous_engine_ids,
            path=arm_dir / FRESH_FILE,
            gpus_before=gpus_before,
        )
        await running.finish_start()
        capacity = await kv_capacity_tokens(fleet.url(0))
        on_phase("replaying")
        options = msgspec.structs.replace(options, label=label, endpoint=fleet.proxy_url(), model=fleet.request_model)
        telemetry = TelemetrySampler(arm_dir / TELEMETRY_FILE)
        async with telemetry, ProcessorSampler() as sampler:
            run = await replay_trace(trace, arm_dir / RUN_FILE, options, on_start=on_start, on_record=on_record)
            use = sampler.use
        await asyncio.sleep(_SETTLE_S)
        if running.unexpected_exits:
            raise ArmError(f"{label}: {'; '.join(running.unexpected_exits)}. The run is not a measurement.")
        await _fetch_breakdown(running.proxy_access, len(run.records), arm_dir / BREAKDOWN_FILE)
        _write(arm_dir / PROCESSORS_FILE, msgspec.json.encode(use))
        on_phase("stopping")
    return ArmResult(
        label,
        run,
        read_objects(arm_dir / BREAKDOWN_FILE),
        use,
        proof,
        kv_capacity_tokens=capacity,
        telemetry=telemetry.problem or "",
    )


async def _fetch_breakdown(access: ProxyAccess, requests: int, path: Path) -> None:
    try:
        async with access.client(_TIMEOUT_S) as client:
            query: dict[str, str | int] = {"limit": max(1, requests), "format": "jsonl"}
            response = await client.get(f"{access.admin_url}/breakdown", params=query)
            response.raise_for_status()
    except httpx.HTTPError as error:
        raise ArmError(f"the proxy's /breakdown cannot be read ({type(error).__name__}: {error})") from error
    _write(path, response.content)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
