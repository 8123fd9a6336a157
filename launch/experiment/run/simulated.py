"""One simulated run: ``python -m sim simulate`` in a child process, which dies with this one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from launch.arm import BREAKDOWN_FILE, RUN_FILE, ArmError
from launch.engines.commands import ProcessSpec
from launch.experiment.definition.file import LoadedExperiment
from launch.experiment.definition.inputs import Inputs, changed_modules, reading
from launch.experiment.definition.order import Slot, noise_seed
from launch.experiment.records.freshness import simulated_proof
from launch.experiment.records.record import Callbacks, Measured
from launch.experiment.records.state import write_json
from launch.freshness.proof import FRESH_FILE
from launch.run.processes import ManagedProcess, finish_despite_cancellation, stop_processes
from policies.admission.base import DEFAULT_RULE, MAX_HOLD_S
from replayer.records.runs import read_run

_SIMULATOR = "simulate"
_POLL_S = 0.05
_GRACE_S = 3.0


async def measure_simulated(
    experiment: LoadedExperiment, slot: Slot, inputs: Inputs, run_dir: Path, callbacks: Callbacks
) -> Measured:
    """Make one run in a separate simulator process.

    Raises:
        StartError: the process could not be started.
        ArmError: it failed, and the message has the last line of its log, or a policy's module has changed.
        RecordError: it wrote no usable records.
    """
    command = simulator_command(experiment, slot, inputs.trace_path, run_dir)
    spec = ProcessSpec(name=_SIMULATOR, kind="simulator", command=tuple(command))
    process = ManagedProcess(spec, run_dir / f"{_SIMULATOR}.log")
    callbacks.phase("simulating")
    try:
        process.start()
        write_json(run_dir / FRESH_FILE, simulated_proof(process))
        while True:
            if process.exited():
                break
            await asyncio.sleep(_POLL_S)
        code = process.reap()
    finally:
        await finish_despite_cancellation(stop_processes([process], _GRACE_S), name="simulator-stop")
    if code != 0:
        last = process.log_tail(1).strip() or "it wrote no message"
        raise ArmError(f"the simulator ended with code {code}: {last} (complete log: {process.log_path})")
    if changed := changed_modules(experiment, inputs):
        raise ArmError(f"{changed[0]} has changed since the experiment began: undo that and --resume, or start again")
    run = await asyncio.to_thread(read_run, run_dir / RUN_FILE)
    if run.incomplete:
        raise ArmError(f"the simulator left incomplete records in {run_dir / RUN_FILE}")
    backend = experiment.settings.simulated(slot.arm)
    reported = run.header.options.get("kv_capacity_tokens", backend.pool_tokens)
    capacity = reported if isinstance(reported, int) else None
    return Measured(run, backend.instances, capacity, command=command)


def simulator_command(experiment: LoadedExperiment, slot: Slot, trace: Path, run_dir: Path) -> list[str]:
    """Command line of the simulator for one run; options at their defaults are left out."""
    settings = experiment.settings
    backend, arm, replay = settings.simulated(slot.arm), settings.arms[slot.arm], settings.replay
    other = arm.admission.name != DEFAULT_RULE
    options: dict[str, object] = {
        "output": run_dir / RUN_FILE,
        "breakdown-output": run_dir / BREAKDOWN_FILE if backend.breakdown else None,
        "label": slot.arm,
        "policy": arm.policy.name,
        "planner": arm.offload.planner,
        "admission": arm.admission.name if other else None,
        "max-hold-s": arm.admission.max_hold_s if arm.admission.max_hold_s != MAX_HOLD_S else None,
        "instances": backend.instances,
        "profile": backend.profile,
        "pool-tokens": backend.pool_tokens,
        "max-num-seqs": backend.max_num_seqs,
        "scheduling-policy": backend.scheduling_policy if backend.scheduling_policy != "fcfs" else None,
        "max-num-batched-tokens": backend.max_num_batched_tokens,
        "long-prefill-token-threshold": backend.long_prefill_token_threshold or None,
        "transport": backend.transport,
        "role": None if backend.role is None else backend.role.value,
        "prefill-instances": backend.prefill_instances or None,
        "slowdown": backend.slowdown if backend.slowdown != 1 else None,
        "speeds": ",".join(map(str, backend.speeds)) or None,
        "seed": noise_seed(settings, slot),
        "arrival-jitter-s": backend.noise.arrival_jitter_s,
        "speed-sigma": backend.noise.speed_sigma,
        "arrival-speed": replay.time_scale,
        "think-speed": replay.think_scale,
        "request-limit": replay.request_limit,
        "idle-gap-cap-s": replay.idle_gap_cap_s,
        "max-inflight-sessions": replay.max_inflight_sessions,
        **{name.replace("_", "-"): value for name, value in reading(settings.trace, replay).given().items()},
    }
    flags = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    given = {"policy": arm.policy.params, "planner": arm.offload.params, "admission": arm.admission.params}
    for kind, params in given.items():
        for name, value in params.items():
            flags += [f"--{kind}-param", f"{name}={msgspec.json.encode(value).decode()}"]
    return [sys.executable, "-m", "sim", "simulate", str(trace), *flags]
