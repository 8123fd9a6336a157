"""Inputs of a report: run files with the files beside them, or the directory of an experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from replayer.compare.arms import EXPERIMENT_FILE, ArmRun, ArmRuns, read_arms
from replayer.compare.comparison import KeptSettings
from replayer.compare.pairing import silence_as_zero
from replayer.records.breakdown_rows import BreakdownRow, read_rows, rows_of
from replayer.records.json_errors import BAD_JSON
from replayer.records.runs import RequestRecord, Run, RunEnd
from replayer.traces.loading import load_replayed
from replayer.traces.trace import Trace

Row = dict[str, Any]
BREAKDOWN_FILE = "breakdown.jsonl"
FRESH_FILE = "fresh.json"
ARM_FILE = "arm.json"
ENVIRONMENT_FILE = "environment.json"
MOST_ELSEWHERE = 0.1
"""Share of rows that may name another instance than the run's record does, as after a stream resumed elsewhere."""
_CAPACITY = ("kv_capacity_tokens", "pool_tokens")


class ReportError(ValueError):
    """Inputs that no report can be made from; the message has the remedy."""


@dataclass(frozen=True)
class OneRun:
    """One run of an arm with the files beside it."""

    run: Run
    """Silent engines count as zero cached tokens, see `replayer.compare.pairing.silence_as_zero`."""
    rows: list[BreakdownRow] = field(default_factory=list)
    path: Path | None = None
    repeat: str = ""
    fresh: Mapping[str, Any] | None = None
    """The proof of freshness beside the run."""
    arm: Mapping[str, Any] = field(default_factory=dict)
    """The experiment's record of the run (arm.json)."""

    @property
    def capacity_tokens(self) -> int | None:
        """KV pool of one instance from the run's header or the experiment; None when neither has it."""
        for source in (self.run.header.options, self.arm):
            for name in _CAPACITY:
                if isinstance(value := source.get(name), int) and value > 0:
                    return value
        return None

    @property
    def instances(self) -> list[str]:
        """Names of all instances in rows, records and proof; where the fleet is larger, made-up names for the rest."""
        engines = (self.fresh or {}).get("engines") or []
        names = [str(engine["instance"]) for engine in engines if isinstance(engine, dict) and "instance" in engine]
        names += [name for row in self.rows for name in row.candidates]
        for record in self.run.records:
            names += [name for name in (record.instance, record.prefill_instance) if name is not None]
        known = list(dict.fromkeys(names))
        counts = [source.get("instances") for source in (self.run.header.options, self.arm)]
        missing = max((count for count in counts if isinstance(count, int)), default=0) - len(known)
        return known + [f"unnamed-{number}" for number in range(1, missing + 1)]


@dataclass(frozen=True)
class Arm:
    """One arm of a report: a run, with the proxy's breakdown rows where they were collected, and its repeats."""

    label: str
    run: Run
    breakdown: Sequence[Row | BreakdownRow] | None = None
    warnings: list[str] = field(default_factory=list)
    """Reasons to distrust the arm's figures, shown at the top of the page."""
    path: Path | None = None
    """The run's file; what lies beside it is read by `beside`."""
    fresh: Mapping[str, Any] | None = None
    arm: Mapping[str, Any] = field(default_factory=dict)
    repeat: str = ""
    repeats: tuple[Arm, ...] = ()
    """Further replicates."""
    found: ArmRuns | None = None
    """The arm with all its runs as `replayer.compare.arms` read it; None where it was not read from files."""

    def runs(self) -> list[OneRun]:
        """All runs, the first one first.

        Raises:
            BreakdownError: rows of another shape.
        """
        return [self._own(), *(run for repeat in self.repeats for run in repeat.runs())]

    def _own(self) -> OneRun:
        run = self.run._replace(records=silence_as_zero(self.run.records))
        return OneRun(run, rows_of(self.breakdown or ()), self.path, self.repeat, self.fresh, self.arm)

    def compared(self) -> ArmRuns:
        """The arm as `replayer.compare.runs` takes it: as ``warmroute compare`` has it, if it was read from files."""
        if self.found is not None:
            return self.found
        return ArmRuns(self.label, [ArmRun(one.run, one.path, one.repeat) for one in (self, *self.repeats)])


