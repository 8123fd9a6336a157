"""The figures of the documentation are those that the code draws, and the page has the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.docs_figures.data import PARTS, choices, decision, loads, score_parts
from bench.docs_figures.figures import figures
from policies.routing.warm import Warm

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-routing-decides.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    """The figures, drawn now."""
    return figures()


def test_the_folder_has_the_figures_that_the_code_draws(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        kept = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert NUMBER.sub("#", kept) == NUMBER.sub("#", text), f"{name}: run `make docs-figures`"
        # A last digit may differ between mathematical libraries.
        pairs = zip(NUMBER.findall(kept), NUMBER.findall(text), strict=True)
        assert [pair for pair in pairs if abs(float(pair[0]) - float(pair[1])) > 0.02] == [], name


def test_the_pages_show_every_figure_with_a_text_for_those_who_cannot_see_it(drawn: dict[str, str]) -> None:
    pages = PAGE + (DOCS / "staleness.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"!\[([^\]]+)\]\(images/([^)]+)\)", pages))
    assert sorted(shown.values()) == sorted(drawn)
    assert min(map(len, shown)) > 40


def test_figures_are_small_and_refer_to_nothing_outside(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        assert len(text) < 60_000, name
        assert re.findall(r'(?:href|src)="(?!#)[^"]+"', text) == [], name


def test_the_page_s_scores_are_those_of_the_example() -> None:
    parts = score_parts()
    for instance, terms in parts.items():
        row = re.search(rf"^\| `{instance}` \|.*\|$", PAGE, re.MULTILINE)
        assert row, instance
        shown = [cell.strip("* ") for cell in row[0].strip("|").split("|")][2:]
        assert shown == [f"{terms[part]:.2f}" for part in PARTS] + [f"{sum(terms.values()):.2f}"], instance
    chosen = min(parts, key=lambda instance: sum(parts[instance].values()))
    assert decision(Warm()).decode_on == chosen
    assert f"**`{chosen}`**" in PAGE


def test_the_page_s_choices_are_those_of_the_policies() -> None:
    for name, instance, reason in choices():
        assert f"| `{name}` | `{instance}` | `{reason}` |" in PAGE, name


def test_the_page_s_results_are_those_of_the_simulation() -> None:
    for load in loads():
        assert f"| `{load.rule}` | {load.mean_e2e_s:.0f} s | {load.hit_rate:.0%} |".replace("%", " %") in PAGE, (
            load.rule
        )
