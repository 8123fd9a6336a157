"""Verification of a finished experiment: files, hashes, order, completeness, freshness, conditions."""

from __future__ import annotations

from pathlib import Path

import msgspec

from launch.arm import BREAKDOWN_FILE, RUN_FILE
from launch.experiment.definition.file import ExperimentError, ExperimentSettings, parse_experiment
from launch.experiment.definition.inputs import TRACE_FILE
from launch.experiment.definition.order import Slot, noise_seed, plan_runs
from launch.experiment.records import state as states
from launch.experiment.records.environment import ENVIRONMENT_FILE, unreadable
from launch.experiment.records.freshness import Known, SimulatedProof, read_proof
from launch.experiment.records.intact import damage
from launch.experiment.records.record import ARM_FILE, ArmRecord
from launch.experiment.records.state import CONFIG_FILE, ExperimentState, RunState
from launch.freshness.proof import CLOCK_TOLERANCE_S, FreshProof
from replayer.records.counted import counted
from replayer.records.runs import RecordError, Run, read_run
from replayer.traces.formats.source import file_sha256


class Findings(msgspec.Struct, kw_only=True):
    """Findings of a check of an experiment's directory."""

    problems: list[str] = msgspec.field(default_factory=list)
    """Reasons why it is not a complete experiment with sound records; empty when it is."""
    warnings: list[str] = msgspec.field(default_factory=list)
    """Remarks for readers of the results."""
    runs: int = 0
    files: int = 0
    """Files whose hashes were compared."""
    requests: int = 0

    @property
    def sound(self) -> bool:
        """True without problems."""
        return not self.problems


def verify(directory: Path) -> Findings:
    """Check a directory against its state file and its records.

    Raises:
        ExperimentError: there is no experiment in it.
    """
    state = states.read_experiment(directory)
    found = Findings(runs=len(state.runs))
    _check_whole(directory, state, found)
    settings = _settings(state, found)
    known = Known()
    previous: RunState | None = None
    for run in sorted(state.runs, key=lambda run: run.order):
        if run.state != states.DONE:
            message = "; ".join(run.reasons)
            found.problems.append(f"{run.name}: {run.state}{f' ({message})' if message else ''}")
            continue
        _check_run(directory / run.path, run, state, settings, found)
        _check_fresh(directory / run.path, run, known, found)
        if (
            previous is not None
            and state.backend == "live"
            and (run.started_unix_s or 0) < (previous.finished_unix_s or 0)
        ):
            found.warnings.append(f"{run.name}: was measured before {previous.name} had ended, not as planned")
        previous = run
    return found


def _check_whole(directory: Path, state: ExperimentState, found: Findings) -> None:
    if state.state != states.DONE:
        alive = " and still running" if state.alive else ""
        found.problems.append(f"the experiment is {state.state}{alive}, not done")
    if not (directory / ENVIRONMENT_FILE).is_file():
        found.problems.append(f"{ENVIRONMENT_FILE} is missing")
    elif reason := unreadable(directory / ENVIRONMENT_FILE):
        remedy = "`warmroute experiment run --resume` writes one of the conditions of now"
        found.problems.append(f"{ENVIRONMENT_FILE} is {reason}; {remedy}")
    config = directory / CONFIG_FILE
    if not config.is_file():
        found.problems.append(f"{CONFIG_FILE} is missing")
    elif states.mark(config).sha256 != state.config_sha256:
        found.problems.append(f"{CONFIG_FILE} is not the file the experiment was run from")
    trace = directory / state.trace.path
    if not trace.exists():
        message = f"the trace {state.trace.path} does not exist (any more); its SHA-256 was {state.trace.sha256[:12]}…"
        (found.problems if state.trace.path == TRACE_FILE else found.warnings).append(message)
    elif file_sha256(trace) != state.trace.sha256:
        found.problems.append(f"the trace {state.trace.path} has changed since the experiment ran")
    numbers = sorted(run.order for run in state.runs)
    if numbers != list(range(len(numbers))):
        found.problems.append("the runs' places in time are not 0, 1, 2, ...")


