"""The figures of docs/head-to-head.md are those of the kept records."""

from __future__ import annotations

from pathlib import Path

from bench.routers.records import read_records
from bench.routers.table import lines_of

_DOCS = Path(__file__).parents[3] / "docs"
_BEGIN, _END = "<!-- head to head: begin -->", "<!-- head to head: end -->"


def test_the_page_shows_the_table_of_the_kept_records() -> None:
    page = (_DOCS / "head-to-head.md").read_text(encoding="utf-8")
    shown = page.partition(_BEGIN)[2].partition(_END)[0].strip()
    records = read_records(_DOCS / "results" / "head-to-head-h100-2x")
    assert shown == "\n".join(lines_of(list(records.values()), "warm")).strip()
