"""The study of stale views: its cells, its statistics, and the page that shows its results."""

from __future__ import annotations

import pytest

from bench.staleness.cells import (
    BLIND,
    POLICIES,
    StaleCell,
    StaleFigures,
    StalenessLoad,
    StalenessReport,
    cells,
    simulate_cell,
    variants_of,
)
from bench.staleness.curves import PAGE, change, curves, factors, read, table, written

SMALL = StalenessLoad(instances=32, replicas=4, requests=60, rate_per_s=10.0, gap_scale=4.0)


def figures(cell: StaleCell, e2e_mean_s: float) -> StaleFigures:
    return StaleFigures(
        cell=cell, ok=1, ttft_p50_s=1.0, ttft_p90_s=2.0, e2e_mean_s=e2e_mean_s, hit_rate=0.5, predicted_wrong_tokens=0.0
    )


def test_every_policy_is_simulated_alone_and_at_every_age_and_blind_ones_once() -> None:
    made = cells(SMALL, POLICIES, (0.1, 1.0), 2)
    assert len(made) == len(set(made))
    assert {cell.policy for cell in made if cell.replicas == 1} == set(POLICIES)
    several = [cell for cell in made if cell.seed == 1 and cell.replicas == 4]
    assert len(several) == sum((1 if policy in BLIND else 2) * len(variants_of(policy)) for policy in POLICIES)


def test_equal_cells_give_equal_figures() -> None:
    cell = StaleCell(policy="warm", replicas=4, staleness_s=0.5, events=True, seed=1, parts=True)
    first = simulate_cell(SMALL, cell)
    assert first == simulate_cell(SMALL, cell)
    assert first.ok == 60


def test_a_change_is_paired_by_seed() -> None:
    assert change([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == pytest.approx((2.0, 2.0, 2.0))
    middle, low, high = change([1.0, 4.0, 2.0], [1.0, 2.0, 4.0])
    assert low < middle < high


def test_tables_have_a_row_for_each_variant_with_figures() -> None:
    made = [
        figures(StaleCell(policy="warm", replicas=count, staleness_s=age_s, events=True, seed=seed, parts=parts), e2e_s)
        for seed in (1, 2, 3)
        for count, age_s, parts, e2e_s in ((1, 0.0, False, 10.0), (4, 1.0, False, 20.0), (4, 1.0, True, 15.0))
    ]
    report = StalenessReport(load=SMALL, figures=made)
    assert [curve.title for curve in curves(report)] == ["`warm`", "`warm`, own parts"]
    assert "| mean E2E, s | `warm`, own parts | 3 | 10.0 | 15.0 |" in table(report)
    assert factors(report)[2:] == [
        "| `warm` | 3 | 2.00 |",
        "| `warm`, own parts | 3 | 1.50 |",
    ]


def test_the_page_has_the_tables_of_the_kept_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, read()) == page, "run `python -m bench.staleness --write`"
