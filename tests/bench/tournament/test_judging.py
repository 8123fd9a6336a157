"""Best and tied policies, ratios to the best, and the tables, on hand-made results."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bench.tournament.folds import ablation, folds, in_place
from bench.tournament.judge import E2E, TTFT, CellFigures
from bench.tournament.ranking import by_axis, family_share, ranking, session_rows
from bench.tournament.results import EntrantResult, GridCell, MetricSample, SessionTimes, TraceFacts
from bench.tournament.settings import TournamentError
from bench.tournament.tables import Made, TournamentReport, markdown

RESAMPLES = 200


def _result(cell: GridCell, label: str, seed: int, ttft_s: float, e2e_s: float, noise: float = 0.0) -> EntrantResult:
    """Resamples vary by ``noise`` independently of the other policies', and by 30 % together with them."""
    shared = np.random.default_rng(seed).normal(0, 0.3, RESAMPLES)
    own = np.random.default_rng([seed, *label.encode()]).normal(0, noise, RESAMPLES)

    def sample(value: float) -> MetricSample:
        return MetricSample(value=value, resampled=(value * np.exp(shared + own)).tolist())

    return EntrantResult(
        cell=cell,
        seed=seed,
        label=label,
        made_of="",
        requests=100,
        warming=10,
        judged=80,
        sessions=20,
        failed=0,
        ttft_p50_s=ttft_s / 2,
        ttft_p90=sample(ttft_s),
        e2e_p50=sample(e2e_s),
        e2e_p90_s=e2e_s * 2,
        tpot_p50_s=0.01,
        apc=0.5,
    )


def _cell(trace: str = "one", load: float = 0.8) -> GridCell:
    return GridCell(trace=trace, load=load, pool=1.0, fleet=8)


def _figures(cell: GridCell, values: dict[str, tuple[float, float]], noise: float = 0.0) -> CellFigures:
    results = [_result(cell, label, seed, *value, noise) for label, value in values.items() for seed in (1, 2, 3)]
    return CellFigures(cell, results)


def test_what_is_common_to_two_policies_does_not_blur_them() -> None:
    figures = _figures(_cell(), {"a": (1.0, 10.0), "b": (1.02, 10.2)})
    verdicts = {each.label: each for each in figures.judge(["a", "b"])}
    assert verdicts["a"].tied
    standing = verdicts["b"].metrics[TTFT]
    assert standing.ratio == pytest.approx(1.02)
    assert (standing.low, standing.high) == pytest.approx((1.02, 1.02))
    assert not verdicts["b"].tied


def test_a_difference_within_the_scatter_is_a_tie() -> None:
    figures = _figures(_cell(), {"a": (1.0, 10.0), "b": (1.02, 10.2), "c": (1.5, 10.0)}, noise=0.1)
    verdicts = {each.label: each for each in figures.judge(["a", "b", "c"])}
    assert verdicts["b"].tied
    assert verdicts["b"].worst == pytest.approx(1.02)
    assert not verdicts["c"].metrics[TTFT].tied
    assert verdicts["c"].metrics[E2E].tied
    assert not verdicts["c"].tied


def test_seeds_that_disagree_widen_the_interval() -> None:
    cell = _cell()
    results = [_result(cell, "a", seed, 1.0, 10.0) for seed in (1, 2, 3)]
    results += [_result(cell, "b", seed, value, 10.0) for seed, value in ((1, 0.9), (2, 1.4), (3, 1.0))]
    standing = CellFigures(cell, results).compare("b", "a", TTFT)
    assert standing.ratio == pytest.approx((0.9 * 1.4) ** (1 / 3))
    assert standing.low == pytest.approx(0.9, rel=0.05)
    assert standing.high == pytest.approx(1.4, rel=0.15)


def test_the_best_on_each_metric_may_be_another_policy() -> None:
    figures = _figures(_cell(), {"a": (1.0, 12.0), "b": (1.2, 10.0)})
    assert figures.best(["a", "b"], TTFT) == "a"
    assert figures.best(["a", "b"], E2E) == "b"
    assert not any(each.tied for each in figures.judge(["a", "b"]))