def pooled(runs: Sequence[OneRun]) -> Run:
    """All repeats' requests as one run, for figures over an arm."""
    records: list[RequestRecord] = [record for one in runs for record in one.run.records]
    ends = [one.run.end for one in runs]
    whole = (
        RunEnd(
            finished_unix_s=max(end.finished_unix_s for end in ends if end is not None),
            requests=sum(end.requests for end in ends if end is not None),
            ok=sum(end.ok for end in ends if end is not None),
        )
        if None not in ends
        else None
    )
    return runs[0].run._replace(records=records, end=whole)


def unique_labels(runs: Sequence[Run]) -> list[str]:
    """The runs' labels; a label used before gets a number, an empty one becomes "run"."""
    seen: Counter[str] = Counter()
    labels = []
    for run in runs:
        label = run.header.label or "run"
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return labels


@dataclass(frozen=True)
class ReportInputs:
    """Everything a page is made from."""

    arms: list[Arm]
    """The baseline first."""
    trace: Trace | None = None
    why_no_trace: str = ""
    """Shown in the page where an experiment's trace cannot be used; empty otherwise."""
    environment: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    settings: KeptSettings | None = None
    """An experiment's own settings of comparisons."""
    files: list[Path] = field(default_factory=list)
    """Files that it was read from."""


def read_inputs(runs: Sequence[Path], specs: Sequence[str] = (), trace: Path | None = None) -> ReportInputs:
    """Run files, arms of several run files, or the directory of one experiment.

    Args:
        runs: run files, one for each arm, or one directory.
        specs: NAME=RUN.jsonl,RUN.jsonl,... for arms that were run several times.
        trace: what was replayed; None: an experiment's own.

    Raises:
        ReportError: nothing to report on, or another trace than the one replayed.
        ArmFilesError, RecordError, BreakdownError, TraceError, OSError: a file that cannot be read.
    """
    directory, environment, notes, own, settings = None, None, [], None, None
    found, experiment = read_arms(runs, specs, force=True)
    if experiment is not None:
        directory, own, settings = runs[0], experiment.trace, experiment.settings
        # First on the page: which runs are not in the figures.
        notes = [note[:1].upper() + note[1:] + "." for note in experiment.notes]
        environment = read_environment(directory)
    if not found and notes:
        raise ReportError(f"{directory}: there is no finished run to report on. {' '.join(notes)}")
    if not found:
        raise ReportError("nothing to report on: give RUN.jsonl [...], --arm NAME=RUN.jsonl,..., or an experiment")
    arms = [arm_of(one) for one in found]
    files = _files(directory, arms, [one for one in (trace, own) if one is not None])
    without = ReportInputs(arms, environment=environment, notes=notes, settings=settings, files=files)
    header = arms[0].run.header
    replayed = header.trace_sha256
    if trace is not None:
        loaded = load_replayed(trace, header.options)
        if replayed and loaded.sha256 != replayed:
            raise ReportError(
                f"--trace {trace} is not the trace that was replayed (SHA-256 {loaded.sha256[:12]}, the runs say "
                f"{replayed[:12]}); give the file that was"
            )
        return replace(without, trace=loaded)
    if own is None:
        return without
    if not own.exists():
        return replace(without, why_no_trace=f"the experiment's trace {own} is not there: give --trace FILE")
    loaded = load_replayed(own, header.options)
    if replayed and loaded.sha256 != replayed:
        why = f"the experiment's trace {own} is not the one that was replayed: give --trace FILE"
        return replace(without, why_no_trace=why)
    return replace(without, trace=loaded)


def _files(directory: Path | None, arms: Sequence[Arm], traces: Sequence[Path]) -> list[Path]:
    """Files that a report reads, whether or not they exist."""
    own = [] if directory is None else [directory / EXPERIMENT_FILE, directory / ENVIRONMENT_FILE]
    runs = [one.path for arm in arms for one in (arm, *arm.repeats) if one.path is not None]
    beside = [path.parent / name for path in runs for name in (BREAKDOWN_FILE, FRESH_FILE, ARM_FILE)]
    return [*own, *runs, *beside, *traces]


