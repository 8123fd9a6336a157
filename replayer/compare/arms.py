"""The arms of a comparison: each one or several replicates, from run files or from an experiment's directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from replayer.compare.comparison import KeptSettings, kept_settings
from replayer.records.json_errors import BAD_JSON
from replayer.records.runs import Run, read_run
from replayer.records.validity import calls_invalid
from replayer.traces.formats.source import file_sha256

EXPERIMENT_FILE = "experiment.json"
_SWEEP_FILE = "sweep.json"
RUN_FILE = "run.jsonl"
_DONE = "done"


class ArmFilesError(ValueError):
    """Arms that cannot be read; the message has reason and remedy."""


@dataclass(frozen=True)
class ArmRun:
    """One run of an arm."""

    run: Run
    path: Path | None = None
    repeat: str = ""
    """Name of the repeat; runs of different arms with the same name correspond to each other."""
    needs_proof: bool = False
    """The run must have a proof of freshness beside it."""
    invalid: tuple[str, ...] = ()
    """The experiment's warnings that call its figures invalid."""
    warnings: tuple[str, ...] = ()
    """The experiment's other warnings."""
    changed: str = ""
    """Reason why the file is not the one that the experiment wrote; empty if it is, or if that is not known."""


@dataclass(frozen=True)
class ArmRuns:
    """Replicates: runs of one configuration."""

    label: str
    runs: list[ArmRun]
    configuration: str = ""
    """Arms with equal configurations are replicates of each other (A/A); empty: unknown."""


@dataclass(frozen=True)
class Experiment:
    """Contents of an experiment's directory for a comparison."""

    arms: list[ArmRuns]
    """The baseline first."""
    trace: Path | None
    notes: list[str] = field(default_factory=list)
    settings: KeptSettings = field(default_factory=KeptSettings)
    """Its own settings of comparisons."""


def single(run: Run, label: str = "") -> ArmRuns:
    """An arm of one run."""
    return ArmRuns(label or run.header.label or "run", [ArmRun(run)])


