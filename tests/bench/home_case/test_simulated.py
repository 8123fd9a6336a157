"""The simulated figures of docs/home-case.md are those of its commands, from the public trace."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.home_case.__main__ import app as home_case
from replayer.records.runs import read_run
from replayer.records.summary import Quantiles, summarise
from sim.offline.cli import simulate_command
from tests.bench.home_case.test_page import PAGE, PROSE

REPOSITORY = Path(__file__).resolve().parents[3]
TRACE = "kct_v6_sample1k.jsonl.gz"
PROFILES = ("h200", "h200-nvlink-128")


def command(program: str) -> list[str]:
    """Arguments of the first such command on the page."""
    found = re.search(rf"\$ {program} ((?:.*\\\n)*[^#\n]*)", PAGE)
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " "))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of the page, cut from the public one."""
    folder = Path(os.environ.get("WARMROUTE_TRACES") or REPOSITORY.parent / "shared" / "traces") / "agentic"
    if not (folder / TRACE).is_file():
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    target = tmp_path_factory.mktemp("home") / "long.jsonl"
    places = {TRACE: str(folder / TRACE), "long.jsonl": str(target)}
    made = CliRunner().invoke(
        home_case, ["cut", *(places.get(each, each) for each in command("python -m bench.home_case cut"))]
    )
    assert made.exit_code == 0, made.output
    return target


def column(profile: str) -> dict[str, str]:
    """Cells of the page's table by their quantity."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    head = next(place for place, row in enumerate(rows) if f"simulated, `{profile}`" in row)
    at = rows[head].index(f"simulated, `{profile}`")
    return {row[0]: row[at] for row in rows[head + 2 : head + 9]}


def pair(found: Quantiles, scale: float, form: str) -> str:
    assert found.p50 is not None
    assert found.p90 is not None
    return f"{found.p50 * scale:{form}}, {found.p90 * scale:{form}}"


@pytest.mark.traces
@pytest.mark.parametrize("profile", PROFILES)
def test_the_page_holds_what_its_command_simulates(profile: str, cut: Path, tmp_path: Path) -> None:
    assert "and with --profile h200-nvlink-128" in PROSE
    given = [str(cut) if each == "long.jsonl" else each for each in command("warmroute simulate")]
    given[given.index("h200")] = profile
    app, output = typer.Typer(), tmp_path / "run.jsonl"
    app.command()(simulate_command)
    done = CliRunner().invoke(app, [*given, "--output", str(output)])
    assert done.exit_code == 0, done.output
    found = summarise(read_run(output))
    times, ttft = found.total.e2e_s, found.total.ttft_s
    busy = re.search(r"of (\d+) s;", done.output)
    assert busy is not None
    assert column(profile) == {
        "duration, s": busy[1],
        "hit rate": f"{found.apc:.3f}",
        "E2E mean, s": f"{times.mean:.2f}",
        "E2E p50, p90, s": pair(times, 1.0, ".2f"),
        "TTFT mean, s": f"{ttft.mean:.2f}",
        "TTFT p50, p90, s": pair(ttft, 1.0, ".2f"),
        "TPOT p50, p90, ms": pair(found.total.tpot_s, 1e3, ".1f"),
    }
