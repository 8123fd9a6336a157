"""``bench.migration``: prices, moved turns, tables, and the page that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.cells.placement import PlacementArm, PlacementFigures
from bench.migration.cells import FREE, PRICES, MigrationCell, MigrationLegs, MovedTurns, legs_of, moved_of, profiles
from bench.migration.tables import EffectOverRuns, by_trace, effects, moved_turns
from sim.hardware import load_profile

DOCS = Path(__file__).resolve().parents[2] / "docs"
GIB = 1 << 30
FIGURES = PlacementFigures(
    ttft_p90_s=1, ttft_mean_s=1, e2e_p50_s=1, e2e_mean_s=1, tpot_p90_s=1, hit_rate=0.5, handed_off=0, failed=0
)


class _MigrationDocument(msgspec.Struct):
    cells: list[MigrationCell]


def kept() -> list[MigrationCell]:
    return msgspec.json.decode((DOCS / "results" / "migration.json").read_bytes(), type=_MigrationDocument).cells


def arm(ttft: list[float], moved: list[bool], rows: list[dict[str, Any]] | None = None) -> PlacementArm:
    values = np.array(ttft)
    return PlacementArm(FIGURES, values, 2 * values, values / 10, np.array(moved, dtype=np.bool_), rows or [])


def test_prices_differ_in_their_transfers_alone(tmp_path: Path) -> None:
    found = {price: load_profile(str(path)) for price, path in profiles(tmp_path).items()}
    assert tuple(found) == PRICES
    assert {each.step for each in found.values()} == {load_profile("h200").step}
    assert found["rdma"].transport("rdma") == load_profile("h20").transport("rdma")
    assert 3 * GIB / found["rdma"].transport("rdma").seconds(3 * GIB, 0, 1) == pytest.approx(9.7e9, rel=0.05)
    free, nvlink = found[FREE].transport("nvlink"), found["nvlink"].transport("nvlink")
    assert free.seconds(GIB, 12, 4) == nvlink.seconds(GIB, 0, 1) < nvlink.seconds(GIB, 12, 4)


def test_moved_turns_are_compared_with_themselves() -> None:
    warm = arm([1.0, 2.0, 3.0, 4.0], [False] * 4)
    moved = moved_of(arm([5.0, 6.0, 1.0, 8.0], [False, True, False, True]), warm)
    assert moved == MovedTurns(turns=2, ttft_s=7.0, ttft_stayed_s=3.0, e2e_s=14.0, e2e_stayed_s=6.0)
    assert moved_of(warm, warm) == MovedTurns(turns=0)


def test_legs_leave_out_what_fell_back_and_what_did_not_move() -> None:
    def row(reason: str, home_s: float, pull_s: float, **inputs: float) -> dict[str, Any]:
        legs = {"prefill": {"actual_s": home_s}, "transfer": {"actual_s": pull_s}}
        shared = {"policy": "migrate", "prompt_tokens": 10_000, "offload_reason": reason, "legs": legs}
        return {**shared, "offload_inputs": inputs}

    rows = [
        row("chosen", 1.0, 0.5, moved_s=2.0, prefill_queue_s=0.25),
        row("chosen", 3.0, 1.5, moved_s=2.0, prefill_queue_s=0.75),
        row("fell_back_d_timeout", 9.0, 60.0, moved_s=2.0, prefill_queue_s=1.0),
        row("does_not_pay", 0.0, 0.0, moved_s=2.0, prefill_queue_s=1.0),
        row("planner_never", 0.0, 0.0),
    ]
    legs = legs_of(arm([1.0], [True], rows))
    # 20,000 tokens of 98,304 bytes in two seconds of pulls.
    assert legs == MigrationLegs(hand_offs=2, fell_back=1, home_s=2.0, home_queue_s=0.5, pull_s=1.0, gb_per_s=0.983)
    assert legs_of(arm([1.0], [False])) == MigrationLegs(hand_offs=0, fell_back=0)


def test_an_effect_over_runs_has_an_interval_that_holds_its_mean() -> None:
    effect = EffectOverRuns([0.9, 1.0, 1.1, 1.3])
    assert 0.9 < effect.low < effect.mean < effect.high < 1.3
    assert str(EffectOverRuns([1.5])) == "1.50 [1.50, 1.50]"


def test_the_page_shows_the_kept_results() -> None:
    page, cells = (DOCS / "migration.md").read_text(encoding="utf-8"), kept()
    assert not any(each.warm.failed for each in cells)
    for lines in (effects(cells), moved_turns(cells), by_trace(cells, "always")):
        assert "\n".join(lines) in page