def test_a_policy_without_all_seeds_is_refused() -> None:
    cell = _cell()
    results = [_result(cell, "a", 1, 1.0, 1.0), _result(cell, "a", 2, 1.0, 1.0), _result(cell, "b", 1, 1.0, 1.0)]
    with pytest.raises(TournamentError, match="not every policy has every seed"):
        CellFigures(cell, results)


@pytest.fixture
def three_cells() -> list[CellFigures]:
    """``a`` is best in two cells and 20 % behind in the third; traces one and two are a family."""
    return [
        _figures(_cell("one"), {"a": (1.0, 10.0), "a without x": (1.1, 10.0), "b": (2.0, 20.0)}),
        _figures(_cell("two"), {"a": (1.0, 10.0), "a without x": (1.1, 10.0), "b": (2.0, 20.0)}),
        _figures(_cell("three"), {"a": (1.2, 10.0), "a without x": (1.0, 10.0), "b": (1.0, 10.0)}),
    ]


FAMILIES = {"one": "f", "two": "f", "three": "g"}


def test_the_ranking_counts_cells_and_families(three_cells: list[CellFigures]) -> None:
    verdicts = [verdict for each in three_cells for verdict in each.judge(["a", "b"])]
    first, second = ranking(verdicts)
    assert (first.label, second.label) == ("a", "b")
    assert first.tied == pytest.approx(2 / 3)
    assert first.worst == pytest.approx(1.2)
    assert first.worst_cell == _cell("three")
    assert first.mean[TTFT] == pytest.approx(1.2 ** (1 / 3))
    assert (first.behind, first.surely_behind) == (1, 1)
    assert family_share(verdicts, FAMILIES) == pytest.approx({"a": 0.5, "b": 0.5})
    assert by_axis(verdicts, lambda cell: FAMILIES[cell.trace])["g"]["a"].tied == 0


def test_a_variant_stands_in_the_subjects_place(three_cells: list[CellFigures]) -> None:
    verdicts = in_place(three_cells, ["a", "b"], "a without x", "a")
    assert [each.tied for each in verdicts] == [True, True, True]
    found = ablation(three_cells, ["a", "b"], "x", "a without x", "a")
    assert found is not None
    assert found.ratio[TTFT] == pytest.approx((1.1 * 1.1 / 1.2) ** (1 / 3))
    assert (found.worse[TTFT], found.better[TTFT], found.worse[E2E]) == (2, 1, 0)
    assert ablation(three_cells, ["a", "b"], "y", "a without y", "a") is None


def test_a_fold_reports_the_family_it_did_not_choose_on(three_cells: list[CellFigures]) -> None:
    verdicts = {variant: in_place(three_cells, ["a", "b"], variant, "a") for variant in ("a", "a without x")}
    held_f, held_g = folds(verdicts, FAMILIES)
    # With family f held out, only trace three chooses: there, without x is best.
    assert (held_f.family, held_f.chosen, held_f.held_out.tied) == ("f", "a without x", 1.0)
    # On f both are best or tied in every cell; the mean ratio is the same too, so the name decides.
    assert (held_g.family, held_g.chosen, held_g.held_out.tied) == ("g", "a", 0.0)


def _facts(name: str) -> TraceFacts:
    return TraceFacts(
        name=name,
        made_of="",
        family=FAMILIES[name],
        file=f"{name}.jsonl",
        requests=1000,
        sessions=100,
        saturation=1.2345,
        attained=1.01,
        latency_s=9.87,
        hot_set_tokens=123456.0,
        pools={"0.25": 65536, "1": 123456},
        floored=["0.25"],
    )


