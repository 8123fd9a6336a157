"""``bench.joint``: ratios and their intervals, and the page that shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.cells.placement import METRICS, PlacementArm, PlacementFigures, ratios_of
from bench.joint.cells import JointCell
from bench.joint.tables import harmed, summary_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
ELASTIC = (DOCS / "elastic.md").read_text(encoding="utf-8")
PAGE = (DOCS / "decisions" / "0020-joint-placement.md").read_text(encoding="utf-8")
ARM = PlacementFigures(
    ttft_p90_s=1, ttft_mean_s=1, e2e_p50_s=1, e2e_mean_s=1, tpot_p90_s=1, hit_rate=0.5, handed_off=0, failed=0
)


class _Document(msgspec.Struct):
    cells: list[JointCell]


class _Profiled(msgspec.Struct):
    profile: str
    transport: str


class _Ordered(msgspec.Struct):
    profile: str
    scheduling_policy: str
    base_params: list[str]


def cells(name: str) -> list[JointCell]:
    return msgspec.json.decode((DOCS / "results" / name).read_bytes(), type=_Document).cells


def table_of(played: list[JointCell]) -> str:
    """The table of traces and pools with a hand-off in any run."""
    return table_where(played, lambda each: each.joint.handed_off > 0)


def table_of_differing(played: list[JointCell]) -> str:
    """The table of traces and pools where any run differs from ``warm``."""
    return table_where(played, lambda each: each.joint != each.warm)


def table_where(played: list[JointCell], is_one: Callable[[JointCell], bool]) -> str:
    """The table of traces and pools where any run is one of these."""
    found = {(each.cell.trace, each.cell.pool) for each in played if is_one(each)}
    shown = [each for each in played if (each.cell.trace, each.cell.pool) in found]
    return "\n".join(summary_of(shown, chosen_on=True) + summary_of(shown, chosen_on=False)[2:])


def test_ratios_are_paired_by_turn_and_leave_out_missing_tpots() -> None:
    draw = np.random.default_rng(1)
    base = draw.lognormal(0.0, 1.0, 400)
    tpot = np.where(np.arange(400) % 7 == 0, np.nan, base)
    session_of = np.arange(400) // 4
    moved = np.zeros(400, dtype=np.bool_)
    warm = PlacementArm(ARM, base, base * 3, tpot, moved, [])
    ratios = ratios_of(PlacementArm(ARM, base / 2, base * 3, tpot * 2, moved, []), warm, session_of, seed=1)
    assert ratios.ttft_p90 == ratios.ttft_mean == (0.5, 0.5, 0.5)
    assert ratios.e2e_p50 == ratios.e2e_mean == (1.0, 1.0, 1.0)
    assert ratios.tpot_p90 == (2.0, 2.0, 2.0)
    noisy = ratios_of(
        PlacementArm(ARM, base * draw.lognormal(0.0, 0.3, 400), base, tpot, moved, []), warm, session_of, seed=1
    )
    assert noisy.ttft_mean[1] < noisy.ttft_mean[0] < noisy.ttft_mean[2]


def test_harm_is_what_lies_beyond_its_interval() -> None:
    first = next(each for each in cells("joint.json") if each.warm == each.joint)
    worse = msgspec.structs.replace(first.ratios, e2e_mean=(1.1, 1.04, 1.2), ttft_p90=(1.2, 1.02, 1.4))
    assert harmed([first]) == []
    assert len(harmed([msgspec.structs.replace(first, ratios=worse)])) == 1


@pytest.mark.parametrize("chosen_on", [True, False])
def test_the_page_shows_the_kept_results(chosen_on: bool) -> None:
    assert "\n".join(summary_of(cells("joint.json"), chosen_on=chosen_on)) in PAGE
    assert "| now | 0 | 25 | 0.58 | 0.79 | 0.90 |" in PAGE
    assert harmed(cells("joint.json")) == []
    assert not any(each.warm.failed or each.joint.failed for each in cells("joint.json"))


@pytest.mark.parametrize(
    ("fleet", "kept", "runs", "worse"),
    [(4, "joint-fleets.json", 144, 1), (16, "joint-fleets.json", 144, 0), (64, "joint-64.json", 48, 4)],
)
def test_the_page_on_elastic_prefill_shows_other_fleets(fleet: int, kept: str, runs: int, worse: int) -> None:
    played = [each for each in cells(kept) if each.cell.fleet == fleet]
    assert f"{fleet} instances:\n\n" + table_of(played) in ELASTIC
    assert len(played) == runs
    assert len(harmed(played)) == worse
    assert not any(each.warm.failed or each.joint.failed for each in played)


def test_the_page_on_elastic_prefill_shows_another_profile() -> None:
    played = cells("joint-h200-128.json")
    assert "8 instances, `h200-nvlink-128`:\n\n" + table_of(played) in ELASTIC
    assert (len(played), harmed(played)) == (144, [])
    assert not any(each.warm.failed or each.joint.failed for each in played)
    differ = [each for each in played if each.warm != each.joint]
    intervals = [ratio_of(each.ratios) for each in differ for ratio_of in METRICS.values()]
    above, below = sum(low > 1 for _, low, _ in intervals), sum(high < 1 for _, _, high in intervals)
    assert (
        f"Of the {len(intervals)} figures of {len(differ)} runs that differ from `warm` the interval of {above} "
        f"lies above 1, that of {below} below"
    ) in " ".join(ELASTIC.split())
    saved = (DOCS / "results" / "joint-h200-128.json").read_bytes()
    assert msgspec.json.decode(saved, type=_Profiled).profile == "h200-nvlink-128"


def test_the_page_on_elastic_prefill_shows_both_with_an_order() -> None:
    played = cells("joint-ordered.json")
    assert "Both with an order, `h200-nvlink-128`:\n\n" + table_of(played) in ELASTIC
    assert len(played) == 96
    assert harmed(played) == [
        "kct_v6 load 0.8 pool 4 x8, seed 5: mean TTFT 1.17 (1.06–1.31)",
    ]
    saved = (DOCS / "results" / "joint-ordered.json").read_bytes()
    assert msgspec.json.decode(saved, type=_Ordered) == _Ordered("h200-nvlink-128", "priority", [])


def test_the_page_on_elastic_prefill_counts_the_intervals_beside_1() -> None:
    kept = [each for name in ("joint.json", "joint-fleets.json", "joint-64.json") for each in cells(name)]
    differ = [each for each in kept if each.warm != each.joint]
    intervals = [ratio_of(each.ratios) for each in differ for ratio_of in METRICS.values()]
    above, below = sum(low > 1 for _, low, _ in intervals), sum(high < 1 for _, _, high in intervals)
    assert f"The {len(differ)} runs of all four fleets that differ from `warm` have {len(intervals)} figures" in ELASTIC
    assert f"The interval of {above} of them lies above 1, that of {below} below" in ELASTIC


@pytest.mark.parametrize(
    ("kept", "title", "worse"),
    [("joint-claude.json", "`h200`", 0), ("joint-claude-h200-128.json", "`h200-nvlink-128`", 0)],
)
def test_the_page_on_elastic_prefill_shows_more_sessions_of_claude_code(kept: str, title: str, worse: int) -> None:
    played = cells(kept)
    assert f"{title}:\n\n" + "\n".join(summary_of(played, chosen_on=False)) in ELASTIC
    assert (len(played), len(harmed(played))) == (24, worse)
    assert not any(each.warm.failed or each.joint.failed for each in played)


@pytest.mark.parametrize(
    ("kept", "title", "worse"),
    [
        ("joint-claude-fleets.json", "4 and 16 instances, `h200`", []),
        ("joint-claude-fleets-h200-128.json", "4 and 16 instances, `h200-nvlink-128`", ["1.16", "1.07"]),
    ],
)
def test_the_page_on_elastic_prefill_shows_claude_code_on_small_and_large_fleets(
    kept: str, title: str, worse: list[str]
) -> None:
    played = cells(kept)
    assert f"{title}:\n\n" + "\n".join(summary_of(played, chosen_on=False)) in ELASTIC
    assert [line.partition(": TPOT p90 ")[2][:4] for line in harmed(played)] == worse
    assert {each.cell.fleet for each in played} == {4, 16}
    assert len(played) == 48
    assert not any(each.warm.failed or each.joint.failed for each in played)
    assert all(each.joint == each.warm for each in played if each.cell.pool == 1)


def test_what_the_page_on_elastic_prefill_says_of_claude_code() -> None:
    kept = [cells(name) for name in ("joint-claude.json", "joint-claude-h200-128.json")]
    roomy = [sum("pool 4" in line for line in harmed(played)) for played in kept]
    assert f"{roomy[0]} and {roomy[1]} of 60 figures at pool 4 are surely worse" in ELASTIC
    assert all(each.joint == each.warm for played in kept for each in played if each.cell.pool == 1)


@pytest.mark.parametrize(
    ("kept", "fleet", "title", "runs"),
    [
        ("joint-plain.json", 8, "without a connector, 8 instances, `h200`", 144),
        ("joint-plain-h200-128.json", 8, "Without a connector, 8 instances, `h200-nvlink-128`", 144),
        ("joint-claude-plain.json", 8, "sessions of Claude Code, `h200`", 24),
        ("joint-claude-plain-h200-128.json", 8, "sessions of Claude Code, `h200-nvlink-128`", 24),
        ("joint-plain-fleets.json", 4, "Without a connector, 4 instances, `h200`", 144),
        ("joint-plain-fleets.json", 16, "Without a connector, 16 instances, `h200`", 144),
        ("joint-plain-64.json", 64, "Without a connector, 64 instances, `h200`", 48),
    ],
)
def test_the_page_on_elastic_prefill_shows_fleets_without_a_connector(
    kept: str, fleet: int, title: str, runs: int
) -> None:
    played = [each for each in cells(kept) if each.cell.fleet == fleet]
    assert f"{title}:\n\n" + table_of_differing(played) in ELASTIC
    assert (len(played), len(harmed(played))) == (runs, 2 if fleet == 64 else 0)
    assert not any(each.warm.failed or each.joint.failed or each.joint.handed_off for each in played)
    saved = msgspec.json.decode((DOCS / "results" / kept).read_bytes(), type=_Profiled)
    assert (saved.profile, saved.transport) == ("h200-nvlink-128" if "128" in kept else "h200", "none")


def test_the_page_on_elastic_prefill_counts_the_intervals_without_a_connector() -> None:
    names = ("plain", "plain-h200-128", "claude-plain", "claude-plain-h200-128", "plain-fleets")
    played = [each for name in names for each in cells(f"joint-{name}.json")]
    differ = [each for each in played if each.warm != each.joint]
    intervals = [ratio_of(each.ratios) for each in differ for ratio_of in METRICS.values()]
    above, below = sum(low > 1 for _, low, _ in intervals), sum(high < 1 for _, _, high in intervals)
    assert f"of {5 * len(played):,} in {len(played)} runs;" in ELASTIC
    assert (
        f"Of the {len(intervals)} figures of the {len(differ)} runs with up to 16 instances that differ from `warm` "
        f"the interval of {above} lies above 1, that of {below} below"
    ) in ELASTIC
