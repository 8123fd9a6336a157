"""Journal of a sweep in progress: the points that are done, so that a sweep that was stopped or killed continues."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from replayer.records.own_code import own_code
from replayer.records.version import installed_version
from replayer.traces.formats.source import file_sha256
from sim.hardware import ProfileError, load_profile
from sim.offline.options import SimulationError
from sim.offline.setup import Setup

JOURNAL = "sweep.partial.jsonl"


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    made_of: str


class _Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    file: str
    figures: dict[str, Any]


class SweepJournal:
    """Points of earlier processes, and a file that gets every further one as soon as it is done.

    A point counts as done only with its run file, which is written before.
    """

    def __init__(self, folder: Path, base: Setup, setups: Mapping[str, Setup], *, resume: bool) -> None:
        """Begin in a new or empty folder, or with ``resume`` continue in one.

        Args:
            folder: of the sweep.
            base: settings of all its points.
            setups: of its points, by name.
            resume: continue the sweep that is there.

        Raises:
            SimulationError: the folder is not empty, or with ``resume`` has a sweep of something else.
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / JOURNAL
        self._head = _Head(_digest(base, setups))
        self.done: dict[str, dict[str, Any]] = {}
        """Figures of the points that are done, by name."""
        if any(folder.iterdir()):
            if not resume:
                raise SimulationError(f"{folder}: not empty; give another --output, or --resume to continue its sweep")
            self._read()
        else:
            self._append(self._head)

    def add(self, name: str, file: str, figures: dict[str, Any]) -> None:
        """Record a point whose run file is written."""
        self._append(_Done(name, file, figures))

    def close(self) -> None:
        """Remove the journal of a sweep that is complete."""
        self._path.unlink()

    def _append(self, line: _Head | _Done) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        if not self._path.exists():
            raise SimulationError(f"{self._folder}: no sweep to continue: it has no {JOURNAL}; is it complete already?")
        # A line without its end was cut by the end of its process.
        whole, _, cut = self._path.read_bytes().rpartition(b"\n")
        lines = whole.split(b"\n")
        try:
            head, points = msgspec.json.decode(lines[0], type=_Head), lines[1:]
            found = [msgspec.json.decode(line, type=_Done) for line in points]
        except msgspec.MsgspecError as error:
            raise SimulationError(f"{self._path}: not a journal of a sweep: {error}; remove the folder") from error
        if head != self._head:
            raise SimulationError(
                f"{self._folder}: its sweep has other values, settings or another trace, profile, version or code of "
                "a MODULE:Class; repeat its command, or give another --output"
            )
        if cut:
            self._path.write_bytes(whole + b"\n")
        self.done = {each.name: each.figures for each in found if (self._folder / each.file).exists()}


def _digest(base: Setup, setups: Mapping[str, Setup]) -> str:
    """Digest of what decides the points and their figures."""
    settings = {key: value for key, value in msgspec.to_builtins(base).items() if key != "trace"}
    every = [base, *setups.values()]
    profiles = {name: _profile(name) for name in sorted({setup.profile for setup in every})}
    names = {name for setup in every for name in (setup.policy, setup.planner, setup.admission) if ":" in name}
    code = {name: _code(name.partition(":")[0]) for name in sorted(names)}
    parts = (installed_version(), file_sha256(Path(base.trace)), profiles, settings, list(setups), code)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def _profile(name: str) -> Any:
    """Content of a profile; None for one that cannot be read, which the point's own error reports."""
    try:
        return load_profile(name).model_dump(mode="json")
    except ProfileError:
        return None


def _code(module: str) -> dict[str, str]:
    """SHA-256 of a module's file and of those it imports; empty for one not found, which the point's error reports."""
    return {name: file_sha256(file) for name, file in sorted(own_code(module).items())}
