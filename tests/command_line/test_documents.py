"""Every command line in the documents, the Makefile, scripts and configuration files is one that is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line.commands import root
from tests.command_line.documents import FILES, ROOT, CommandLine, command_lines, problem


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_line_is_accepted(path: Path) -> None:
    group = root()
    problems = [found for line in command_lines(path) if (found := problem(line, group))]
    assert not problems, "\n".join(problems)


def test_command_lines_are_found() -> None:
    found = [line for path in FILES for line in command_lines(path)]
    assert len(found) > 100
    assert {"README.md", "Makefile"} <= {line.file for line in found}
    assert len({line.words[0] for line in found}) > 12


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("synth -o x", "no command 'synth'"),
        ("trace shrink x", "no command 'shrink'"),
        ("replay x --time-scale 4", "no option --time-scale"),
        ("replay x --arrival-speed=4 -o y", None),
        ("up sim-4x --no-proxy --set sim.seed=3", None),
        ("analyse ARGUMENTS", None),
        ("doctor sim-4x", "no argument 'sim-4x'"),
        ("doctor --json --fleet sim-4x", None),
        ("--version", None),
        ("--versions", "no option --versions"),
    ],
)
def test_an_unknown_or_old_name_is_a_problem(words: str, reason: str | None) -> None:
    found = problem(CommandLine("page.md", tuple(words.split())), root())
    assert found is None if reason is None else reason in str(found)


def test_where_a_command_line_begins_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.command_line.documents.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "Run warmroute up, or `bin/warmroute\ndown`.\n\n```sh\n$ warmroute serve --port 1 \\\n  --host x  # here\n"
        "a | warmroute key hash < key > out; warmroute status\nwarmroute\n   the warmroute proxy\n```\n"
    )
    assert [" ".join(line.words) for line in command_lines(page)] == [
        "serve --port 1 --host x",
        "key hash",
        "status",
        "down",
    ]
