"""Begin an experiment in a directory, or resume one if none of the inputs of its results has changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.experiment.definition.file import ExperimentError, LoadedExperiment, parse_experiment
from launch.experiment.definition.fleets import clock_scale
from launch.experiment.definition.inputs import TRACE_FILE, TRACE_MADE, Inputs, prepare
from launch.experiment.definition.order import plan_runs
from launch.experiment.definition.sections import SloSettings
from launch.experiment.records import state as states
from launch.experiment.records.environment import ENVIRONMENT_FILE, capture, unreadable
from launch.experiment.records.intact import damage
from launch.experiment.records.state import CONFIG_FILE, STATE_FILE, ExperimentState
from launch.run.files import replace_file

_BEGINNING = ".beginning"
"""Marks a directory whose experiment has no state yet; whoever finds it knows that the files in it are of no use."""


def not_begun(directory: Path) -> bool:
    """True if the start of an experiment was cut, by a kill or a crash, before anything could be run."""
    return (directory / _BEGINNING).exists() and not (directory / STATE_FILE).exists()


def open_experiment(experiment: LoadedExperiment, directory: Path) -> tuple[ExperimentState, Inputs]:
    """Begin an experiment in a new or empty directory.

    Raises:
        ExperimentError: the directory is in use or cannot be written, or an input is refused.
    """
    if not_begun(directory):
        _empty(directory)
    if directory.exists() and any(one.name != ".lock" for one in directory.iterdir()):
        raise ExperimentError(
            f"{directory}: is not empty; choose another --output, or --resume to continue the experiment in it"
        )
    try:
        return _begin(experiment, directory)
    except BaseException as error:
        # Neither another start nor --resume would take the half of it.
        _empty(directory)
        if isinstance(error, OSError):
            raise ExperimentError(f"{error.filename or directory}: {error.strerror}; nothing was run") from error
        raise


def _empty(directory: Path) -> None:
    """Remove what `_begin` writes; the marker last."""
    made = (TRACE_FILE, CONFIG_FILE, ENVIRONMENT_FILE, STATE_FILE)
    for path in [*(directory / name for name in made), *directory.glob(".*.json.*"), directory / _BEGINNING]:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _begin(experiment: LoadedExperiment, directory: Path) -> tuple[ExperimentState, Inputs]:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _BEGINNING).touch()
    settings = experiment.settings
    inputs = prepare(experiment, directory)
    (directory / CONFIG_FILE).write_text(experiment.text, encoding="utf-8")
    environment = capture(inputs.files, inputs.fleets.values(), sys.argv)
    states.write_json(directory / ENVIRONMENT_FILE, environment)
    inside = inputs.trace_path.parent == directory
    state = ExperimentState(
        name=settings.name,
        backend=settings.backend.kind,
        baseline=settings.baseline_arm,
        arms=list(settings.arms),
        order=settings.order,
        source=str(experiment.source),
        overrides=list(experiment.overrides),
        config=experiment.config,
        config_sha256=experiment.sha256,
        files=inputs.files,
        trace=states.TraceState(
            path=inputs.trace_path.name if inside else str(inputs.trace_path), sha256=inputs.trace_sha256
        ),
        clock_scale=next((clock_scale(fleet) for fleet in inputs.fleets.values()), 1.0),
        started_unix_s=time.time(),
        runs=states.planned(plan_runs(settings)),
    )
    states.write_experiment(directory, state)
    (directory / _BEGINNING).unlink(missing_ok=True)
    return state, inputs


def reopen_experiment(experiment: LoadedExperiment, directory: Path) -> tuple[ExperimentState, Inputs]:
    """Resume an experiment; runs in progress when it ended count as interrupted, those with lost files as damaged.

    Raises:
        ExperimentError: there is none, its settings or inputs have changed since, or records cannot be read.
    """
    state = states.read_experiment(directory)
    changes = states.config_changes(_as_accepted_now(state.config), experiment.config)
    if changes:
        raise _changed(directory, changes)
    made = directory / TRACE_FILE
    kept = made.exists()
    inputs = prepare(experiment, directory)
    texts = {"experiment", "fleet"}  # their texts; their contents are compared as the settings and the arms' fleets
    for name in sorted((state.files.keys() | inputs.files.keys()) - texts):
        before, now = state.files.get(name), inputs.files.get(name)
        if before != now:
            remedy = f"; remove {made}, and it is made again" if name == TRACE_MADE and kept else ""
            changes.append(f"{name}: its SHA-256 was {_short(before)}, now {_short(now)}{remedy}")
    if changes:
        raise _changed(directory, changes)
    for run in state.runs:
        if run.state == states.RUNNING:
            run.state = states.INTERRUPTED
            run.reasons = ["the runner was killed"]
        elif run.state == states.DONE:
            _check_records(directory, run)
    return state, inputs


def restore(experiment: LoadedExperiment, directory: Path, state: ExperimentState, inputs: Inputs) -> Iterator[str]:
    """Write again what a resumed experiment has lost of its own files; yields one sentence for each.

    Raises:
        ExperimentError: one cannot be written.
    """
    config, environment = directory / CONFIG_FILE, directory / ENVIRONMENT_FILE
    try:
        damaged = not config.is_file() or states.mark(config).sha256 != state.config_sha256
        if damaged and experiment.sha256 == state.config_sha256:
            replace_file(config, experiment.text.encode())
            yield f"{CONFIG_FILE} was lost or changed; it is the experiment's file again"
        lost = not environment.is_file()
        if lost or unreadable(environment):
            states.write_json(environment, capture(inputs.files, inputs.fleets.values(), sys.argv))
            was = "lost" if lost else "damaged"
            yield f"{ENVIRONMENT_FILE} was {was}; the new one has the conditions of now, not of the earlier runs"
    except OSError as error:
        raise ExperimentError(f"{error.filename or directory}: {error.strerror}") from error


def _check_records(directory: Path, run: states.RunState) -> None:
    """Take a finished run out of the results if its files are not those it left."""
    try:
        found = damage(directory / run.path, run)
    except OSError as error:
        raise ExperimentError(f"{error.filename or directory / run.path}: cannot be read ({error.strerror})") from error
    if found:
        run.state, run.reasons = states.DAMAGED, found


def _as_accepted_now(config: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings without what earlier versions accepted and a file is refused for now: it had no effect."""
    try:
        unused = parse_experiment(config, recorded=True).comparison.slo.tokens_unused
    except ExperimentError:
        return config
    if not unused:
        return config
    comparison = config["comparison"]
    slo = {**comparison["slo"], "tokens": SloSettings.model_fields["tokens"].default}
    return {**config, "comparison": {**comparison, "slo": slo}}


def _changed(directory: Path, changes: list[str]) -> ExperimentError:
    return ExperimentError(
        f"{directory}: the experiment has changed since it began, and runs with different inputs must not be mixed:\n  "
        + "\n  ".join(changes)
        + "\nUndo the changes to continue, or start again in another --output."
    )


def _short(digest: str | None) -> str:
    return "missing" if digest is None else digest[:12]
