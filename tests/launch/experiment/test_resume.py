"""Resuming simulated experiments: runs whose records are damaged, and classes of a user's own."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from launch.__main__ import app
from launch.experiment.records import environment
from launch.experiment.records.state import read_experiment
from launch.experiment.verify import verify
from tests.launch.conftest import REPOSITORY
from tests.launch.experiment.conftest import simulating_here
from tests.launch.experiment.test_experiment_simulated import SMALL

pytestmark = pytest.mark.usefixtures("simulated_here")

TINY: dict[str, Any] = {**SMALL, "trace": {"synth": {"requests": 10, "seed": 3, "length_scale": 0.1}}}


def run(tmp_path: Path, *options: str, **values: Any) -> Result:
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump({**TINY, "name": "tiny", **values}, sort_keys=False))
    return CliRunner().invoke(app, ["experiment", "run", str(config), "-o", str(tmp_path / "run"), *options])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an experiment that has been run, for tests that damage copies."""
    folder = tmp_path_factory.mktemp("finished")
    with simulating_here():
        assert run(folder).exit_code == 0
    return folder / "run"


@pytest.mark.usefixtures("leaves_nothing")
def test_runs_with_damaged_records_are_made_again(finished: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(finished, tmp_path / "run")
    changed, lost, *intact = (directory / each.path for each in read_experiment(directory).runs)
    text = (changed / "run.jsonl").read_bytes()
    (changed / "run.jsonl").write_bytes(text[: len(text) // 2])
    (lost / "fresh.json").unlink()
    before = {path: path.read_bytes() for folder in intact for path in folder.iterdir()}
    assert not verify(directory).sound

    resumed = run(tmp_path, "--resume")

    assert resumed.exit_code == 0, resumed.output
    assert "2 of 4 runs to make" in resumed.output
    first, second = read_experiment(directory).runs[:2]
    assert f"{first.name} is made again, its records move to cut/: run.jsonl has changed" in resumed.output
    assert f"{second.name} is made again, its records move to cut/: fresh.json is missing" in resumed.output
    assert verify(directory).problems == []
    assert {path: path.read_bytes() for path in before} == before
    kept = directory / "cut" / first.arm / f"{first.repeat}-1"
    assert (kept / "run.jsonl").read_bytes() == text[: len(text) // 2]
    assert (kept / "arm.json").exists()


@pytest.mark.usefixtures("leaves_nothing")
def test_lost_files_of_the_experiment_itself_are_written_again(finished: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(finished, tmp_path / "run")
    (directory / "config.yaml").write_text("cut")
    (directory / "environment.json").unlink()
    (directory / "trace.jsonl").unlink()
    assert not verify(directory).sound
    resumed = run(tmp_path, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "config.yaml was lost or changed" in resumed.output
    assert "environment.json was lost; the new one has the conditions of now" in resumed.output
    assert "0 of 4 runs to make" in resumed.output
    assert verify(directory).problems == []


@pytest.mark.usefixtures("leaves_nothing")
def test_a_damaged_environment_and_a_changed_trace_are_reported_with_the_remedy(finished: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(finished, tmp_path / "run")
    noted, trace = directory / "environment.json", directory / "trace.jsonl"
    noted.write_bytes(noted.read_bytes()[:100])
    [problem] = verify(directory).problems
    assert problem.startswith("environment.json is not a JSON object (")
    assert "`warmroute experiment run --resume`" in problem
    stored = trace.read_bytes()
    trace.write_bytes(stored + b"\n")

    refused = run(tmp_path, "--resume")

    assert refused.exit_code == 2
    assert f"; remove {trace}, and it is made again" in "".join(refused.output.splitlines())
    trace.unlink()
    resumed = run(tmp_path, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "environment.json was damaged; the new one has the conditions of now" in resumed.output
    assert trace.read_bytes() == stored
    assert verify(directory).problems == []


OWN = """
from dataclasses import dataclass

from policies.routing.warm import Warm


@dataclass(frozen=True)
class Own(Warm):
    eager: bool = False
"""
ARMS = {"arms": {"base": {"policy": "warm"}, "own": {"policy": "own_resumed:Own"}}, "repeats": 1}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module in the folder that commands are run in; it is not imported yet."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = folder / "own_resumed.py"
    path.write_text(OWN)
    yield path
    forget()


def forget() -> None:
    """Make the next import read the module again."""
    for name in [name for name in sys.modules if name.startswith("own_resumed")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.mark.usefixtures("leaves_nothing", "own")
def test_a_class_that_is_not_found_from_another_folder_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [*sys.path]
    assert run(tmp_path, **ARMS).exit_code == 0
    forget()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", path)
    resumed = run(tmp_path, "--resume", **ARMS)
    assert resumed.exit_code == 2
    assert "run the command in the folder that has own_resumed.py or own_resumed/" in " ".join(resumed.output.split())
    assert "add that folder to PYTHONPATH" in " ".join(resumed.output.split())


@pytest.mark.usefixtures("leaves_nothing")
def test_a_change_of_a_module_that_the_class_imports_is_refused(own: Path, tmp_path: Path) -> None:
    own.write_text(f"from own_resumed_helper import WEIGHT\n{OWN}")
    helper = own.with_name("own_resumed_helper.py")
    helper.write_text("WEIGHT = 1\n")
    assert run(tmp_path, **ARMS).exit_code == 0
    helper.write_text("WEIGHT = 2\n")
    forget()
    resumed = run(tmp_path, "--resume", **ARMS)
    assert resumed.exit_code == 2
    assert "module own_resumed_helper: its SHA-256 was" in resumed.output


def test_the_modules_beside_the_packages_are_sources_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_PROJECT", tmp_path)
    before = environment.sources_sha256()
    (tmp_path / "warmroute_yaml.py").write_text("")
    assert environment.sources_sha256() != before
