"""docs/reference/cli.md agrees with the code."""

from __future__ import annotations

import pytest

from tests.command_line.commands import commands
from tests.command_line.reference import PATH, reference


def test_the_page_is_what_the_code_generates() -> None:
    assert PATH.read_text(encoding="utf-8") == reference(), "run `make reference`"


@pytest.mark.parametrize("columns", ["40", "300"])
def test_the_page_does_not_depend_on_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference()
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERMINAL_WIDTH", columns)
    assert reference() == before


def test_the_page_has_every_command() -> None:
    page = reference()
    for path, _ in commands():
        assert f"\n### warmroute {' '.join(path)}\n" in page