def test_the_tables(three_cells: list[CellFigures]) -> None:
    report = TournamentReport(
        made=Made(command="python -m bench.tournament", versions={"warmroute": "1", "Python": "3"}),
        facts={name: _facts(name) for name in FAMILIES},
        figures=three_cells,
        field=["a", "b"],
        subject="a",
        ideas={"x": "a without x"},
        ablation_figures=three_cells,
        with_folds=True,
    )
    text = markdown(report)
    assert text == markdown(report)
    assert "### Sessions" not in text
    with_sessions = msgspec.structs.replace(report, figures=[_with_sessions("one", {"a": 10.0, "b": 20.0})])
    assert "| `b` | 2.000 | 2.000 | 2.000 | 10.00 | 8.00 | 20.00 | 2 |" in markdown(with_sessions)
    assert all(len(line.split("|")) == len(head.split("|")) for head, line in _rows(markdown(with_sessions)))
    for line in (
        "Made by `python -m bench.tournament` (Python 3, warmroute 1).",
        "| `one` | f | 1,000 | 100 | 1.23 | 1.01 | 9.87 | 123,456 | 65,536*, 123,456 |",
        "| 1 | `a` | 67 % | 50 % | 67 % | 1.063 | 100 % | 1.000 | 1.20 | 1 | 1 | 0 |",
        "- furthest behind the best 20.0 % (target 5 %), in three load 0.8 pool 1 x8: **missed**",
        "| three load 0.8 pool 1 x8 | 1.200 [1.200, 1.200] | 1.000 [1.000, 1.000] |",
        "| policy | f | g |",
        "3 cells: fleets ×8; seeds 1, 2, 3.",
        "| x | 100 % | 1.00 | 1.003 | 2 / 1 | 1.000 | 0 / 0 |",
        "| f | `a without x` | 100 % | 1.00 | 100 % | 1.00 |",
    ):
        assert line in text, line
    assert all(len(line.split("|")) == len(head.split("|")) for head, line in _rows(text))


def _with_sessions(trace: str, seconds: dict[str, float], completed: int = 12) -> CellFigures:
    def times(mean_s: float) -> SessionTimes:
        return SessionTimes(
            sessions=13,
            completed=completed,
            mean_s=mean_s,
            p50_s=mean_s / 2,
            p90_s=mean_s * 2,
            slowdown_mean=mean_s / 4,
            slowdown_p50=mean_s / 5,
            slowdown_p90=mean_s / 2,
        )

    results = [
        msgspec.structs.replace(_result(_cell(trace), label, seed, 1.0, 10.0), session_times=times(value * factor))
        for label, value in seconds.items()
        for seed, factor in ((1, 1.0), (2, 4.0))
    ]
    return CellFigures(_cell(trace), results)


def test_sessions_are_compared_with_the_lowest_of_the_cell() -> None:
    cells = [_with_sessions("one", {"a": 10.0, "b": 20.0}), _with_sessions("two", {"a": 30.0, "b": 15.0})]
    first, second = session_rows(cells, ["a", "b"])
    assert (first.label, first.cells, first.failed) == ("a", 2, 4)
    assert first.ratios == pytest.approx([2**0.5] * 3)
    assert second.ratios == pytest.approx([2**0.5] * 3)
    # Geometric means over cells (10 and 30 s) and seeds (once and four times as long).
    assert first.slowdowns == pytest.approx([each * 2 * 300**0.5 for each in (1 / 4, 1 / 5, 1 / 2)])


def test_cells_with_few_sessions_and_older_results_are_no_part_of_the_session_table(
    three_cells: list[CellFigures],
) -> None:
    few = _with_sessions("one", {"a": 10.0, "b": 20.0}, completed=9)
    assert session_rows([few, *three_cells], ["a", "b"]) == []
    [row, _] = session_rows([few, _with_sessions("two", {"a": 1.0, "b": 2.0})], ["a", "b"])
    assert row.cells == 1


def _rows(text: str) -> list[tuple[str, str]]:
    """Every row of every table with its header."""
    found, head = [], ""
    for line in text.splitlines():
        if not line.startswith("|"):
            head = ""
        elif not head:
            head = line
        else:
            found.append((head, line))
    return found
