"""docs/compare.md agrees with the code of the comparison."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import typer.main
from typer import Typer

from replayer.compare.assumptions import ASSUMED_FLOOR
from replayer.compare.cli import compare_command
from replayer.compare.effects import MIN_SESSIONS
from replayer.compare.freshness import MAX_IMPOSSIBLE_SHARE
from replayer.compare.metrics import MIN_TAIL_REQUESTS, MIN_TAIL_SESSIONS
from replayer.compare.noise_floor import MIN_BLOCK_FREEDOM
from replayer.compare.runs import CompareOptions
from replayer.compare.statistics.power import POWER
from replayer.compare.window import COLD_SHARE, DRAIN_SHARE

PAGE = Path(__file__).parents[3] / "docs" / "compare.md"


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join(PAGE.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    "words",
    [
        f"{MIN_TAIL_REQUESTS} requests beyond the percentile, from {MIN_TAIL_SESSIONS} sessions",
        f"Below {MIN_SESSIONS} sessions",
        f"A p99 needs {MIN_TAIL_REQUESTS * 100:,} pairs",
        f"({CompareOptions().resamples:,} times",
        f"differ by up to {ASSUMED_FLOOR * 100:.0f} % in 95 of 100 cases",
        f"at least {MIN_BLOCK_FREEDOM} degrees of freedom remain",
        f"with {POWER * 100:.0f} % probability",
        f"At most {MAX_IMPOSSIBLE_SHARE * 100:g} % of all prompt tokens may exceed",
    ],
)
def test_figures_are_those_of_the_code(page: str, words: str) -> None:
    assert words in page


def test_a_tenth_is_a_tenth(page: str) -> None:
    assert COLD_SHARE == DRAIN_SHARE == 0.1
    assert "before a tenth of the plan's prompt tokens was due" in page
    assert "at most the last tenth of the requests" in page


def test_every_option_on_the_page_exists_and_every_option_is_on_it(page: str) -> None:
    app = Typer(add_completion=False)
    app.command()(compare_command)
    options = {name for parameter in typer.main.get_command(app).params for name in parameter.opts if name[:2] == "--"}
    rules = page.split("## Rules of a comparison", maxsplit=1)[1].split("## Read a report", maxsplit=1)[0]
    mentioned = set(re.findall(r"--[a-z0-9][a-z0-9-]*[a-z0-9]", rules)) - {"--slo"}
    assert mentioned - options == set()
    assert options - mentioned == {"--help"} & options


def test_python_leaves_nothing_out_by_default_and_the_command_goes_by_the_rule(page: str) -> None:
    assert (CompareOptions().skip_first_s, CompareOptions().skip_last_s) == (0.0, 0.0)
    defaults = {name: one.default for name, one in inspect.signature(compare_command).parameters.items()}
    assert (defaults["skip_first_s"], defaults["skip_last_s"], defaults["keep_all"]) == (None, None, False)
    assert "`compare()` leaves nothing out by default" in page
