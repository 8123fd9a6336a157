"""Old names of commands and options: accepted with a note on standard error, absent from help."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.command_line.commands import commands, option_names
from warmroute import build
from warmroute_names import COMMANDS, OPTIONS, REMOVED_IN, current
from warmroute_yaml import HARDWARE_FOLDER

RUNNER = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
BY_PATH = {" ".join(path): command for path, command in commands()}


def replaced(line: str) -> tuple[str, list[str]]:
    notes: list[str] = []
    return " ".join(current(line.split(), notes.append)), notes


@pytest.mark.parametrize(
    ("line", "expected", "notes"),
    [
        (
            "replay t --time-scale 4 -o r",
            "replay t --arrival-speed 4 -o r",
            ["`--time-scale` is now `--arrival-speed`"],
        ),
        ("replay t --clock-scale=20", "replay t --engine-speed=20", ["`--clock-scale` is now `--engine-speed`"]),
        ("sim engine --time-scale 20", "sim engine --engine-speed 20", ["`--time-scale` is now `--engine-speed`"]),
        (
            "synth --rate 2 -o t",
            "trace synth --rate-per-s 2 -o t",
            ["`warmroute synth` is now `warmroute trace synth`", "`--rate` is now `--rate-per-s`"],
        ),
        ("analyse pd-cost --tokens 8", "analyse pd-cost --prompt-tokens 8", ["`--tokens` is now `--prompt-tokens`"]),
        ("up --run-dir x", "up --run-dir x", []),
        ("replay --arrival-speed 4 -- --time-scale", "replay --arrival-speed 4 -- --time-scale", []),
        ("--help", "--help", []),
        ("", "", []),
    ],
)
def test_old_names_are_replaced(line: str, expected: str, notes: list[str]) -> None:
    end = f"; the old name will be removed in {REMOVED_IN}"
    assert replaced(line) == (expected, [note + end for note in notes])


def test_every_new_name_exists_and_no_old_one() -> None:
    assert set(COMMANDS.values()) <= set(BY_PATH)
    assert not set(COMMANDS) & {path.partition(" ")[0] for path in BY_PATH}
    for path, renamed in OPTIONS.items():
        known = option_names(BY_PATH[path])
        assert {new.partition("=")[0] for new in renamed.values()} <= known, path
        assert not set(renamed) & known, path


@pytest.mark.parametrize("path", OPTIONS)
def test_help_shows_no_old_name(path: str) -> None:
    done = RUNNER.invoke(build(), [*path.split(), "--help"])
    assert done.exit_code == 0
    shown = {word.strip(".,;:()") for word in done.output.split()}
    assert not shown & set(OPTIONS[path])


def test_an_old_command_line_does_the_same_and_prints_a_note(tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    before = RUNNER.invoke(build(), ["synth", "-o", str(old), "--requests", "40", "--rate", "2"])
    after = RUNNER.invoke(build(), ["trace", "synth", "-o", str(new), "--requests", "40", "--rate-per-s", "2"])
    assert before.exit_code == after.exit_code == 0
    assert old.read_bytes() == new.read_bytes()
    assert before.stderr.splitlines() == [
        f"`warmroute synth` is now `warmroute trace synth`; the old name will be removed in {REMOVED_IN}",
        f"`--rate` is now `--rate-per-s`; the old name will be removed in {REMOVED_IN}",
    ]
    assert after.stderr == ""


def test_a_fitted_profile_goes_to_a_file_or_a_folder(tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "mine.yaml"):
        assert RUNNER.invoke(build(), ["sim", "fit", "h20", "-o", str(output)]).exit_code == 0
    assert (tmp_path / "h20.yaml").read_text() == (tmp_path / "mine.yaml").read_text()
    assert yaml.safe_load((tmp_path / "h20.yaml").read_text())["name"] == "h20"
    assert replaced("fit h20 --write")[0] == f"sim fit h20 --output={HARDWARE_FOLDER}"


def test_completion_prints_no_note() -> None:
    words = {"_WARMROUTE_COMPLETE": "complete_bash", "COMP_WORDS": "warmroute synth --requ", "COMP_CWORD": "2"}
    done = RUNNER.invoke(build(), [], prog_name="warmroute", env=words)
    assert "--requests" in done.stdout.split()
    assert done.stderr == ""
