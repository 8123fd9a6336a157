"""The page on fleets of different speed is that of the kept result, and impossible options are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from bench.cells.placement import METRICS
from bench.unequal_instances.__main__ import ARMS, SPEEDS, main
from bench.unequal_instances.cells import UnequalDocument, mean_speed, table_of

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "decisions" / "0029-unequal-instances.md").read_text(encoding="utf-8")
CELLS = msgspec.json.decode((DOCS / "results" / "unequal-instances.json").read_bytes(), type=UnequalDocument).cells

APP = typer.Typer(add_completion=False)
APP.command()(main)


def test_the_page_shows_the_table_of_the_kept_result() -> None:
    shown = (
        PAGE.partition("<!-- unequal instances: begin -->")[2].partition("<!-- unequal instances: end -->")[0].strip()
    )
    assert shown == "\n".join(table_of(CELLS))
    assert {cell.speeds for cell in CELLS} == set(SPEEDS)
    assert {cell.seed for cell in CELLS} == {3, 4}
    assert f"{len(CELLS)} cells and seeds" in PAGE
    assert f"figures of {len(CELLS) // len(SPEEDS) * len(METRICS)} whose" in " ".join(PAGE.split())
    assert all(cell.ratios.keys() == set(ARMS) for cell in CELLS)
    assert not any(arm.failed for cell in CELLS for arm in (cell.base, *cell.arms.values()))


def test_the_mean_speed_is_that_of_the_instances_in_turn() -> None:
    assert mean_speed((1.0, 0.5), 4) == 0.75
    assert mean_speed((1.0, 1.0, 1.0, 0.25), 5) == pytest.approx(4.25 / 5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--speeds", "fast"], "give numbers separated by commas"),
        (["--speeds", ""], "give at least one number"),
        (["--arm", "nope"], "unknown routing policy 'nope'"),
        (["--arm", "warm,nope=1"], "nope"),
        (["--speeds", "1,0"], "numbers above 0"),
        (["--speeds", "1,1,1", "--fleet", "2"], "at most one for each"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_played(
    options: list[str], reason: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(APP, ["--trace-dir", str(tmp_path), *options])
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())
