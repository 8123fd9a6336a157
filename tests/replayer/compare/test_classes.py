"""Comparison of one class of requests: by the trace, in the window of the whole plan, without metrics of sessions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from replayer.compare.arms import ArmRun, ArmRuns
from replayer.compare.comparison import CompareOptions, Comparison
from replayer.compare.goodput import Slo
from replayer.compare.matrix import matrix_of
from replayer.compare.runs import ComparisonError, compare, compare_arms
from replayer.compare.statistics.tests import Verdict
from replayer.records.classes import CLASSES, PlannedClass, classify, planned_class
from replayer.records.runs import RequestRecord, Run
from replayer.report.cli import register
from tests.replayer.compare.conftest import MakeExperiment
from tests.replayer.constructed_runs import make_run, write_run

WARM, MEDIUM, HEAVY = PlannedClass


def mixed(label: str = "base", *, warm_times: float = 1.0, medium_times: float = 1.0, noise_seed: int = 1) -> Run:
    """A run in which one request in ten is WARM with 2,000 new tokens and all others are MEDIUM with 8,000."""
    run = make_run(label, sessions=150, noise_seed=noise_seed)
    for number, record in enumerate(run.records):
        warm = number % 10 == 9
        record.own_prefix_tokens = 4_000
        record.input_length = record.prompt_tokens = 6_000 if warm else 12_000
        record.cached_tokens = 1_000 if number else 0
        scale(record, warm_times if warm else medium_times)
    return run


def scale(record: RequestRecord, times: float) -> None:
    """Multiply a request's times."""
    for name in ("ttft_s", "ttft_scheduled_s", "tpot_s", "e2e_s", "e2e_scheduled_s"):
        setattr(record, name, getattr(record, name) * times)


def verdicts(found: Comparison) -> dict[str, Verdict]:
    return {effect.metric: effect.verdict for effect in found.effects}


def of_class(run: Run, only: PlannedClass) -> list[RequestRecord]:
    return [record for record in run.records if planned_class(record) is only]


@pytest.mark.parametrize("tokens", [0, 4_999, 5_000, 19_999, 20_000, 90_000])
def test_a_requests_class_is_that_of_its_new_tokens_by_the_trace(tokens: int) -> None:
    record = mixed().records[0]
    record.input_length, record.own_prefix_tokens = 7_000 + tokens, 7_000
    assert planned_class(record) == classify(tokens)
    record.own_prefix_tokens = None
    assert planned_class(record) is None
    assert CLASSES == ("WARM", "MEDIUM", "HEAVY")


def test_a_gain_of_the_short_turns_is_found_only_among_them() -> None:
    base, fast = mixed(), mixed("fast", warm_times=0.6, noise_seed=2)
    every = compare(base, fast)
    assert set(verdicts(every).values()) <= {Verdict.NOT_DISTINGUISHABLE, Verdict.NOT_JUDGED}
    medium = compare(base, fast, only_class=MEDIUM)
    assert set(verdicts(medium).values()) <= {Verdict.NOT_DISTINGUISHABLE, Verdict.NOT_JUDGED}
    warm = compare(base, fast, only_class=WARM)
    assert [verdicts(warm)[name] for name in ("TTFT p50", "TPOT p50", "E2E p50")] == [Verdict.BETTER] * 3
    [ttft] = [effect for effect in warm.effects if effect.metric == "TTFT p50"]
    assert ttft.change == pytest.approx(-0.4, abs=0.05)
    assert ttft.requests == len(warm.pairing.keys) == len(of_class(base, WARM))
    assert warm.pairing.other_classes == len(of_class(base, MEDIUM))


def test_what_the_caches_held_does_not_change_the_class() -> None:
    base, missing = mixed(), mixed("missing")
    for record in missing.records:
        record.cached_tokens = 0
    found = compare(base, missing, only_class=WARM, force=True)
    assert len(found.pairing.keys) == len(of_class(base, WARM))


def test_the_window_is_that_of_the_whole_plan() -> None:
    base, other = mixed(), mixed("b")
    every = compare(base, other, skip_first_s=None, skip_last_s=None)
    warm = compare(base, other, skip_first_s=None, skip_last_s=None, only_class=WARM)
    assert warm.window == every.window
    assert warm.window.cold
    assert warm.window.drain
    planned = {(record.session_id, record.turn): planned_class(record) for record in base.records}
    assert warm.pairing.keys == [key for key in every.pairing.keys if planned[key[:2]] is WARM]
    assert warm.pairing.skipped == len(of_class(base, WARM)) - len(warm.pairing.keys)


def test_metrics_of_whole_sessions_are_left_out_and_goodput_is_of_the_class() -> None:
    base, failing = mixed(), mixed("b")
    for record in failing.records:
        if planned_class(record) is MEDIUM:
            record.ok = False
    slo = Slo(ttft_s=1.0)
    found = compare(base, failing, slo=slo, only_class=WARM, force=True)
    assert not [name for name in verdicts(found) if name.startswith("session")]
    assert not [note for note in found.notes if "have a failed turn" in note]
    [goodput] = [effect for effect in found.effects if effect.metric == "goodput"]
    met = [record for record in of_class(base, WARM) if (record.ttft_s or 0.0) <= 1.0]
    assert goodput.baseline == goodput.candidate == pytest.approx(len(met) / len(of_class(base, WARM)))
    assert (found.pairing.failed_candidate, found.pairing.both_ok) == (0, len(of_class(base, WARM)))


