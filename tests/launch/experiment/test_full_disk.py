"""An experiment whose directory has no room, or whose start is cut: nothing half made, and a resumption that works."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from launch.__main__ import app
from launch.experiment.records import state as states
from launch.experiment.records.state import read_experiment
from launch.experiment.run import opening
from launch.experiment.verify import verify
from tests.full_disk import Disk
from tests.launch.conftest import REPOSITORY
from tests.launch.experiment.test_experiment_simulated import SMALL

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(states, "replace_file", disk.replace)
    return disk


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    trace = {"synth": {"requests": 20, "seed": 3, "rate_per_s": 2.0, "length_scale": 0.2}}
    path.write_text(yaml.safe_dump({**SMALL, "trace": trace, "repeats": 1}, sort_keys=False))
    return path


@pytest.mark.usefixtures("simulated_here")
@pytest.mark.parametrize("left", [0, 1])  # environment.json; experiment.json
def test_a_directory_without_room_can_be_used_once_it_has_some(
    tmp_path: Path, config: Path, disk: Disk, left: int
) -> None:
    directory = tmp_path / "run"
    disk.error, disk.left = errno.ENOSPC, left
    ended = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory)])
    assert ended.exit_code == 2, ended.output
    named = directory / ("environment.json" if left == 0 else "experiment.json")
    assert ended.output == f"error: {named}: No space left on device; nothing was run\n"
    assert [path.name for path in directory.iterdir()] == [".lock"]


@pytest.mark.usefixtures("simulated_here")
def test_a_start_that_was_killed_is_made_again(tmp_path: Path, config: Path) -> None:
    """Half a trace, which no state names, is neither taken nor in the way, with ``--resume`` or without."""
    killed_in, directory = tmp_path / "killed", tmp_path / "run"
    killed = "import os, sys; from replayer.traces.formats import bailian; from launch.__main__ import app\n"
    killed += "bailian.write = lambda path, requests: (path.write_text('{'), os.kill(os.getpid(), 9))\n"
    command = ["experiment", "run", str(config), "--set", "arms={plain: {policy: linear}}"]
    program = [sys.executable, "-c", killed + "app(sys.argv[1:])", *command, "--output", str(killed_in)]
    assert subprocess.run(program, cwd=REPOSITORY, check=False).returncode == -signal.SIGKILL
    assert (killed_in / "trace.jsonl").read_text() == "{"
    for resume in ((), ("--resume",)):
        shutil.copytree(killed_in, directory)
        again = CliRunner().invoke(app, [*command, "--output", str(directory), *resume])
        assert again.exit_code == 0, again.output
        assert verify(directory).sound
        assert {path.name for path in directory.iterdir() if path.name.startswith(".")} == {".lock"}
        shutil.rmtree(directory)


@pytest.mark.usefixtures("simulated_here")
def test_an_interrupted_start_leaves_an_empty_directory(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "capture", interrupted)
    command = ["experiment", "run", str(config), "--output", str(tmp_path / "run")]
    assert CliRunner().invoke(app, command).exit_code == 130
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_trace_of_somebody_else_is_not_taken_for_one_of_a_killed_start(tmp_path: Path, config: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace.jsonl").write_text("mine")
    ended = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(tmp_path / "run")])
    assert (ended.exit_code, "is not empty" in ended.output) == (2, True)
    assert (tmp_path / "run" / "trace.jsonl").read_text() == "mine"


@pytest.mark.fleet
def test_a_disk_that_fills_between_runs_ends_the_experiment_and_resume_continues(
    tmp_path: Path, config: Path, disk: Disk
) -> None:
    directory = tmp_path / "run"
    command = ["experiment", "run", str(config), "--output", str(directory)]
    # Environment, plan, start; the first run begins, its proof, its record, it ends. Not: the second begins.
    disk.error, disk.left = errno.ENOSPC, 7
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 2, ended.output
    assert isinstance(ended.exception, SystemExit)
    assert ended.output.splitlines()[-1] == (
        f"error: {directory / 'experiment.json'}: cannot be written (No space left on device); once that is fixed, "
        f"continue with: warmroute experiment run {config} --output {directory} --resume"
    )
    assert [run.state for run in read_experiment(directory).runs] == ["done", "pending"]
    disk.error = None
    ended = CliRunner().invoke(app, [*command, "--resume"])
    assert ended.exit_code == 0, ended.output
    assert [(run.state, run.attempts) for run in read_experiment(directory).runs] == [("done", 1), ("done", 1)]
