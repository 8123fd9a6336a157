"""``warmroute simulate`` stopped by a signal: its exit code, its files, and the same command once more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replayer.records.runs import read_run
from replayer.traces.formats import bailian
from tests.sim.offline.offline_runs import agents

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[3]
LIMIT_S = 120.0
STOPPING = """
import itertools, os, signal
from multiprocessing import parent_process
from policies.routing.warm import Warm

COUNT = itertools.count()

class Own:
    name = "own"

    def choose(self, request, fleet):
        if next(COUNT) == 30 and "STOP" in os.environ:
            parent = parent_process()
            os.kill(os.getpid() if parent is None else parent.pid, int(os.environ["STOP"]))
            if parent is not None:
                signal.pause()
        return Warm().choose(request, fleet)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a trace, and a policy that sends the command a signal in the middle of it."""
    bailian.write(tmp_path / "trace.jsonl", agents(60).requests)
    (tmp_path / "stopping.py").write_text(STOPPING)
    return tmp_path


def simulate(folder: Path, *options: str, stop: signal.Signals | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmroute", "simulate", "trace.jsonl", "--instances", "2", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **({} if stop is None else {"STOP": str(int(stop))})}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize(
    ("stop", "code", "stream"),
    [
        (signal.SIGTERM, 143, False),
        pytest.param(signal.SIGINT, 130, False, marks=pytest.mark.fleet),
        pytest.param(signal.SIGHUP, 129, False, marks=pytest.mark.fleet),
        pytest.param(signal.SIGTERM, 143, True, marks=pytest.mark.fleet),
    ],
)
def test_a_run_that_is_stopped_leaves_no_file_in_the_way(
    folder: Path, stop: signal.Signals, code: int, stream: bool
) -> None:
    command = ["--policy", "stopping:Own", "--output", "run.jsonl", "--breakdown-output", "rows.jsonl"]
    command += ["--stream"] if stream else []
    before = sorted(folder.glob("*.jsonl"))
    stopped = simulate(folder, *command, stop=stop)
    assert stopped.returncode == code, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert sorted(path for path in folder.rglob("*") if "jsonl" in path.name) == before
    again = simulate(folder, *command)
    assert again.returncode == 0, again.stderr
    assert read_run(folder / "run.jsonl").incomplete == ""


@pytest.mark.fleet
def test_a_killed_run_has_no_output_that_could_be_taken_for_one(folder: Path) -> None:
    command = ["--policy", "stopping:Own", "--output", "run.jsonl"]
    assert simulate(folder, *command, stop=signal.SIGKILL).returncode == -signal.SIGKILL
    assert not (folder / "run.jsonl").exists()
    assert simulate(folder, *command).returncode == 0


@pytest.mark.fleet
@pytest.mark.parametrize(("stop", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_sweep_that_is_stopped_continues(folder: Path, stop: signal.Signals, code: int, jobs: str) -> None:
    sweep = ["--output", "sweep", "--sweep", "policy=warm,stopping:Own", "--jobs", jobs]
    stopped = simulate(folder, *sweep, stop=stop)
    assert stopped.returncode == code, stopped.stderr
    assert "Traceback" not in stopped.stderr
    refused = simulate(folder, *sweep)
    assert (refused.returncode, "--resume to continue its sweep" in refused.stderr) == (2, True), refused.stderr
    again = simulate(folder, *sweep, "--resume")
    assert again.returncode == 0, again.stderr
    points = json.loads((folder / "sweep" / "sweep.json").read_text())["points"]
    assert [point["error"] for point in points] == [None, None]
