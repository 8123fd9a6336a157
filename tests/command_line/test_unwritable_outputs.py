"""Outputs that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import warmroute
from replayer.traces.formats import bailian
from replayer.traces.synth import SynthOptions, synthetic_trace

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    return warmroute.build()


@pytest.fixture(scope="module")
def folder(app: typer.Typer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace and a run."""
    path = tmp_path_factory.mktemp("runs")
    bailian.write(path / "trace.jsonl", synthetic_trace(SynthOptions(requests=20, seed=3, length_scale=0.1)).requests)
    made = RUNNER.invoke(app, ["simulate", str(path / "trace.jsonl"), "-o", str(path / "run.jsonl")])
    assert made.exit_code == 0, made.output
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["report", "run.jsonl"],
        ["simulate", "trace.jsonl"],
        ["replay", "trace.jsonl", "--endpoint", "http://127.0.0.1:9", "--model", "none"],
        ["trace", "synth", "--requests", "20"],
        ["trace", "sample", "trace.jsonl"],
        ["trace", "repeat", "trace.jsonl"],
    ],
    ids=" ".join,
)
def test_the_error_names_the_file_and_the_remedy(app: typer.Typer, folder: Path, command: list[str]) -> None:
    given = [str(folder / each) if each.endswith(".jsonl") else each for each in command]
    done = RUNNER.invoke(app, [*given, "-o", "/proc/x"])
    assert done.exit_code == 2
    assert done.stderr == "error: cannot write /proc/x: No such file or directory; choose another --output\n"


@pytest.mark.parametrize(
    ("command", "option"),
    [(["report", "run.jsonl"], "--figures"), (["simulate", "trace.jsonl"], "--breakdown-output")],
)
def test_the_remedy_names_the_option_of_a_second_output(
    app: typer.Typer, folder: Path, tmp_path: Path, command: list[str], option: str
) -> None:
    done = RUNNER.invoke(app, [command[0], str(folder / command[1]), "-o", str(tmp_path / "x"), option, "/proc/x"])
    assert done.exit_code == 2
    assert done.stderr == f"error: cannot write /proc/x: No such file or directory; choose another {option}\n"
