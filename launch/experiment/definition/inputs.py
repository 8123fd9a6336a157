"""Shared inputs of an experiment's runs: the trace as replayed, the arms' fleets, and the hashes of all of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch.experiment.definition.engines import check_engines
from launch.experiment.definition.file import ExperimentError, LoadedExperiment
from launch.experiment.definition.fleets import arm_fleets, fleet_source
from launch.experiment.definition.sections import ReplaySettings, SimulatedBackend, TraceSettings
from launch.fleet.file import FleetFile
from replayer.records.own_code import own_code
from replayer.replay.plan import Plan, PlanOptions, make_plan
from replayer.traces.formats import bailian
from replayer.traces.formats.source import file_sha256
from replayer.traces.loading import LoadOptions, load, load_trace
from replayer.traces.shorten import shortened
from replayer.traces.synth import SynthOptions, synthetic_trace
from replayer.traces.trace import Trace, TraceError
from warmroute_yaml import hardware_file, hardware_names

TRACE_FILE = "trace.jsonl"
TRACE_MADE = "trace as replayed"
"""Kind of that file among the inputs' hashes."""
_PROJECT = Path(__file__).resolve().parents[3]
_PROBE_REQUESTS = 256
_NO_CAP_S = 3.2e9
"""A century: no idle gap of a trace is longer."""
_MODULE = "module "


@dataclass(frozen=True)
class Inputs:
    """Shared inputs of an experiment's runs."""

    trace_path: Path
    """The replayed trace: the file given, or the trace made of it in the experiment's directory."""
    trace_sha256: str
    fleets: dict[str, FleetFile]
    """By arm; empty for a simulated experiment."""
    files: dict[str, str]
    """SHA-256 of every input file of the experiment, by kind."""


def trace_file(experiment: LoadedExperiment) -> Path | None:
    """The trace file: relative to the current folder, else to the experiment file's, else to the project.

    Raises:
        ExperimentError: there is none.
    """
    path = experiment.settings.trace.path
    if path is None:
        return None
    places = [path, experiment.source.parent / path, _PROJECT / path]
    for place in places:
        if place.exists():
            return place.resolve()
    raise ExperimentError(f"trace: nothing at {path} (also looked in {experiment.source.parent} and {_PROJECT})")


def build_trace(experiment: LoadedExperiment) -> Trace:
    """The replayed trace, in memory.

    Raises:
        ExperimentError: there is no file.
        TraceError: the file is not a good trace.
    """
    wanted = experiment.settings.trace
    if wanted.synth is not None:
        made = wanted.synth
        trace = synthetic_trace(
            SynthOptions(
                requests=made.requests,
                seed=made.seed,
                rate_per_s=made.rate_per_s,
                length_scale=made.length_scale,
                gap_scale=made.gap_scale,
                block_tokens=made.block_tokens,
            )
        )
    else:
        path = trace_file(experiment)
        assert path is not None
        options = LoadOptions(
            block_tokens=wanted.block_tokens,
            time_unit=wanted.time_unit,
            sessions=wanted.sessions,
            idle_gap_cap_s=_idle_gap_cap_s(experiment.settings.replay),
        )
        trace = load(path, options)
    requests = trace.requests
    if wanted.window_s is not None:
        end_s = requests[0].timestamp_s + wanted.window_s
        requests = [request for request in requests if request.timestamp_s < end_s]
    if wanted.max_output_tokens is not None:
        limit = wanted.max_output_tokens
        requests = [msgspec.structs.replace(one, output_length=min(one.output_length, limit)) for one in requests]
    trace = msgspec.structs.replace(trace, requests=requests)
    return trace if wanted.prompt_scale is None else shortened(trace, wanted.prompt_scale)


def reading(wanted: TraceSettings, replay: ReplaySettings) -> LoadOptions:
    """Options with which every run reads `Inputs.trace_path`.

    A trace that was made has seconds, and its arrivals are those that were accepted when it was made.
    """
    if wanted.as_stored:
        return LoadOptions(idle_gap_cap_s=_idle_gap_cap_s(replay))
    block_tokens = wanted.block_tokens if wanted.synth is None else wanted.synth.block_tokens
    return LoadOptions(block_tokens=block_tokens, time_unit="s")


def _idle_gap_cap_s(replay: ReplaySettings) -> float:
    """Longest idle gap of a conversation for the loader, which knows no absence of a cap."""
    return _NO_CAP_S if replay.idle_gap_cap_s is None else replay.idle_gap_cap_s


def plan_options(experiment: LoadedExperiment) -> PlanOptions:
    """Scaling and cuts of the trace."""
    replay = experiment.settings.replay
    return PlanOptions(
        time_scale=replay.time_scale,
        think_scale=replay.think_scale,
        request_limit=replay.request_limit,
        idle_gap_cap_s=replay.idle_gap_cap_s,
    )


