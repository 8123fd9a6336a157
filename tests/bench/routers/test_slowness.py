"""Slowness of engines from kept records: those that are equal stay equal, and a slow one is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.gpu.routers_ab import app
from bench.routers.records import RequestFigures, read_records
from bench.routers.slowness import learned_slowness

DOCS = Path(__file__).resolve().parents[3] / "docs"
RESULTS = DOCS / "results"
PAGE = (DOCS / "decisions" / "0029-unequal-instances.md").read_text(encoding="utf-8")
UNEQUAL = {"unequal-h200-mps", "unequal-h200-mps-second", "unequal-h200-mps-sticky", "one-slow-h200-mps"}
"""Folders of records of engines that differ in speed."""


def test_engines_that_are_equal_counted_as_equal_in_every_kept_run() -> None:
    runs = prefills = 0
    for folder in sorted({path.parent.name for path in RESULTS.glob("*/*.json.gz")} - UNEQUAL):
        for record in read_records(RESULTS / folder).values():
            found = learned_slowness(record.requests)
            assert not found.last, (folder, record.label, record.repeat)
            assert found.first_s is None, (folder, record.label, record.repeat)
            runs += found.prefills > 0
            prefills += found.prefills
    page = " ".join(PAGE.split())
    assert f"of {runs} runs" in page
    assert f"with {prefills:,} prefills" in page


def request(
    number: int, instance: str, at_s: float, first_s: float, *, cached: int = 0, prefilled_on: str | None = None
) -> RequestFigures:
    """A request with 20,000 tokens that ends a second after its first token."""
    times = (at_s, at_s, first_s, first_s + 1.0, first_s + 1.0)
    counts = (20_000, 10, 20_000, 10, cached)
    return RequestFigures(
        f"r{number}", f"s{number}", 1, number, at_s, *times, *counts, None, False, None, instance, prefilled_on, None
    )


def test_a_slow_engine_is_found_in_records_by_what_waited_for_nothing() -> None:
    alone = [
        request(number, name, 10.0 * number, 10.0 * number + seconds)
        for number in range(30)
        for name, seconds in (("fast", 0.5), ("slow", 2.0))
    ]
    found = learned_slowness(alone)
    assert found.prefills == 60
    assert found.last["slow"] / found.last["fast"] == pytest.approx(4.0, rel=0.1)
    # The same times, but behind another prefill: they say nothing.
    behind = [
        request(1_000 + number, "slow", 10.0 * number - 1, 10.0 * number + 1, cached=19_900) for number in range(30)
    ]
    assert not learned_slowness([*alone, *behind]).last
    handed = [
        request(1_000 + number, "fast", 10.0 * number - 1, 10.0 * number + 5, prefilled_on="slow")
        for number in range(30)
    ]
    assert not learned_slowness([*alone, *handed]).last


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["slowness", str(tmp_path)])
    assert result.exit_code != 0
    assert "no records" in result.output


def test_the_command_prints_a_row_for_each_run() -> None:
    result = CliRunner().invoke(app, ["slowness", str(RESULTS / "hand-offs-h200-mps")])
    assert result.exit_code == 0
    rows = result.output.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["`joint`, 1 x, 1", "`warm`, 1 x, 1"]
    assert all(re.search(r"\| – \| – \|$", row) for row in rows)