def _settings(state: ExperimentState, found: Findings) -> ExperimentSettings | None:
    """The settings, after a check that the plan follows from them."""
    try:
        settings = parse_experiment(state.config, "the settings in experiment.json", recorded=True)
    except ExperimentError as error:
        found.warnings.append(f"the order cannot be checked: {error}")
        return None
    if settings.comparison.slo.tokens_unused:
        found.warnings.append("comparison.slo.tokens has no effect: there is no length-scaled objective")
    planned = [(slot.order, slot.arm, slot.repeat, slot.seed) for slot in plan_runs(settings)]
    if planned != [(run.order, run.arm, run.repeat, run.seed) for run in state.runs]:
        found.problems.append("the runs are not those that the settings plan, in that order")
    return settings


def _check_run(
    folder: Path, run: RunState, state: ExperimentState, settings: ExperimentSettings | None, found: Findings
) -> None:
    found.problems += [f"{run.name}: {message}" for message in damage(folder, run)]
    found.files += sum(1 for name in run.files if (folder / name).is_file())
    try:
        measured = read_run(folder / RUN_FILE)
    except (RecordError, OSError) as error:
        found.problems.append(f"{run.name}: {RUN_FILE} cannot be read ({error})")
        return
    found.requests += len(measured.records)
    found.problems += [f"{run.name}: {message}" for message in _disagreements(measured, run, state, settings)]
    if (folder / BREAKDOWN_FILE).is_file():
        rows = sum(1 for line in (folder / BREAKDOWN_FILE).read_bytes().splitlines() if line.strip())
        if rows != len(measured.records):
            found.warnings.append(
                f"{run.name}: {counted(rows, 'breakdown row')} for {counted(len(measured.records), 'request')}"
            )
    found.warnings += [f"{run.name}: {warning}" for warning in run.warnings]
    try:
        record = msgspec.json.decode((folder / ARM_FILE).read_bytes(), type=ArmRecord)
    except (OSError, msgspec.MsgspecError) as error:
        found.problems.append(f"{run.name}: {ARM_FILE} cannot be read ({error})")
        return
    if (record.arm, record.repeat, record.seed, record.order) != (run.arm, run.repeat, run.seed, run.order):
        found.problems.append(f"{run.name}: {ARM_FILE} is of another run")


def _disagreements(
    measured: Run, run: RunState, state: ExperimentState, settings: ExperimentSettings | None
) -> list[str]:
    """Differences between records and plan."""
    header, differences = measured.header, []
    if measured.incomplete:
        differences.append(f"its records are not complete ({measured.incomplete})")
    if run.requests != len(measured.records):
        differences.append(f"{counted(len(measured.records), 'record')}, but the state has {run.requests}")
    expected: dict[str, object] = {
        "label": run.arm,
        "trace_sha256": state.trace.sha256,
        "clock_scale": state.clock_scale,
    }
    if settings is not None:
        replay = settings.replay
        slot = Slot(order=run.order, arm=run.arm, repeat=run.repeat, seed=run.seed)
        expected |= {
            "time_scale": replay.time_scale,
            "think_scale": replay.time_scale if replay.think_scale is None else replay.think_scale,
            "request_limit": replay.request_limit,
            "max_inflight_sessions": replay.max_inflight_sessions,
            "seed": noise_seed(settings, slot),
        }
    for name, wanted in expected.items():
        given = getattr(header, name)
        if given != wanted:
            differences.append(f"its records were made with {name} = {given!r}, planned was {wanted!r}")
    return differences


def _check_fresh(folder: Path, run: RunState, known: Known, found: Findings) -> None:
    proof = read_proof(folder)
    if proof is None:
        found.problems.append(f"{run.name}: there is no proof that its engines were fresh")
        return
    found.problems += [f"{run.name}: not fresh: {problem}" for problem in known.problems(proof)]
    known.add(run.name, proof)
    starts = (
        [proof.process_started_unix_s]
        if isinstance(proof, SimulatedProof)
        else [one.process_started_unix_s for one in proof.engines if one.process_started_unix_s is not None]
    )
    begun = (run.started_unix_s or 0) - CLOCK_TOLERANCE_S
    if any(start < begun for start in starts):
        found.problems.append(f"{run.name}: not fresh: an engine had started before the run did")
    if isinstance(proof, FreshProof):
        found.warnings += [f"{run.name}: {warning}" for warning in proof.warnings]
