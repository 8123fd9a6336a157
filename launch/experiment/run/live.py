"""One run on a live fleet: start it, prove it fresh, replay the trace, stop it."""

from __future__ import annotations

from pathlib import Path

from launch.arm import run_arm
from launch.experiment.definition.file import LoadedExperiment
from launch.experiment.definition.fleets import clock_scale, placed_fleet
from launch.experiment.definition.inputs import plan_options
from launch.experiment.definition.order import Slot
from launch.experiment.records.freshness import Known
from launch.experiment.records.record import Callbacks, Measured
from launch.fleet.file import FleetFile
from launch.run.state import StateError, read_state
from proxy.settings import BreakdownSettings
from replayer.replay.replay import ReplayOptions
from replayer.traces.trace import Trace


async def measure_live(
    experiment: LoadedExperiment, slot: Slot, trace: Trace, run_dir: Path, known: Known, callbacks: Callbacks
) -> Measured:
    """Make one run on a separate fleet.

    Raises:
        StaleEngineError: the fleet is not fresh.
        StartError, ArmError: the fleet did not start, or the run is not valid.
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
    result = await run_arm(
        slot.arm,
        fleet,
        trace,
        options,
        run_dir,
        previous_engine_ids=set(known.engine_ids),
        on_phase=callbacks.phase,
        on_record=callbacks.record,
    )
    warnings = [*result.warnings, *_recycled(run_dir)]
    settings = fleet.model_dump(mode="json")
    return Measured(result.run, fleet.instances, result.kv_capacity_tokens, warnings, fleet=settings)


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
        f"{process.name} was restarted {process.recycles} times during the run on the proxy's request: its caches "
        "were lost each time"
        for process in processes
        if process.recycles
    ]
