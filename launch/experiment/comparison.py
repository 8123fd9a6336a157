"""Comparison at the end of an experiment: every arm against the baseline over all repeats, ``comparison.json``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.arm import RUN_FILE
from launch.experiment.records.freshness import Known, read_proof
from launch.experiment.records.state import DONE, ExperimentState, RunState, write_json
from replayer.compare.arms import ArmFilesError, read_experiment
from replayer.compare.comparison import CompareOptions
from replayer.compare.conditions import ComparisonError
from replayer.compare.matrix import matrix_of
from replayer.compare.runs import compare_arms
from replayer.traces.loading import load_replayed
from replayer.traces.trace import TraceError

if TYPE_CHECKING:
    from replayer.compare.arms import ArmRuns
    from replayer.compare.comparison import Comparison

COMPARISON_FILE = "comparison.json"


def comparable(directory: Path, state: ExperimentState) -> tuple[list[RunState], list[str]]:
    """The valid runs, in order, and the reasons why others are not valid.

    A run is valid if it is done and its proof shows that its engines were fresh and served no earlier run.
    """
    good: list[RunState] = []
    refusals: list[str] = []
    known = Known()
    for run in sorted(state.runs, key=lambda run: run.order):
        proof = read_proof(directory / run.path)
        if run.state != DONE:
            reasons = "; ".join(run.reasons)
            refusals.append(f"{run.name} is not compared: {run.state}{f' ({reasons})' if reasons else ''}")
        elif proof is None:
            refusals.append(f"{run.name} is not compared: there is no proof that its engines were fresh")
        elif problems := known.problems(proof):
            refusals.append(f"{run.name} is not compared: its engines were not fresh: {'; '.join(problems)}")
        else:
            good.append(run)
        if proof is not None:
            known.add(run.name, proof)
    return good, refusals


def compare_experiment(directory: Path, state: ExperimentState) -> tuple[list[Comparison], list[str]]:
    """Every arm against the baseline, over all valid repeats; and the reasons why others were not compared.

    Raises:
        RecordError, OSError: the records of a run cannot be read.
    """
    good, refusals = comparable(directory, state)
    paths = {directory / run.path / RUN_FILE for run in good}
    try:
        found = read_experiment(directory, force=True)
    except ArmFilesError as error:
        return [], [*refusals, str(error)]
    arms: list[ArmRuns] = []
    for arm in found.arms:
        runs = [run for run in arm.runs if run.path in paths]
        if runs:
            arms.append(replace(arm, runs=runs))
    if not any(arm.label == state.baseline for arm in arms):
        return [], [*refusals, f"no run of the baseline '{state.baseline}' is left to compare with"]
    if len(arms) < 2:
        return [], [*refusals, *(["there is no arm to compare with the baseline"] if len(state.arms) > 1 else [])]
    try:
        options = found.settings.applied(CompareOptions())
        if found.trace is not None and found.trace.exists():
            options = replace(options, trace=load_replayed(found.trace, arms[0].runs[0].run.header.options))
        return compare_arms(arms, options), refusals
    except (ComparisonError, TraceError) as error:
        return [], [*refusals, str(error)]


def write_comparison(directory: Path, state: ExperimentState) -> tuple[list[Comparison], list[str]]:
    """Compare and write ``comparison.json``.

    Returns:
        The comparisons, and which runs were not compared for which reason.

    Raises:
        RecordError, OSError: the records of a run cannot be read.
    """
    found, refusals = compare_experiment(directory, state)
    rows: list[dict[str, Any]] = [comparison.as_json() for comparison in found]
    content: dict[str, Any] = {
        "experiment": state.name,
        "baseline": state.baseline,
        "comparisons": rows,
        "refused": refusals,
    }
    if found:
        content["matrix"] = matrix_of(found).as_json()
    write_json(directory / COMPARISON_FILE, content)
    return found, refusals