def test_requests_without_a_partner_are_counted_by_class() -> None:
    base, short = mixed(), mixed("short")
    for only, count in ((WARM, 2), (MEDIUM, 5)):
        for record in of_class(short, only)[-count:]:
            short.records.remove(record)
    assert compare(base, short, only_class=WARM, force=True).pairing.unmatched_baseline == 2
    assert compare(base, short, force=True).pairing.unmatched_baseline == 7


def test_the_noise_between_runs_is_that_of_the_class() -> None:
    """Two runs of each arm that differ in requests of the other class only."""
    arms = [
        ArmRuns(label, [ArmRun(mixed(label)), ArmRun(mixed(label, medium_times=1.3))]) for label in ("base", "other")
    ]
    scatter = {}
    for only in (None, WARM, MEDIUM):
        [found] = compare_arms(arms, CompareOptions(only_class=only, force=True))
        [row] = [row for row in found.noise_floor if row.metric == "E2E p50"]
        scatter[only] = row.scatter
    assert scatter[WARM] == 0
    assert 0 < scatter[None] < scatter[MEDIUM]


def test_verdict_markers_notes_and_json_name_the_class_and_its_requests() -> None:
    arms = [ArmRuns(label, [ArmRun(mixed(label, noise_seed=seed))]) for seed, label in enumerate("abc", 1)]
    found = compare_arms(arms, CompareOptions(only_class=WARM))
    warm, others = len(of_class(mixed(), WARM)), len(of_class(mixed(), MEDIUM))
    total = warm + others
    matrix = matrix_of(found)
    assert matrix.headline.startswith("WARM requests only: against a: ")
    assert matrix.markers[0] == (
        f"Only requests of class WARM are compared, {warm} of {total}: fewer than 5,000 new tokens by the trace"
    )
    assert found[0].sentence.startswith("WARM requests only: b against a: ")
    assert [note for note in found[0].notes if f": {warm} of {total} paired requests in the compared part" in note]
    assert found[0].as_json()["class"] == {"name": "WARM", "requests": warm, "other_requests": others}


def test_without_a_class_nothing_names_one() -> None:
    found = compare(mixed(), mixed("b"))
    assert "class" not in json.dumps(found.as_json())
    assert "class" not in " ".join([matrix_of([found]).headline, *matrix_of([found]).markers])
    assert found.pairing.other_classes == 0


def test_a_class_without_requests_is_refused_with_those_that_are_there() -> None:
    base = mixed()
    warm, medium = len(of_class(base, WARM)), len(of_class(base, MEDIUM))
    with pytest.raises(
        ComparisonError, match=f"is of class HEAVY .* but {warm} WARM and {medium} MEDIUM; give another"
    ):
        compare(base, mixed("b"), only_class=HEAVY)


def test_a_class_outside_the_window_is_refused_with_the_remedy() -> None:
    runs = [mixed(), mixed("b")]
    for run in runs:
        run.records[0].input_length = 90_000
    with pytest.raises(ComparisonError, match="the plan has 1 in what is left out at its start and end: --keep-all"):
        compare(*runs, only_class=HEAVY, skip_first_s=None, skip_last_s=None)


def test_older_records_are_refused_by_name() -> None:
    older = mixed("older")
    older.records[5].own_prefix_tokens = None
    for runs in ((mixed(), older), (older, mixed())):
        with pytest.raises(
            ComparisonError, match=r"records of 'older' lack own_prefix_tokens.* Replay or simulate again"
        ):
            compare(*runs, only_class=WARM)
        assert compare(*runs).effects


def test_the_option_in_any_case(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{label}.jsonl", mixed(label)) for label in ("a", "b")]
    app = typer.Typer()
    register(app)

    def invoke(*options: str) -> str:
        result = CliRunner().invoke(app, ["compare", *map(str, paths), *options], env={"COLUMNS": "220"})
        assert result.exit_code == (2 if "heavy" in options else 0), result.output
        return " ".join(result.output.split())

    warm = len(of_class(mixed(), WARM))
    shown = invoke("--class", "warm", "--keep-all", "--details")
    assert f"! Only requests of class WARM are compared, {warm} of " in shown
    assert "times of whole sessions are left out" in shown
    [found] = json.loads(invoke("--class", "Warm", "--keep-all", "--json"))
    assert found["class"]["requests"] == found["pairs"] == warm
    assert "error: no request in the compared part of the plan is of class HEAVY" in invoke("--class", "heavy")


@pytest.mark.usefixtures("undrawn")
def test_an_experiments_class_is_that_of_compare_and_report_unless_an_option_is_given(
    experiment: MakeExperiment, tmp_path: Path
) -> None:
    root = experiment(repeats=1, config={"comparison": {"only_class": "WARM"}})
    for seed, arm in enumerate(("linear", "lmetric"), 1):
        write_run(root / "arms" / arm / "1" / "run.jsonl", mixed(arm, noise_seed=seed))
    app, page = typer.Typer(), tmp_path / "report.html"
    register(app)

    def invoke(command: str, *options: str) -> str:
        result = CliRunner().invoke(app, [command, str(root), *options], env={"COLUMNS": "220"})
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    marker = "Only requests of class WARM are compared"
    shown = invoke("compare")
    assert marker in shown
    assert "Settings of the experiment: only_class WARM. Options override them." in shown
    assert "Only requests of class MEDIUM are compared" in invoke("compare", "--class", "medium")
    assert "only_class" not in invoke("compare", "--class", "medium")
    assert "requests of class" not in invoke("compare", "--class", "all")
    assert marker in invoke("report", "-o", str(page))
    assert marker in page.read_text()
    assert "Only requests of class MEDIUM are compared" in invoke("report", "-o", str(page), "--class", "MEDIUM")
    assert marker not in invoke("report", "-o", str(page), "--class", "all")
    assert "requests of class" not in page.read_text()
