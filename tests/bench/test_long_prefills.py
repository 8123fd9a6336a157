"""The page on steps that prompts share: its table and figures are those of the kept result."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from typer.testing import CliRunner

from bench.cells.placement import METRICS
from bench.cells.ratios import BEYOND
from bench.long_prefills import ARMS, Dimension, Document, PlayedCell, main, table_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "decisions" / "0027-steps-shared-by-prompts.md").read_text(encoding="utf-8")
ORDER = (DOCS / "decisions" / "0026-order-of-prefills.md").read_text(encoding="utf-8")
CELLS = msgspec.json.decode((DOCS / "results" / "long-prefills.json").read_bytes(), type=Document).cells

APP = typer.Typer(add_completion=False)
APP.command()(main)


def counts(cells: list[PlayedCell], arm: str) -> tuple[int, int]:
    """Figures that are better and worse beyond their intervals."""
    found = [read(each.ratios[arm]) for each in cells for read in METRICS.values()]
    return sum(high < 1 / BEYOND for _, _, high in found), sum(low > BEYOND for _, low, _ in found)


def test_the_page_shows_the_table_of_the_kept_result() -> None:
    shown = PAGE.partition("<!-- long prefills: begin -->")[2].partition("<!-- long prefills: end -->")[0].strip()
    assert shown == "\n".join(table_of(CELLS))
    assert len(CELLS) * len(ARMS) == 144


def test_what_the_page_says_of_agents_with_the_longest_prompts() -> None:
    agents = [each for each in CELLS if each.cell.trace == "kct_raw"]
    order, both = counts(agents, "order"), counts(agents, "both")
    page = " ".join(PAGE.split())
    assert f"the order alone is worse in {order[1]} figures and better in {order[0]}" in page
    assert both[1] == 0
    assert f"with the bound it is better in {both[0]} and worse in none" in page


def test_what_the_page_says_of_the_other_traces() -> None:
    others = [each for each in CELLS if each.cell.trace not in {"kct_raw", "taubench"}]
    assert len({each.cell.trace for each in others}) == 6
    both, order = counts(others, "both"), counts(others, "order")
    assert (
        f"better in {both[0]} figures and worse in {both[1]}, the order alone in {order[0]} and {order[1]}"
        in " ".join(PAGE.split())
    )


def test_the_page_of_the_order_shows_its_table_by_pools() -> None:
    held = msgspec.json.decode((DOCS / "results" / "long-prefills-held.json").read_bytes(), type=Document)
    shown = ORDER.partition("<!-- order by pools: begin -->")[2].partition("<!-- order by pools: end -->")[0].strip()
    assert shown == "\n".join(table_of(held.cells, Dimension.POOL))
    assert held.admission == "working_set"
    assert {each.seed for each in held.cells} == {5, 6, 7}
    tight = [each for each in held.cells if each.cell.pool == 0.25]
    assert f"*better* and *worse* count figures, of {len(tight) * len(METRICS)} in a row" in " ".join(ORDER.split())
    better, worse = counts(tight, "order")
    assert f"the order is worse in {worse} figures and better in {better}**" in ORDER
    for pool in (1.0, 4.0):
        for arm in ("order", "both"):
            better, worse = counts([each for each in held.cells if each.cell.pool == pool], arm)
            assert better > 2 * worse
    assert not any(arm.failed for each in held.cells for arm in (each.plain, *each.arms.values()))


def test_the_rule_of_a_comparison_must_exist() -> None:
    result = CliRunner().invoke(APP, ["--trace-dir", "unused", "--admission", "nope"])
    assert result.exit_code == 2
    assert "unknown admission rule 'nope'; known: never_hold" in " ".join(result.output.split())
