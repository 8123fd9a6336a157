"""docs/compare.md states the limits of the report's code."""

from __future__ import annotations

from pathlib import Path

from replayer.report import load_over_time, turns
from replayer.report.figures import fleet as figures_fleet
from replayer.report.figures import latency as figures_latency

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_has_the_limits_of_the_code() -> None:
    page = " ".join((DOCS / "compare.md").read_text(encoding="utf-8").split())
    assert f"at most {load_over_time.BINS} intervals" in page
    assert f"more than {figures_fleet._MAX_ROWS} instances" in page
    assert (
        f"thinned to {figures_latency._MAX_POINTS} points by rank and scatters to {figures_latency._MAX_DOTS}" in page
    )
    assert f"fewer than {turns.MIN_REQUESTS} sessions" in page
