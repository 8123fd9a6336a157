"""One run on a live fleet: started, proved fresh, replayed against, stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from launch.arm import run_arm
from launch.experiment.fleets import clock_scale, placed_fleet
from launch.experiment.freshness import Known
from launch.experiment.inputs import plan_options
from launch.experiment.order import Slot
from launch.experiment.record import Callbacks, Measured
from launch.experiment.settings import LoadedExperiment
from launch.fleet import FleetFile
from launch.state import StateError, read_state
from proxy.settings import BreakdownSettings
from replayer.replay import ReplayOptions
from replayer.trace import Trace

_TIMEOUT_S = 5.0
_CACHE_INFO = "vllm:cache_config_info"


async def measure_live(
    experiment: LoadedExperiment, slot: Slot, trace: Trace, run_dir: Path, known: Known, callbacks: Callbacks
) -> Measured:
    """One run on a fleet of its own.

    Raises:
        StaleEngineError: the fleet is not fresh.
        StartError, ArmError: the fleet did not start, or the run is not a measurement.
        ExperimentError: there are no free ports.
    """
    fleet = placed_fleet(experiment, slot.arm)
    fleet = with_room(fleet, len(trace.requests))
    replay = experiment.settings.replay
    options = ReplayOptions(
        plan=plan_options(experiment),
        clock_scale=clock_scale(fleet),
        max_inflight_sessions=replay.max_inflight_sessions,
        timeout_s=replay.timeout_s,
        seed=slot.seed,
        prompt_mode=replay.prompt_mode,
        token_low=replay.token_low,
        token_high=replay.token_high,
    )
    asking: list[asyncio.Task[int | None]] = []

    def on_phase(phase: str) -> None:
        callbacks.phase(phase)
        if phase == "replaying":  # the engines run, and no request is under way yet
            asking.append(asyncio.create_task(kv_capacity_tokens(fleet.url(0)), name="kv-capacity"))

    try:
        result = await run_arm(
            slot.arm,
            fleet,
            trace,
            options,
            run_dir,
            previous_engine_ids=set(known.engine_ids),
            on_phase=on_phase,
            on_record=callbacks.record,
        )
        capacity = await asking[0] if asking else None
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    warnings = [*result.warnings, *_recycled(run_dir)]
    return Measured(result.run, fleet.instances, capacity, warnings, fleet=fleet.model_dump(mode="json"))


async def kv_capacity_tokens(url: str) -> int | None:
    """KV pool of an engine in tokens, from what its ``/metrics`` tell of its cache; None where they do not."""
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            response = await client.get(f"{url}/metrics")
            response.raise_for_status()
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name == _CACHE_INFO:
                    return int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    except (httpx.HTTPError, ValueError, KeyError):
        return None
    return None


def with_room(fleet: FleetFile, requests: int) -> FleetFile:
    """The fleet with a proxy that keeps a breakdown row for every request of the run."""
    breakdown = dict(fleet.proxy.get("breakdown") or {})
    if breakdown.get("capacity", BreakdownSettings.model_fields["capacity"].default) >= requests:
        return fleet
    breakdown["capacity"] = requests
    return fleet.model_copy(update={"proxy": {**fleet.proxy, "breakdown": breakdown}})


def _recycled(run_dir: Path) -> list[str]:
    try:
        processes = read_state(run_dir).processes
    except StateError:
        return []
    return [
        f"{process.name} was started anew {process.recycles} times during the run, at the proxy's wish: its caches "
        "were lost each time"
        for process in processes
        if process.recycles
    ]
