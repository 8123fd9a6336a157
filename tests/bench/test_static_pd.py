"""The experiment ``static-pd`` and its table."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.static_pd.figures import StaticPdLoad, figures_of, table
from launch.__main__ import app

DOCS = Path(__file__).resolve().parents[2] / "docs"
SMALL = ("trace.synth.requests=40", "trace.synth.length_scale=0.2", "repeats=1", "replay.time_scale=4")


class _StaticPdDocument(msgspec.Struct):
    loads: list[StaticPdLoad]


@pytest.mark.fleet
def test_the_shipped_experiment_gives_a_row_per_arm(tmp_path: Path) -> None:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    ended = CliRunner().invoke(app, ["experiment", "run", "static-pd", *settings, "--output", str(tmp_path / "run")])
    assert ended.exit_code == 0, ended.output
    load = figures_of(tmp_path / "run")
    assert (load.load, load.repeats) == ("4 x", 1)
    arms = {arm.arm: arm for arm in load.arms}
    assert list(arms) == ["combined", "elastic", "pd_4p4d", "pd_6p2d"]
    requests = arms["combined"].requests
    assert requests >= 40
    assert {arm.within_600_s for arm in load.arms} == {requests}
    assert arms["combined"].handed_off == 0
    assert min(arms[name].handed_off for name in ("pd_4p4d", "pd_6p2d")) > requests / 2
    assert len(table([load])) == 6


def test_the_page_shows_the_kept_figures() -> None:
    kept = msgspec.json.decode((DOCS / "results" / "static-pd.json").read_bytes(), type=_StaticPdDocument)
    assert "\n".join(table(kept.loads)) in (DOCS / "elastic.md").read_text(encoding="utf-8")