def arm_of(found: ArmRuns) -> Arm:
    """An arm with what lies beside its run files: breakdown.jsonl, fresh.json, arm.json.

    Raises:
        BreakdownError: a breakdown file that cannot be read as one.
        OSError: a file that is there cannot be read.
    """
    every = [_beside(found.label, one) for one in found.runs]
    first, rest = every[0], tuple(every[1:])
    warnings = [warning for one in every for warning in one.warnings]
    return replace(first, warnings=warnings, repeats=rest, found=found)


def _beside(label: str, one: ArmRun) -> Arm:
    if one.path is None:
        return Arm(label, one.run, repeat=one.repeat)
    folder = one.path.parent
    # Loose run files share a folder, and what lies there may belong to any of them: only a run's own folder counts.
    alone = len(list(folder.glob("*.jsonl"))) - (folder / BREAKDOWN_FILE).exists() == 1
    rows = read_rows(folder / BREAKDOWN_FILE) if alone and (folder / BREAKDOWN_FILE).exists() else None
    fresh = _read_json(folder / FRESH_FILE) if alone else None
    arm = (_read_json(folder / ARM_FILE) if alone else None) or {}
    prefix = f"run {one.repeat}: " if one.repeat else ""
    warnings = [f"{prefix}{warning}" for warning in [one.changed, *(arm.get("warnings") or [])] if warning]
    return Arm(label, one.run, rows, warnings, one.path, fresh, arm, one.repeat)


def with_rows(arm: Arm, rows: Sequence[BreakdownRow], source: str) -> Arm:
    """The arm with other breakdown rows of its first run, and warnings if some are not of that run or some are missing.

    Of a request with several rows, as one that an interrupted and resumed run sent twice, the last counts.

    Raises:
        ReportError: no row is of that run, or many are of another run of its trace, whose requests have the same ids.
    """
    requests = {record.request_id: record.instance for record in arm.run.records}
    elsewhere = sum(
        None not in (placed := requests.get(row.request_id), row.instance) and placed != row.instance for row in rows
    )
    last = {row.request_id: row for row in rows if row.request_id in requests}
    strange = sum(row.request_id not in requests for row in rows)
    repeated = len(rows) - strange - len(last)
    if elsewhere > MOST_ELSEWHERE * len(rows):
        raise ReportError(
            f"{source}: {elsewhere:,} of {len(rows):,} rows name another instance than the first run of arm "
            f"{arm.label} has for the request, as rows of another run of the trace do; give the rows that were "
            "collected during that run"
        )
    if repeated > MOST_ELSEWHERE * len(rows):
        raise ReportError(
            f"{source}: {repeated:,} of {len(rows):,} rows are of requests with another row, as in a file of several "
            f"runs of the trace; give the rows that were collected during the first run of arm {arm.label} (each has "
            "its arrived_unix_s)"
        )
    if rows and strange == len(rows):
        raise ReportError(
            f"{source}: none of its {len(rows):,} rows has a request_id of the first run of arm {arm.label}; give the "
            "rows that were collected during that run"
        )
    warnings = []
    if strange:
        warnings.append(f"{source}: {strange:,} of {len(rows):,} rows are of no request of the run (request_id)")
    succeeded = [record.request_id for record in arm.run.records if record.ok]
    if missing := sum(request_id not in last for request_id in succeeded):
        warnings.append(f"{source}: {missing:,} of {len(succeeded):,} successful requests of the run have no row in it")
    counted = [row for row in rows if last.get(row.request_id, row) is row]
    return replace(arm, breakdown=counted, warnings=[*arm.warnings, *warnings])


def read_environment(directory: Path) -> Mapping[str, Any] | None:
    """The machine and the versions an experiment ran on; None where it did not keep them."""
    try:
        return _read_json(directory / ENVIRONMENT_FILE)
    except ReportError as error:
        raise ReportError(
            f"{error}; remove it to report without the machine and its versions, or restore it from a copy"
        ) from error


def _read_json(path: Path) -> Mapping[str, Any] | None:
    """A JSON object; None where there is no such file.

    Raises:
        ReportError: not a JSON object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except BAD_JSON as error:
        raise ReportError(f"{path}: not a JSON object ({error})") from error
