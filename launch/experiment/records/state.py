"""``experiment.json``: plan and progress of an experiment, replaced atomically after every change."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from launch.experiment.definition.file import ExperimentError
from launch.experiment.definition.order import Slot
from launch.run.files import replace_file
from launch.run.processes import same_process
from replayer.records.json_errors import BAD_JSON

STATE_FILE = "experiment.json"
CONFIG_FILE = "config.yaml"
CUT_FOLDER = "cut"
"""Folder for the records of interrupted, refused and failed attempts."""
SCHEMA = 1
_LOCK_FILE = ".lock"

PENDING, RUNNING, DONE, REFUSED, FAILED, INTERRUPTED, DAMAGED, STOPPED = (
    "pending",
    "running",
    "done",
    "refused",
    "failed",
    "interrupted",
    "damaged",
    "stopped",
)


class FileMark(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a file's contents."""

    sha256: str
    bytes: int


class RunState(msgspec.Struct, kw_only=True):
    """One run of the plan."""

    arm: str
    repeat: int
    seed: int
    order: int
    path: str
    state: str = PENDING
    """pending, running, done, refused (engines not fresh), failed, interrupted, damaged (files of a
    finished run are lost or changed). Only "done" is a measurement."""
    reasons: list[str] = []
    """Reasons why it is not done."""
    warnings: list[str] = []
    """Reasons to distrust a run that is done."""
    attempts: int = 0
    requests: int | None = None
    ok: int | None = None
    started_unix_s: float | None = None
    finished_unix_s: float | None = None
    files: dict[str, FileMark] = {}

    @property
    def name(self) -> str:
        """The run as display text."""
        return f"{self.arm}, repeat {self.repeat}"

    @property
    def took_s(self) -> float | None:
        """Wall seconds from start to end."""
        if self.started_unix_s is None or self.finished_unix_s is None:
            return None
        return self.finished_unix_s - self.started_unix_s


class TraceState(msgspec.Struct, frozen=True, kw_only=True):
    """The trace all runs replay."""

    path: str
    """Relative to the experiment's directory, or absolute."""
    sha256: str


class RunnerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process that runs the experiment, or ran it last."""

    pid: int
    created_unix_s: float


class ExperimentState(msgspec.Struct, kw_only=True):
    """Plan, settings and progress of an experiment."""

    schema: int = SCHEMA
    name: str
    state: str = RUNNING
    """running, done, interrupted, or stopped: a run was refused or failed and the settings require a stop."""
    backend: str
    baseline: str
    arms: list[str]
    order: str
    source: str
    """The experiment file."""
    overrides: list[str] = []
    config: dict[str, Any]
    config_sha256: str
    """Of the experiment file's text."""
    files: dict[str, str]
    """SHA-256 of every input of the experiment, by kind."""
    trace: TraceState
    clock_scale: float = 1.0
    runner: RunnerProcess | None = None
    started_unix_s: float = 0.0
    finished_unix_s: float | None = None
    runs: list[RunState]

    @property
    def alive(self) -> bool:
        """True if the runner is still running."""
        return self.runner is not None and same_process(self.runner.pid, self.runner.created_unix_s)

    @property
    def left(self) -> list[RunState]:
        """The runs that are not done, in order."""
        return [run for run in self.runs if run.state != DONE]

    def done(self) -> list[RunState]:
        """The runs that are done, in order."""
        return [run for run in self.runs if run.state == DONE]


def planned(slots: list[Slot]) -> list[RunState]:
    """The runs of a plan, none of them started."""
    return [
        RunState(arm=slot.arm, repeat=slot.repeat, seed=slot.seed, order=slot.order, path=slot.path) for slot in slots
    ]


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically, so that it survives a crash of the machine. Raises OSError, with its path."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n", sync=True)


def write_experiment(directory: Path, state: ExperimentState) -> None:
    """Replace the state file. Raises OSError, with its path."""
    write_json(directory / STATE_FILE, state)


def read_experiment(directory: Path) -> ExperimentState:
    """The state of an experiment.

    Raises:
        ExperimentError: there is none, or it is not an experiment's state.
    """
    path = directory / STATE_FILE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=ExperimentState)
    except OSError as error:
        raise ExperimentError(
            f"{path}: {error.strerror}; give the directory that `warmroute experiment run` printed"
        ) from error
    except BAD_JSON as error:
        raise ExperimentError(f"{path}: not the state of an experiment ({error})") from error
    if state.schema != SCHEMA:
        raise ExperimentError(f"{path}: schema {state.schema}, this version reads {SCHEMA}")
    return state


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory against other runners; the lock ends with this process, even if it is killed.

    Raises:
        ExperimentError: another runner has it, or it cannot be written.
    """
    try:
        opened = (directory / _LOCK_FILE).open("w")
    except OSError as error:
        raise ExperimentError(f"{error.filename}: cannot be written ({error.strerror})") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ExperimentError(f"{directory}: another process runs this experiment") from error
        yield


def mark(path: Path) -> FileMark:
    """Size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return FileMark(sha256=digest.hexdigest(), bytes=size)


def config_changes(before: Any, now: Any, key: str = "") -> list[str]:
    """Differences between two settings, as plain values, one sentence per key."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = list(dict.fromkeys([*before, *now]))
        return [
            change
            for name in names
            for change in config_changes(before.get(name), now.get(name), f"{key}.{name}" if key else str(name))
        ]
    return [] if before == now else [f"{key}: was {_shown(before)}, now {_shown(now)}"]


def _shown(value: Any) -> str:
    return "missing" if value is None else msgspec.json.encode(value).decode()
