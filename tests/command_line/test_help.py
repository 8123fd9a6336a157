"""Help: panels, one-line texts, units in option names, one name for outputs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.command_line.commands import commands, option_names, page, root
from warmroute import PANELS, build

PAGES = [page(path, command) for path, command in commands()]
OPTIONS = {f"{one.path} {row.names[0]}": row for one in PAGES for row in one.rows}
LONGEST = 110
"""Characters of an option's help."""
UNIT = re.compile(r"\b(seconds|milliseconds|GiB|per second)\b")
SUFFIXES = ("-s", "-ms", "-gib")


def test_panels_hold_every_command_once() -> None:
    names = [name for panel in PANELS.values() for name in panel]
    assert sorted(names) == sorted(root().commands)


def test_root_help_shows_the_panels_in_order() -> None:
    shown = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(build(), ["--help"]).output
    assert re.findall(r"^╭─ (\w+) ─", shown, re.MULTILINE) == ["Options", *PANELS]
    assert "--install-completion" in shown


@pytest.mark.parametrize("one", PAGES, ids=lambda one: one.path)
def test_a_command_begins_with_one_line(one: Any) -> None:
    first = one.help.strip().split("\n\n")[0]
    assert "\n" not in first
    assert len(first) <= 100
    assert first.endswith(".")


@pytest.mark.parametrize("one", PAGES, ids=lambda one: one.path)
def test_help_is_shown_as_it_is_written(one: Any) -> None:
    """Markup takes nothing away: no `<word>`, no `[word]`, no `*`."""
    runner = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1"})
    shown = " ".join(runner.invoke(build(), [*one.path.split(), "--help"]).output.split())
    for text in (*one.help.split("\n\n"), *(row.help for row in one.rows)):
        assert " ".join(text.replace("`", "").split()) in shown


@pytest.mark.parametrize("path", ["replay", "simulate", "trace sample", "trace repeat"])
def test_a_command_that_loads_a_trace_has_the_options_that_the_loader_names(path: str) -> None:
    (command,) = [command for names, command in commands() if " ".join(names) == path]
    assert option_names(command) >= {"--time-unit", "--block-tokens", "--allow-deltas", "--chain", "--sessions"}


@pytest.mark.parametrize("name", ["--ca-file", "--cert-file", "--cert-key-file"])
def test_every_command_with_certificates_has_the_same_options_for_them(name: str) -> None:
    found = {one.path: row for one in PAGES for row in one.rows if name in row.names}
    assert set(found) == {"doctor", "explain", "replay", "top"}
    assert len({(row.help, row.metavar, row.default) for row in found.values()}) == 1


def test_help_of_an_option_is_one_line() -> None:
    odd = [
        name
        for name, row in OPTIONS.items()
        if not row.help.endswith((".", ")")) or "\n" in f"{row.help} Default: {row.default}" or len(row.help) > LONGEST
    ]
    assert odd == []


def test_an_option_with_a_unit_has_it_in_its_name() -> None:
    tokens = re.compile(r"\b([Tt]okens from|in tokens|[Nn]ew tokens)\b")
    for name, row in OPTIONS.items():
        if row.metavar == "FLOAT" and UNIT.search(row.help) and "factor" not in row.help:
            assert row.names[0].endswith(SUFFIXES), name
        if row.metavar in {"INT", "FLOAT"} and tokens.search(row.help):
            assert "tokens" in row.names[0], name


def test_what_is_written_is_named_output() -> None:
    written = [(one.path, row) for one in PAGES for row in one.rows if re.search(r"\b(to write|[Ww]rite)\b", row.help)]
    assert written
    for path, row in written:
        assert row.names[0] in {"--output", "--breakdown-output", "--figures"}, path
    for one in PAGES:
        for row in one.rows:
            assert "--output" not in row.names or "-o" in row.names, one.path