def read_arm(label: str, paths: Sequence[Path]) -> ArmRuns:
    """An arm from run files.

    Args:
        label: its name; empty: the first run's label, or the stem of its file.
        paths: of its repeats.

    Raises:
        ArmFilesError: no path, a path twice, or a file without a request.
        RecordError, OSError: a file cannot be read.
    """
    if not paths:
        raise ArmFilesError(f"arm '{label}' has no run: give --arm {label or 'NAME'}=RUN.jsonl[,RUN.jsonl...]")
    repeated = [path for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if repeated:
        raise ArmFilesError(f"{repeated[0]} is given twice: the same file is not a repetition")
    runs = [ArmRun(_read(path), path) for path in paths]
    return ArmRuns(label or runs[0].run.header.label or paths[0].stem, runs)


def parse_arm(text: str) -> ArmRuns:
    """``NAME=RUN.jsonl,RUN.jsonl`` as an arm.

    Raises:
        ArmFilesError: not of that form.
        RecordError, OSError: a file cannot be read.
    """
    label, separator, files = text.partition("=")
    paths = [Path(one.strip()) for one in files.split(",") if one.strip()]
    if not separator or not label.strip() or not paths:
        raise ArmFilesError(f"--arm {text}: expected NAME=RUN.jsonl[,RUN.jsonl...], one file for each repeat")
    return read_arm(label.strip(), paths)


def parse_arms(texts: Sequence[str]) -> list[ArmRuns]:
    """Arms from their ``NAME=RUN.jsonl,...``, each under a name of its own.

    Raises:
        ArmFilesError: not of that form, or a name is given twice.
        RecordError, OSError: a file cannot be read.
    """
    names = Counter(text.partition("=")[0].strip() for text in texts if "=" in text)
    for name, count in names.items():
        if count > 1:
            raise ArmFilesError(
                f"--arm {name}=... is given {count} times: separate the repeats of an arm by commas, "
                f"--arm {name}=RUN.jsonl,RUN.jsonl, or name the arms differently"
            )
    return [parse_arm(text) for text in texts]


def unique(arms: Sequence[ArmRuns]) -> list[ArmRuns]:
    """The arms under different names: equal ones with the stem of their file, or, if that is equal too, a number."""
    stems: dict[str, set[str]] = {}
    for arm in arms:
        stems.setdefault(arm.label, set()).add(_stem(arm))
    seen: Counter[str] = Counter()
    renamed = []
    for arm in arms:
        stem = _stem(arm)
        name = arm.label if len(stems[arm.label]) == 1 or stem in {"", arm.label} else f"{arm.label} ({stem})"
        seen[name] += 1
        renamed.append(replace(arm, label=name if seen[name] == 1 else f"{name} ({seen[name]})"))
    return renamed


def _stem(arm: ArmRuns) -> str:
    """Name of the first run's file without its ending; empty for a run without one."""
    path = arm.runs[0].path if arm.runs else None
    return "" if path is None else path.stem


def read_arms(
    paths: Sequence[Path], specs: Sequence[str] = (), *, force: bool = False
) -> tuple[list[ArmRuns], Experiment | None]:
    """The arms that a command is given, the baseline first, and the experiment if it is given one.

    ``compare`` and ``report`` both read their arms here, so that they compare the same ones.

    Args:
        paths: run files, one for each arm, or the directory of one experiment.
        specs: NAME=RUN.jsonl,RUN.jsonl,... for arms that were run several times.
        force: of `read_experiment`.

    Raises:
        ArmFilesError: a directory among other arms, or arms that cannot be read.
        RecordError, OSError: a run file cannot be read.
    """
    directory = next((path for path in paths if path.is_dir()), None)
    if directory is None:
        return unique([*(read_arm("", [path]) for path in paths), *parse_arms(specs)]), None
    if len(paths) > 1 or specs:
        raise ArmFilesError(f"{directory}: an experiment's directory holds all arms; give it alone")
    experiment = read_experiment(directory, force=force)
    return experiment.arms, experiment


def read_experiment(directory: Path, *, force: bool = False) -> Experiment:
    """The runs of ``warmroute experiment run``.

    Args:
        directory: holds ``experiment.json``; run files lie under ``arms/<arm>/<repeat>/``.
        force: leave out runs that are not done, with a note, instead of refusing.

    Raises:
        ArmFilesError: not an experiment, settings that no comparison has, or a run that is not done.
        RecordError, OSError: a run file cannot be read.
    """
    plan = _plan(directory)
    names = [_name(arm) for arm in plan.get("arms") or []]
    baseline = plan.get("baseline") or (names[0] if names else "")
    names.sort(key=lambda name: name != baseline)
    configurations = (plan.get("config") or {}).get("arms") or {}
    by_arm: dict[str, list[ArmRun]] = {name: [] for name in names}
    notes = []
    runs = sorted(plan.get("runs") or [], key=lambda one: one.get("order") or 0)
    finished = {_name(one.get("arm")) for one in runs if one.get("state", _DONE) == _DONE}
    remedy = "Resume the experiment" + (
        ", or pass --force to compare the finished runs." if len(finished) > 1 else "; no two arms have a finished run."
    )
    for planned in runs:
        name, repeat = _name(planned.get("arm")), str(planned.get("repeat", ""))
        if name not in by_arm:
            raise ArmFilesError(f"{directory / EXPERIMENT_FILE}: a run names arm '{name}', which is not among its arms")
        state = planned.get("state", _DONE)
        if state != _DONE:
            why = "; ".join(planned.get("reasons") or []) or "it was never finished"
            unfinished = f"run {repeat} of arm '{name}' is {state}: {why.rstrip('.')}"
            if not force:
                raise ArmFilesError(f"{directory}: {unfinished}. {remedy}")
            notes.append(f"{unfinished}; it is left out")
            continue
        path = directory / (planned.get("path") or f"arms/{name}/{repeat}")
        if path.is_dir() or path.suffix != ".jsonl":
            path /= RUN_FILE
        warnings = [str(warning) for warning in planned.get("warnings") or []]
        by_arm[name].append(
            ArmRun(
                _read(path),
                path,
                repeat,
                needs_proof=plan.get("backend") == "live",
                invalid=tuple(warning for warning in warnings if calls_invalid(warning)),
                warnings=tuple(warning for warning in warnings if not calls_invalid(warning)),
                changed=_changed(path, planned),
            )
        )
    for name in [name for name, runs in by_arm.items() if not runs]:
        if not force:
            raise ArmFilesError(f"{directory}: arm '{name}' has no finished run; resume the experiment")
        notes.append(f"arm '{name}' has no finished run")
        del by_arm[name]
    arms = [
        ArmRuns(name, runs, _as_text(configurations[name]) if name in configurations else "")
        for name, runs in by_arm.items()
    ]
    stored_trace = (plan.get("trace") or {}).get("path") if isinstance(plan.get("trace"), dict) else plan.get("trace")
    return Experiment(arms, directory / stored_trace if stored_trace else None, notes, _settings(directory, plan))


def _plan(directory: Path) -> dict[str, Any]:
    path = directory / EXPERIMENT_FILE
    try:
        plan = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        if (directory / _SWEEP_FILE).is_file():
            raise ArmFilesError(f"{directory} is a sweep: give its run files, such as {directory}/*.jsonl") from error
        raise ArmFilesError(
            f"{directory} is a directory without {EXPERIMENT_FILE}: give run files, or the directory of "
            "`warmroute experiment run`"
        ) from error
    except BAD_JSON as error:
        raise ArmFilesError(f"{path}: not JSON ({error})") from error
    if not isinstance(plan, dict) or not plan.get("arms"):
        raise ArmFilesError(f"{path}: names no arms; is it the file of `warmroute experiment run`?")
    return plan


def _changed(path: Path, planned: dict[str, Any]) -> str:
    """Comparison of a run file with the hash that the experiment noted."""
    noted = ((planned.get("files") or {}).get(RUN_FILE) or {}).get("sha256")
    if noted is None or file_sha256(path) == noted:
        return ""
    return f"{RUN_FILE} has changed since the experiment wrote it (SHA-256); `warmroute experiment verify` checks all"


def _settings(directory: Path, plan: dict[str, Any]) -> KeptSettings:
    try:
        return kept_settings((plan.get("config") or {}).get("comparison"))
    except msgspec.ValidationError as error:
        raise ArmFilesError(f"{directory / EXPERIMENT_FILE}: settings of the comparison: {error}") from error


def _name(arm: Any) -> str:
    return str(arm.get("name", "")) if isinstance(arm, dict) else str(arm)


def _as_text(configuration: Any) -> str:
    return msgspec.json.encode(configuration, order="sorted").decode()


def _read(path: Path) -> Run:
    run = read_run(path)
    if not run.records:
        raise ArmFilesError(f"{path}: holds no request; replay again")
    return run
