"""The generated part of docs/performance.md equals the tables of the kept run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.data_plane.measure import DataPlaneRecord
from bench.data_plane.report.markdown import BEGIN, END, markdown

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_shows_the_kept_run() -> None:
    record = msgspec.json.decode((DOCS / "results" / "data-plane.json").read_bytes(), type=DataPlaneRecord)
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    shown = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == markdown(record).strip()
