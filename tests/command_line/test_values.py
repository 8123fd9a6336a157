"""Wrong values of options: words that are no choice, and numbers.

NaN and infinity pass a range such as "at least 0", so each option must refuse them itself.
"""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.command_line.commands import commands, page
from warmroute import build

COMMANDS = build()

CHECKED = ("replay", "simulate", "sim engine", "trace synth", "trace sample", "trace repeat", "compare")
NUMBERS = [
    (one.path, row.names[0])
    for one in (page(path, command) for path, command in commands())
    if one.path in CHECKED
    for row in one.rows
    if row.metavar == "FLOAT"
]


@pytest.mark.parametrize(("path", "option"), NUMBERS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused(path: str, option: str, value: str) -> None:
    runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"})
    done = runner.invoke(COMMANDS, [*path.split(), option, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output


@pytest.mark.parametrize("line", ["compare a b --class FOO", "trace sample a -o b --sessions FOO"])
def test_a_word_that_is_none_of_the_choices_is_refused_with_them(line: str) -> None:
    done = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}).invoke(COMMANDS, line.split())
    assert done.exit_code == 2
    assert ": 'FOO' is not one of '" in done.output


def test_there_are_numbers_to_check() -> None:
    assert {path for path, _ in NUMBERS} >= {"compare", "replay", "simulate", "trace synth"}
