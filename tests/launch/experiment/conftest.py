"""Runs of experiments without a process each, for tests of what is done with them."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from launch.experiment.definition import engines
from launch.experiment.run import simulated
from launch.run.processes import ManagedProcess
from sim.offline.checking import engine_error
from sim.offline.cli import simulate_command
from sim.offline.setup import Setup

_NUMBERS = itertools.count(1 << 30)
"""Beyond every process id, so that each run has an identity of its own."""


class SimulatedHere(ManagedProcess):
    """``python -m sim simulate`` called as a function when it starts: most of a small run is the start of a Python."""

    _number = 0
    _code = 0

    @property
    def pid(self) -> int:
        return self._number

    def start(self) -> None:
        _, *module, command = self.spec.command[:4]
        assert (module, command) == (["-m", "sim"], "simulate")
        app = typer.Typer(add_completion=False)
        app.command()(simulate_command)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path])  # the command puts its folder there
            ended = CliRunner().invoke(app, list(self.spec.command[4:]))
        self.log_path.write_text(ended.output, encoding="utf-8")
        self._number, self.created_unix_s, self._code = next(_NUMBERS), time.time(), ended.exit_code

    def reap(self) -> int:
        return self._code


def errors_here(setups: list[dict[str, Any]]) -> list[str | None]:
    """The simulator's own check of engines, on what its process would read, without the second of its start."""
    return [engine_error(setup) for setup in msgspec.json.decode(msgspec.json.encode(setups), type=list[Setup])]


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the engines of simulated experiments in this process."""
    monkeypatch.setattr(engines, "engine_errors", errors_here)


@contextmanager
def simulating_here() -> Iterator[None]:
    """Make the runs of simulated experiments in this process, and check their engines in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "ManagedProcess", SimulatedHere)
        patch.setattr(engines, "engine_errors", errors_here)
        yield


@pytest.fixture
def simulated_here() -> Iterator[None]:
    """Make the runs of a test's simulated experiments in this process."""
    with simulating_here():
        yield