def check_noise(experiment: LoadedExperiment, trace: Trace) -> None:
    """Refuse repeats with noise of arrivals alone for a trace of one session, which has nothing to be moved against.

    Raises:
        ExperimentError: every repeat would be the same.
    """
    settings = experiment.settings
    if not isinstance(settings.backend, SimulatedBackend) or len(settings.run_seeds) == 1:
        return
    if settings.backend.noise.speed_sigma == 0 and len(trace.sessions()) == 1:
        raise ExperimentError(
            "repeats: the trace has one session, which noise.arrival_jitter_s only moves as a whole: every repeat "
            "would be the same; set backend.noise.speed_sigma, or run once"
        )


def checked_plan(experiment: LoadedExperiment, fleets: dict[str, FleetFile]) -> Plan:
    """The requests that each run sends, after the checks of `prepare`; loads the whole trace and writes nothing.

    Raises:
        ExperimentError, TraceError: an input is missing or refused.
    """
    _profiles(experiment, fleets)
    trace = build_trace(experiment)
    check_noise(experiment, trace)
    check_engines(experiment, trace.block_tokens, fleets)
    return make_plan(trace, plan_options(experiment))


def prepare(experiment: LoadedExperiment, directory: Path) -> Inputs:
    """Check all inputs of an experiment; write the trace into its directory unless the file is replayed as stored.

    Raises:
        ExperimentError: an input is missing or refused.
    """
    fleets = arm_fleets(experiment)
    files = {"experiment": experiment.sha256}
    source = fleet_source(experiment)
    if source is not None:
        files["fleet"] = hashlib.sha256(source.read_bytes()).hexdigest()
    files |= {f"fleet of arm {name}": fleet_sha256(fleet) for name, fleet in fleets.items()}
    files |= {f"hardware profile {name}": sha for name, sha in _profiles(experiment, fleets).items()}
    files |= module_hashes(experiment)
    try:
        path = trace_file(experiment)
        if path is not None:
            files["trace"] = file_sha256(path)
        if path is not None and experiment.settings.trace.as_stored:
            # An unreadable trace fails here, not in the first run.
            trace = load_trace(path, limit=_PROBE_REQUESTS)
            if len(trace.requests) < _PROBE_REQUESTS:
                check_noise(experiment, trace)
            check_engines(experiment, trace.block_tokens, fleets)
            return Inputs(path, files["trace"], fleets, files)
        trace = build_trace(experiment)
        check_noise(experiment, trace)
        check_engines(experiment, trace.block_tokens, fleets)
        made = directory / TRACE_FILE
        if not made.exists():
            bailian.write(made, trace.requests)
        files[TRACE_MADE] = file_sha256(made)
    except TraceError as error:
        raise ExperimentError(f"trace: {error}") from error
    return Inputs(made, files[TRACE_MADE], fleets, files)


def fleet_sha256(fleet: FleetFile) -> str:
    """SHA-256 of every setting of a fleet, defaults included."""
    return hashlib.sha256(fleet.model_dump_json().encode()).hexdigest()


def module_hashes(experiment: LoadedExperiment) -> dict[str, str]:
    """SHA-256 of the files of all classes that arms name as MODULE:Class, as they are now, by ``module NAME``."""
    names = [part.name for arm in experiment.settings.arms.values() for part in arm.parts.values()]
    files: dict[str, Path] = {}
    for name in sorted({name.partition(":")[0] for name in names if ":" in name}):
        files |= own_code(name)
    return {f"{_MODULE}{name}": file_sha256(file) for name, file in sorted(files.items())}


def changed_modules(experiment: LoadedExperiment, inputs: Inputs) -> list[str]:
    """Names of those that are no longer the files that the experiment began with."""
    now = module_hashes(experiment)
    before = {name: sha for name, sha in inputs.files.items() if name.startswith(_MODULE)}
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _profiles(experiment: LoadedExperiment, fleets: dict[str, FleetFile]) -> dict[str, str]:
    """SHA-256 of the hardware profiles of simulated engines."""
    settings = experiment.settings
    wanted = {fleet.sim.profile for fleet in fleets.values() if fleet.kind == "sim"}
    if isinstance(settings.backend, SimulatedBackend):
        wanted |= {settings.simulated(name).profile for name in settings.arms}
    found = {}
    for name in sorted(wanted):
        path = hardware_file(name)
        if not path.is_file():
            raise ExperimentError(
                f"hardware profile {name!r}: neither a file nor one of configs/hardware ({', '.join(hardware_names())})"
            )
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
