"""The generated part of docs/performance.md equals the tables of the kept run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.data_plane.measure import DataPlaneRecord
from bench.data_plane.report.markdown import BEGIN, END, markdown

DOCS = Path(__file__).parents[3] / "docs"


PAGE = (DOCS / "performance.md").read_text(encoding="utf-8")
FIGURES = (DOCS / "figures.md").read_text(encoding="utf-8")


def tables_of(kept: str) -> str:
    """The tables of a kept run."""
    return markdown(msgspec.json.decode((DOCS / "results" / kept).read_bytes(), type=DataPlaneRecord)).strip()


def cells(tables: str, quantity: str) -> list[str]:
    """Of the first row of this quantity."""
    row = next(line for line in tables.splitlines() if line.startswith(f"| {quantity} |"))
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_the_page_shows_the_kept_run() -> None:
    assert PAGE.partition(BEGIN)[2].partition(END)[0].strip() == tables_of("data-plane.json")


def test_the_pages_show_the_run_on_another_machine() -> None:
    tables = tables_of("data-plane-epyc.json")
    absolute, _, rest = tables.partition("to each peer")
    ratios, _, targets = rest.partition("Targets:")
    assert targets.strip() in PAGE
    assert targets.count("**missed**") == 9
    for quantity in (
        "CPU ms per request, 130 KB text",
        "CPU ms per request, 2 KB text",
        "CPU µs per event, 64 streams x 100/s",
    ):
        assert cells(ratios, quantity)[0] in " ".join(PAGE.split()), quantity
    (_, cpu, peer, *_), (_, added, other, *_) = (
        cells(absolute, each) for each in ("CPU ms per request, 130 KB text", "added TTFT p50 ms, 130 KB text")
    )
    said = f"On an AMD EPYC {cpu} ms beside {peer} of `round_robin`, and {added} ms added beside {float(other):.2f}."
    assert said in " ".join(FIGURES.split())
