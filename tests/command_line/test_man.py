"""The manual page, and words that are no commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.command_line.commands import commands, groups, option_names, root
from warmroute import __version__, build
from warmroute_man import man_page
from warmroute_names import COMMANDS, SUGGESTIONS

RUNNER = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
PAGE = man_page(root(), __version__)


def run(*words: str) -> Any:
    return RUNNER.invoke(build(), [*words])


def test_the_command_prints_the_page() -> None:
    answer = run("man")
    assert answer.exit_code == 0
    assert answer.output == PAGE
    assert PAGE.startswith(f'.TH WARMROUTE 1 "" "warmroute {__version__}"')


def test_every_command_and_option_is_on_the_page() -> None:
    shown = PAGE.replace(r"\-", "-")
    for path, command in commands():
        section = shown.partition(f'.SS "warmroute {" ".join(path)}"\n')[2].partition("\n.SS ")[0]
        assert section, path
        for name in option_names(command) - {"--help"}:
            assert rf"\fB{name}\fR" in section, (path, name)


def test_no_line_of_text_is_taken_for_a_request() -> None:
    requests = {".TH", ".SH", ".SS", ".B", ".PP", ".TP"}
    assert {line.split()[0] for line in PAGE.splitlines() if line.startswith((".", "'"))} <= requests
    assert "`" not in PAGE


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_formats_the_page_without_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.1"
    file.write_text(PAGE, encoding="utf-8")
    command = ["groff", "-man", "-Tutf8", "-ww", "-K", "utf8", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "preconv" in result.stderr and result.returncode:
        pytest.skip("groff is installed without preconv")
    assert result.stderr == ""
    assert "Cache-aware serving proxy" in result.stdout


@pytest.mark.parametrize(
    ("word", "meant"),
    [("bench", "replay"), ("load", "replay"), ("LOAD", "replay"), ("check", "serve --check"), ("stop", "down")],
)
def test_a_word_that_is_no_command_names_the_one_that_is_meant(word: str, meant: str) -> None:
    answer = run(word, "--rate", "3")
    assert answer.exit_code == 2
    assert f"No such command '{word}'. Did you mean `warmroute {meant}`?" in answer.output


def test_other_words_are_refused_as_before() -> None:
    assert "No such command 'replya'" in run("replya").output


def test_suggestions_are_commands_and_hide_none() -> None:
    paths = {" ".join(path): command for path, command in commands()}
    for word, meant in SUGGESTIONS.items():
        assert word not in root().commands
        assert word not in COMMANDS
        path, _, option = meant.partition(" --")
        assert path in paths or path in groups(), meant
        assert not option or f"--{option}" in option_names(paths[path]), meant
