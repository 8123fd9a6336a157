"""The README's table of results: every figure is the one that its command gives."""

from __future__ import annotations

import re
from pathlib import Path

from launch.demo.run import make_trace
from launch.demo.settings import DEMO_CONFIG, load_demo
from policies.registry import make_routing
from replayer.records.summary import summarise
from sim.offline.simulate import SimOptions, simulate

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def cells(page: str, title: str) -> list[str]:
    """Cells of the first table row that begins with this one."""
    row = re.search(rf"^\| {re.escape(title)} \|(.*)\|$", page, re.MULTILINE)
    assert row, title
    return [cell.strip() for cell in row[1].split("|")]


def agrees(shown: str, value: float | None) -> bool:
    """Equal to the digits that are shown."""
    decimals = len(shown.partition(".")[2])
    return value is not None and abs(float(shown) - value) <= 0.5 * 10**-decimals + 1e-9


def test_the_policies_figures_are_those_of_the_demo_s_trace_in_virtual_time(tmp_path: Path) -> None:
    demo = load_demo(DEMO_CONFIG)
    fleet = demo.fleet_of(demo.arms[0])
    assert f"--requests {demo.trace.requests} --seed {demo.trace.seed}\n" in FIGURES
    assert f"--profile {fleet.sim.profile} --sweep" in FIGURES
    trace = make_trace(demo, tmp_path / "trace.jsonl")
    options = SimOptions(instances=fleet.instances, profile=fleet.sim.profile)
    measured: dict[str, dict[str, float | None]] = {}
    for name in ("round_robin", "linear", "lmetric", "session_sticky", "warm"):
        summary = summarise(simulate(trace, options, make_routing(name)).run)
        assert summary.ok == summary.requests == demo.trace.requests
        measured[name] = {
            "TTFT p50": summary.total.ttft_s.p50,
            "TTFT p90": summary.total.ttft_s.p90,
            "E2E p99": summary.total.e2e_s.p99,
            "prompt tokens from cache": None if summary.apc is None else 100 * summary.apc,
        }
    for title in measured["warm"]:
        shown = dict(re.findall(r"`(\w+)` ([\d.]+) (?:s|%)", " ".join(cells(README, title))))
        assert sorted(shown) == sorted(measured), title
        assert [name for name in shown if not agrees(shown[name], measured[name][title])] == [], title


def test_the_routers_figures_are_those_of_the_page_on_performance() -> None:
    for title, quantity in (
        ("CPU per request, 130 KB prompt", "CPU ms per request, 130 KB text"),
        ("TTFT added, p50, 130 KB prompt", "added TTFT p50 ms, 130 KB text"),
    ):
        _, ours, round_robin, cache_aware, sglang, nginx = (
            None if cell == "-" else float(cell) for cell in cells(PERFORMANCE, quantity)
        )
        own, others = cells(README, title)
        shown = re.findall(r"([\d.]+) ms", f"{own} {others}")
        measured = (ours, cache_aware, round_robin, sglang, nginx)
        assert [agrees(one, other) for one, other in zip(shown, measured, strict=True)] == [True] * 5, title
