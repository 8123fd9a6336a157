"""Pairing, refusal, verdicts on constructed data."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from replayer.compare.effects import MIN_SESSIONS
from replayer.compare.runs import Comparison, ComparisonError, compare
from replayer.compare.statistics.tests import Verdict
from replayer.records.runs import Run, RunEnd
from replayer.report.cli import register
from tests.replayer.constructed_runs import make_run

Store = Callable[[Run], Path]


@pytest.fixture
def app() -> typer.Typer:
    application = typer.Typer()
    register(application)
    return application


def test_the_same_arm_twice_is_not_distinguishable() -> None:
    wrong = 0
    for noise_seed in range(2, 12):
        found = compare(
            make_run(seed=noise_seed, noise=0.2),
            make_run("again", seed=noise_seed, noise_seed=noise_seed, noise=0.2),
            resamples=1000,
        )
        wrong += any(effect.verdict in (Verdict.BETTER, Verdict.WORSE) for effect in found.effects)
    assert wrong <= 1


def test_identical_runs_change_nothing() -> None:
    found = compare(make_run(), make_run("again"))
    assert found.sentence.startswith("again against baseline: not distinguishable")
    assert all(effect.change == 0 for effect in found.effects if not effect.note)


def test_a_slower_arm_is_found_and_sized() -> None:
    found = compare(make_run(), make_run("slow", slower=1.2, noise_seed=9))
    by_name = {effect.metric: effect for effect in found.effects}
    for metric in ("TTFT p50", "TTFT p90", "TPOT p50", "E2E p50", "E2E p90"):
        effect = by_name[metric]
        assert effect.verdict is Verdict.WORSE
        assert effect.low < 0.2 < effect.high
    assert by_name["APC"].verdict is Verdict.NOT_DISTINGUISHABLE
    assert re.search(r"slow against baseline: [\d–]+ % worse on TTFT p50", found.sentence)
    mirrored = compare(make_run("slow", slower=1.2, noise_seed=9), make_run())
    assert re.search(r"baseline against slow: [\d–]+ % better on TTFT p50", mirrored.sentence)


def test_order_of_lines_does_not_matter() -> None:
    baseline, candidate = make_run(), make_run("slow", slower=1.1, noise_seed=9)
    mixed = list(candidate.records)
    random.Random(4).shuffle(mixed)
    assert compare(baseline, candidate).as_json() == compare(baseline, candidate._replace(records=mixed)).as_json()


def noted(found: Comparison, words: str) -> bool:
    return any(words in note for note in found.notes)


def test_pairing_is_by_session_turn_and_chat() -> None:
    baseline, candidate = make_run(), make_run("b", slower=2.0)
    records = candidate.records[:-3]
    end = RunEnd(finished_unix_s=1.0, requests=len(records), ok=len(records))
    candidate = candidate._replace(records=records, end=end)
    found = compare(baseline, candidate)
    assert (found.pairing.unmatched_baseline, found.pairing.unmatched_candidate) == (3, 0)
    assert noted(found, "3 requests of 'baseline' left out, not in the other run")
    # Had a request been paired with another, the ratio of its times would not be two.
    assert {key[:3] for key in found.pairing.keys} == {(r.session_id, r.turn, r.chat_id) for r in candidate.records}
    assert next(effect for effect in found.effects if effect.metric == "TPOT p50").change == pytest.approx(1.0)


def test_a_key_that_occurs_twice_is_paired_in_order() -> None:
    run = make_run(sessions=MIN_SESSIONS)
    for record in run.records:
        record.turn = record.chat_id = 1
    found = compare(run, run)
    assert len(found.pairing.keys) == len(run.records)
    assert all(effect.change == 0 for effect in found.effects)


def test_failures_are_reported_and_counted_in_the_success_rate() -> None:
    baseline, candidate = make_run(), make_run("flaky", fail_every=3)
    found = compare(baseline, candidate)
    failed = sum(not record.ok for record in candidate.records)
    assert found.pairing.failed_candidate == failed
    assert noted(found, f"{failed} paired request{'s' * (failed > 1)} failed in 'flaky'")
    by_name = {effect.metric: effect for effect in found.effects}
    assert by_name["success rate"].candidate == pytest.approx(1 - failed / len(candidate.records))
    assert by_name["success rate"].verdict is Verdict.WORSE
    # The failing third is out of both arms: the other two thirds are equal.
    assert by_name["TTFT p50"].change == 0
    assert by_name["TTFT p50"].requests == len(candidate.records) - failed


@pytest.mark.parametrize(
    "field", ["trace_sha256", "time_scale", "clock_scale", "request_limit", "max_inflight_sessions"]
)
def test_runs_of_different_conditions_are_refused(field: str) -> None:
    baseline = make_run()
    unlike: dict[str, Any] = {field: "cd" * 32 if field == "trace_sha256" else 3}
    candidate = make_run("b", **unlike)
    with pytest.raises(ComparisonError, match=f"{field} differs.*--force"):
        compare(baseline, candidate)
    forced = compare(baseline, candidate, force=True)
    assert field in forced.notes[0]


def test_too_few_resamples_and_unknown_clocks_are_refused() -> None:
    with pytest.raises(ComparisonError, match="at least 1000"):
        compare(make_run(), make_run("b"), resamples=400)
    with pytest.raises(ComparisonError, match="sent, scheduled"):
        compare(make_run(), make_run("b"), clock="wall")


def test_a_resumed_run_is_refused() -> None:
    resumed = make_run("broken")._replace(resumed_after=11)
    with pytest.raises(ComparisonError, match=r"'broken' was resumed after 11 requests, .* Replay it again, or pass"):
        compare(make_run(), resumed)
    assert compare(make_run(), resumed, force=True).notes[0].startswith("'broken' was resumed after 11 requests")


def test_an_incomplete_run_is_refused() -> None:
    with pytest.raises(ComparisonError, match="'cut' is not complete"):
        compare(make_run(), make_run("cut")._replace(end=None))


def test_runs_without_a_shared_request_are_refused() -> None:
    other = make_run("b")
    for record in other.records:
        record.session_id = "x" + record.session_id
    with pytest.raises(ComparisonError, match="share no request"):
        compare(make_run(), other)


def test_skip_first_goes_by_the_plan_and_leaves_the_same_requests_out_of_both() -> None:
    baseline, candidate = make_run(), make_run("b")
    # When a later turn was really due depends on the arm; that must not decide what is compared.
    candidate.records[20].scheduled_s = 0.0
    found = compare(baseline, candidate, skip_first_s=5.0)
    start_s = baseline.records[0].trace_timestamp_s
    early = sum(record.trace_timestamp_s - start_s < 5.0 for record in baseline.records)
    assert found.pairing.skipped == early > 0
    assert len(found.pairing.keys) == len(baseline.records) - early


def test_scheduled_clock_uses_the_scheduled_times() -> None:
    baseline, candidate = make_run(), make_run("waits")
    for record in candidate.records:
        record.ttft_scheduled_s = (record.ttft_scheduled_s or 0) * 2
    assert compare(baseline, candidate).effects[0].change == 0
    assert compare(baseline, candidate, clock="scheduled").effects[0].change == pytest.approx(1.0)


def test_a_tail_of_few_requests_is_shown_but_not_judged() -> None:
    found = compare(make_run(sessions=30), make_run("b", sessions=30, slower=2.0))
    p99 = next(effect for effect in found.effects if effect.metric == "TTFT p99")
    assert p99.verdict is Verdict.NOT_JUDGED
    assert "lie beyond it" in p99.note
    assert p99.change == pytest.approx(1.0, abs=0.2)
    assert "not judged: TTFT p99" in found.sentence


def test_silent_engines_make_apc_unknown_and_partly_silent_ones_zero() -> None:
    silent, reporting = make_run(), make_run("b")
    for record in silent.records:
        record.cached_tokens = None
    apc = next(effect for effect in compare(silent, reporting).effects if effect.metric == "APC")
    assert apc.note == "an engine did not report cached tokens"
    for record in reporting.records[::2]:
        record.cached_tokens = None
    apc = next(effect for effect in compare(make_run(), reporting).effects if effect.metric == "APC")
    prompts = np.array([record.prompt_tokens for record in reporting.records])
    cached = np.array([record.cached_tokens or 0 for record in reporting.records])
    assert apc.candidate == pytest.approx(cached.sum() / prompts.sum())


def test_command_line_prints_verdicts_and_json(app: typer.Typer, stored: Store) -> None:
    baseline, candidate = stored(make_run()), stored(make_run("[red]slow", slower=1.2, noise_seed=5))
    printed = CliRunner().invoke(app, ["compare", str(baseline), str(candidate), "--details"])
    assert printed.exit_code == 0, printed.output
    # The label is not markup.
    assert re.search(r"\[red\]slow against baseline:[\s\d–]+% worse on", printed.output)
    as_json = CliRunner().invoke(app, ["compare", str(baseline), str(candidate), "--json", "--resamples", "1000"])
    [found] = json.loads(as_json.output)
    assert found["candidate"] == "[red]slow"
    assert found["resamples"] == 1000
    assert {effect["metric"] for effect in found["effects"]} >= {"TTFT p50", "E2E p99", "APC", "success rate"}


@pytest.mark.parametrize(
    ("contents", "message"),
    [(None, "No such file"), ("not json\n", "not a run record"), ("", "no run header")],
)
def test_command_line_names_the_bad_file(app: typer.Typer, tmp_path: Path, contents: str | None, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    if contents is not None:
        path.write_text(contents)
    result = CliRunner().invoke(app, ["compare", str(path), str(path)])
    assert result.exit_code == 2
    assert message in result.output
    assert "bad.jsonl" in result.output


def test_command_line_refuses_runs_of_different_conditions(app: typer.Typer, stored: Store) -> None:
    paths = [str(stored(make_run())), str(stored(make_run("b", time_scale=2.0)))]
    refused = CliRunner().invoke(app, ["compare", *paths])
    assert refused.exit_code == 2
    assert "time_scale differs (--arrival-speed 1.0 against 2.0" in refused.output
    assert CliRunner().invoke(app, ["compare", *paths, "--force"]).exit_code == 0
    assert CliRunner().invoke(app, ["compare", paths[0]]).exit_code == 2
