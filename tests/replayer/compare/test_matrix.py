"""The matrix of verdicts: one owner of its texts, within 80 columns, readable without colour."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from replayer.compare.comparison import CompareOptions, Comparison
from replayer.compare.matrix import MAIN_METRICS, headline, leader_sentence, matrix_of
from replayer.compare.runs import compare, compare_arms
from replayer.compare.statistics.tests import Effect, Verdict
from replayer.compare.tables import print_details, print_verdict
from replayer.compare.verdict import cell_of
from replayer.report.page import Arm, against_leader, compare_all, make_page
from tests.replayer.constructed_runs import make_run

LONG = (
    "round_robin",
    "vllm_cache_aware_threshold_0.5_imbalance_32",
    "pinned_linear_with_override_at_twice_the_mean",
    "session_sticky_and_then_least_loaded_fallback",
    "elastic_cost_model_prefill_4_decode_4_kv_both",
)


@pytest.fixture(scope="module")
def five() -> list[Arm]:
    runs = [
        make_run(name, slower=slower, noise_seed=number, cached_share=share, fail_every=97 if number == 2 else 0)
        for number, (name, slower, share) in enumerate(
            zip(LONG, (1.0, 0.7, 1.0, 1.6, 9.0), (0.3, 0.9, 0.3, 0.1, 0.3), strict=True), 1
        )
    ]
    return [Arm(run.header.label, run) for run in runs]


@pytest.fixture(scope="module")
def comparisons(five: list[Arm]) -> list[Comparison]:
    found, refusals = compare_all(five, resamples=1000)
    assert not refusals
    return found


def printed(comparisons: list[Comparison], width: int = 80, *, details: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_verdict(console, comparisons)
    if details:
        print_details(console, comparisons)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def effect(metric: str, change: float, verdict: Verdict, **values: object) -> Effect:
    fields: dict[str, object] = {
        "metric": metric,
        "baseline": 1.0,
        "candidate": 1.0 + change,
        "change": change,
        "low": change - 0.05,
        "high": change + 0.05,
        "p_value": 0.001,
        "p_adjusted": 0.01,
        "verdict": verdict,
        "requests": 500,
        "sessions": 50,
        **values,
    }
    return Effect(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "head", "interval"),
    [
        (effect("TTFT p50", -0.123, Verdict.BETTER), "▼ 12 better", "-17 … -7.3"),
        (effect("TTFT p50", 0.123, Verdict.WORSE), "▲ 12 worse", "+7.3 … +17"),
        (effect("APC", 0.123, Verdict.BETTER, lower_is_better=False, unit="ratio"), "▲ 12 better", "+7.3 … +17"),
        (effect("APC", -0.123, Verdict.WORSE, lower_is_better=False, unit="ratio"), "▼ 12 worse", "-17 … -7.3"),
        (effect("E2E p50", -0.012, Verdict.NOT_DISTINGUISHABLE), "≈ -1.2", "-6.2 … +3.8"),
        (effect("E2E p50", 0.0, Verdict.NOT_DISTINGUISHABLE), "≈ 0.0", "-5.0 … +5.0"),
        (effect("E2E p99", 0.4, Verdict.NOT_JUDGED, note="only 2 sessions"), "– +40", "not judged"),
        (effect("E2E p99", float("nan"), Verdict.NOT_JUDGED, note="unknown"), "– –", "not judged"),
        (effect("TPOT p50", 12.3456, Verdict.WORSE), "▲ 1,235 worse", "+1,230 … +1,240"),
    ],
)
def test_the_symbol_is_the_direction_and_the_word_is_the_verdict(found: Effect, head: str, interval: str) -> None:
    cell = cell_of(found)
    assert (cell.head, cell.interval) == (head, interval)
    assert cell.verdict == found.verdict.value


def test_a_change_below_the_noise_floor_is_not_called_a_difference() -> None:
    cell = cell_of(effect("TTFT p50", -0.02, Verdict.NOT_DISTINGUISHABLE, below_floor=True))
    assert cell.head == "≈ -2.0"
    assert cell.note == "below the noise floor"


def test_five_arms_with_long_names_fit_80_columns_and_nothing_is_cut(comparisons: list[Comparison]) -> None:
    text = printed(comparisons)
    assert max(map(len, text.splitlines())) <= 80
    matrix = matrix_of(comparisons)
    assert matrix.metrics == list(MAIN_METRICS)
    for row in matrix.rows:
        for cell in row.cells:
            assert cell.head in text
            assert cell.interval in text
    # Names are folded, not shortened: the first column joined holds them all.
    first = re.search(r"^arm +", text, flags=re.MULTILINE)
    assert first is not None
    column = "".join(line[: len(first[0])].strip() for line in text.splitlines())
    for name in LONG:
        assert name in column


def test_extreme_changes_are_folded_and_nothing_is_cut(comparisons: list[Comparison]) -> None:
    huge = [replace(one, change=123.4, low=98.7, high=234.5, verdict=Verdict.WORSE) for one in comparisons[0].effects]
    text = printed([replace(comparisons[0], effects=huge)])
    assert max(map(len, text.splitlines())) <= 80
    for part in ("12,340", "worse", "+9,870", "+23,450"):
        assert text.count(part) >= len(MAIN_METRICS)


def test_the_details_fit_80_columns_and_hold_every_metric(comparisons: list[Comparison]) -> None:
    text = printed(comparisons, details=True)
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    for found in comparisons:
        assert f"{found.sentence[:60]}" in joined
        for one in found.effects:
            assert one.metric in joined
    assert "only" in joined  # the reason why a tail is not judged


def test_words_without_colour(comparisons: list[Comparison]) -> None:
    text = printed(comparisons)
    assert "\x1b" not in text
    assert re.search(r"▼ \d+ better", text)
    assert re.search(r"▲ [\d,]+ worse", text)
    assert "≈ " in text


@pytest.mark.usefixtures("undrawn")
def test_terminal_page_and_json_print_the_same_cells(five: list[Arm], comparisons: list[Comparison]) -> None:
    matrix = matrix_of(comparisons)
    html = make_page(five, comparisons).html
    table = re.search(r'<table class="matrix">.*?</table>', html, flags=re.DOTALL)
    assert table is not None
    cells = re.findall(r"<td class=[^>]*>([^<]*)<small>([^<]*)</small>", table[0])
    assert cells == [(cell.head, cell.interval) for row in matrix.rows for cell in row.cells]
    stored = [
        (one["symbol"], one["change"], one["interval"])
        for found in comparisons
        for one in found.as_json()["cells"]
        if one["metric"] in MAIN_METRICS
    ]
    assert stored == [(cell.symbol, cell.change, cell.interval) for row in matrix.rows for cell in row.cells]
    assert [row["arm"] for row in matrix.as_json()["rows"]] == list(LONG[1:])
    assert matrix.headline in html


def test_the_headline_groups_arms_by_outcome(comparisons: list[Comparison]) -> None:
    assert headline(comparisons) == (
        f"Against {LONG[0]}: {LONG[1]} is better on some metrics and worse on none; {LONG[2]} is not distinguishable; "
        f"{LONG[3]} and {LONG[4]} are worse on some metrics and better on none."
    )
    assert headline(comparisons[:1]).startswith(f"{LONG[1]} against {LONG[0]}: better on ")
    same = compare(make_run(), make_run("again"), resamples=1000)
    assert "again against baseline: not distinguishable on any of" in headline([same])


def test_an_arm_without_a_success_is_said_to_have_none() -> None:
    none = compare(make_run("broken", fail_every=1), make_run("fine", noise_seed=2), resamples=1000)
    assert headline([none]) == "fine against broken: not judged, no request succeeded in both."
    assert {each.metric: each.note for each in none.effects}["APC"] == "no request succeeded in every run"


def test_differences_outside_the_columns_are_named(comparisons: list[Comparison]) -> None:
    [first, *_] = matrix_of(comparisons).also
    assert first.startswith(f"{LONG[1]}, also: ")
    assert re.search(r"E2E p90 ▼ \d+ % better", first)


def test_the_leader_is_called_better_only_where_the_test_says_so() -> None:
    runs = [make_run("base"), make_run("a", slower=0.5, noise_seed=2), make_run("b", slower=0.5, noise_seed=3)]
    runs.append(make_run("c", slower=0.8, noise_seed=4))
    found = against_leader([Arm(run.header.label, run) for run in runs], resamples=1000)
    leader, other = sorted("ab", key=lambda name: name != found[0].baseline_label)
    assert leader_sentence(found) == (
        f"Of the candidates, {leader} has the lowest E2E p50: there it is better than c and not distinguishable "
        f"from {other}."
    )
    assert leader_sentence([]) == ""


def test_markers_name_single_runs_failures_and_forced_conditions(comparisons: list[Comparison]) -> None:
    markers = matrix_of(comparisons).markers
    assert any(re.fullmatch(rf"Failed requests: \d+ in {LONG[1]}", marker) for marker in markers)
    single = "Single runs: noise between runs is assumed, not measured"
    assert markers[-1] == f"{single}: ±7 % for times, none for APC and rates"
    exact = compare(make_run(), make_run("b"), resamples=1000, assumed_floor=0.0)
    assert matrix_of([exact]).markers == [f"{single}: none for times, none for APC and rates"]
    forced = compare(make_run(), make_run("b", time_scale=2.0), resamples=1000, force=True)
    assert "time_scale differs" in matrix_of([forced]).markers[0]


def test_replicates_need_no_marker() -> None:
    arms = [Arm("a", make_run("a"), repeats=(Arm("a", make_run("a", noise_seed=2)),)), Arm("b", make_run("b"))]
    found = compare_arms([arm.compared() for arm in arms], CompareOptions(resamples=1000))
    assert matrix_of(found).markers == []


def test_a_baseline_value_that_depends_on_the_pairing_is_a_range(comparisons: list[Comparison]) -> None:
    moved = [replace(one, baseline=one.baseline * 2) for one in comparisons[1].effects]
    matrix = matrix_of([comparisons[0], replace(comparisons[1], effects=moved)])
    assert re.fullmatch(r"[\d.]+ m?s … [\d.]+ m?s", matrix.reference[0])
