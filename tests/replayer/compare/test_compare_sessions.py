"""Session time and slowdown as metrics: known changes, windows, failures, and their place in the family."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from replayer.compare.arms import ArmRun, ArmRuns
from replayer.compare.comparison import CompareOptions, Comparison
from replayer.compare.effects import as_change
from replayer.compare.goodput import Slo
from replayer.compare.metrics import Metric, metrics_of
from replayer.compare.runs import compare, compare_arms
from replayer.compare.statistics.tests import Effect, Verdict
from replayer.compare.verdict import baseline_value
from replayer.records.idle import IdleCosts
from replayer.records.runs import RequestRecord, Run, RunEnd, RunHeader
from replayer.records.sessions import session_clocks

SESSION_METRICS = [
    *("session time mean", "session time p50", "session time p90"),
    *("session slowdown mean", "session slowdown p50", "session slowdown p90"),
]


def closed_loop(label: str = "base", *, slower: float = 1.0, sessions: int = 150, noise_seed: int = 1) -> Run:
    """A run whose turns follow each other: think times of 1 s, times of a heavy-tailed service."""
    work, extra = np.random.default_rng(5), np.random.default_rng(noise_seed)
    records: list[RequestRecord] = []
    for session in range(sessions):
        due_s = float(session)
        for turn in range(1, int(work.geometric(0.3)) + 1):
            took_s = float(np.exp(work.normal(0.0, 0.8))) * slower * float(np.exp(extra.normal(0.0, 0.02)))
            first_s = due_s + took_s / 2
            records.append(
                RequestRecord(
                    request_id=f"{session}-{turn}",
                    session_id=f"s{session}",
                    turn=turn,
                    chat_id=len(records),
                    trace_timestamp_s=float(session) + turn / 1000,
                    scheduled_s=due_s,
                    sent_s=due_s,
                    first_token_s=first_s,
                    finished_s=due_s + took_s,
                    ttft_s=took_s / 2,
                    ttft_scheduled_s=took_s / 2,
                    tpot_s=took_s / 20,
                    e2e_s=took_s,
                    e2e_scheduled_s=took_s,
                    input_length=1000 * turn,
                    output_length=11,
                    wait_s=1.0 if turn > 1 else 0.0,
                    wait_after_end=turn > 1,
                    own_prefix_tokens=1000 * (turn - 1),
                    prompt_tokens=1000 * turn,
                    completion_tokens=11,
                    cached_tokens=900 * (turn - 1),
                    ok=True,
                    http_status=200,
                    instance="inst-0",
                )
            )
            due_s += took_s + 1.0
    return Run(RunHeader(label=label), records, RunEnd(finished_unix_s=1.0, requests=len(records), ok=len(records)))


def effects(found: Comparison) -> dict[str, Effect]:
    return {effect.metric: effect for effect in found.effects}


def test_a_slower_fleet_has_longer_sessions_by_less_than_its_requests() -> None:
    base, slow = closed_loop(), closed_loop("slow", slower=1.3, noise_seed=2)
    found = effects(compare(base, slow, assumed_floor=0.02))
    for name in SESSION_METRICS:
        assert found[name].verdict is Verdict.WORSE, name
        assert found[name].low < found[name].change < found[name].high
    mean = found["session time mean"]
    assert 0.05 < mean.change < found["E2E p50"].change, "think times do not get longer"
    clocks = session_clocks(slow).values()
    assert mean.candidate == pytest.approx(np.mean([clock.completion_s or 0.0 for clock in clocks]))
    assert found["session slowdown p50"].candidate == pytest.approx(
        np.median([clock.slowdown or 0.0 for clock in clocks])
    )
    assert mean.requests == mean.sessions == 150, "one value for each session"


def test_a_run_against_itself_shows_nothing() -> None:
    found = compare(closed_loop(), closed_loop())
    assert all(effect.change == 0 for effect in found.effects)
    assert all(effect.verdict is not Verdict.BETTER for effect in found.effects)


def test_session_metrics_are_corrected_together_with_all_others() -> None:
    found = compare(closed_loop(), closed_loop("b", noise_seed=2))
    judged = [effect for effect in found.effects if not effect.note]
    assert found.family == len(judged)
    assert set(SESSION_METRICS) <= {effect.metric for effect in judged}
    smallest = min(judged, key=lambda effect: effect.p_value)
    assert smallest.p_adjusted == pytest.approx(min(1.0, smallest.p_value * len(judged)))


def test_the_mean_of_sessions_has_the_interval_of_a_bootstrap_of_sessions() -> None:
    base, other = closed_loop(), closed_loop("b", slower=1.1, noise_seed=2)
    mean = effects(compare(base, other, assumed_floor=0.0, resamples=4000))["session time mean"]
    times = np.array([[clock.completion_s or 0.0 for clock in session_clocks(run).values()] for run in (base, other)])
    generator = np.random.default_rng(0)
    drawn = times[:, generator.integers(150, size=(4000, 150))].mean(axis=2)
    assert mean.standard_error == pytest.approx(np.std(np.log(drawn[1] / drawn[0])), rel=0.1)


def test_a_session_with_a_failed_turn_is_left_out_of_both_arms() -> None:
    base, other = closed_loop(), closed_loop("b")
    other.records[-1].ok, other.records[-1].finished_s = False, 10_000.0
    found = compare(base, other)
    assert effects(found)["session time mean"].requests == 149
    assert effects(found)["session time mean"].change == 0
    assert any("1 of 150 sessions of 'b' have a failed turn" in note for note in found.notes)
    assert not any("sessions of 'base'" in note for note in found.notes)


def test_the_session_that_the_limit_cut_is_left_out() -> None:
    runs = [closed_loop(), closed_loop("b")]
    for run in runs:
        run.header.request_limit, run.header.cut_session = len(run.records), "s149"
    assert effects(compare(*runs))["session time mean"].requests == 149


def test_runs_that_are_not_known_to_be_whole_are_not_judged_on_sessions() -> None:
    found = effects(compare(closed_loop(), closed_loop("b")._replace(end=None), force=True))
    assert {found[name].note for name in SESSION_METRICS} == {"no session has a value in every run"}
    assert found["E2E p50"].verdict is not Verdict.NOT_JUDGED


def test_old_files_are_judged_on_session_time_and_not_on_slowdown() -> None:
    runs = [closed_loop(), closed_loop("b")]
    for run in runs:
        for record in run.records:
            record.wait_s = record.own_prefix_tokens = None
    found = effects(compare(*runs))
    assert found["session time p50"].verdict is not Verdict.NOT_JUDGED
    assert found["session slowdown p50"].note == "no session has a value in every run"


def test_sessions_count_by_when_they_begin_and_are_followed_to_their_end() -> None:
    """The first 50 s of the plan are left out: 50 sessions began there, and their later turns do not come back."""
    found = compare(closed_loop(), closed_loop("b"), skip_first_s=50.0, skip_last_s=0.0)
    mean = effects(found)["session time mean"]
    assert mean.requests == 100
    expected = [clock.completion_s or 0.0 for clock in list(session_clocks(closed_loop()).values())[50:]]
    assert mean.baseline == pytest.approx(np.mean(expected))


def test_slowdowns_of_all_runs_are_over_the_same_idle_times() -> None:
    base, other = closed_loop(), closed_loop("b", slower=1.1)
    other.header.idle_costs = msgspec.structs.replace(IdleCosts(), request_s=5.0)
    found = effects(compare(base, other, force=True))
    assert found["session slowdown mean"].change > 0


def test_repeats_give_sessions_a_noise_floor_too() -> None:
    arms = [
        ArmRuns(label, [ArmRun(closed_loop(label, slower=slower, noise_seed=seed)) for seed in seeds])
        for label, slower, seeds in (("a", 1.0, (1, 2, 3)), ("b", 1.3, (4, 5, 6)))
    ]
    [found] = compare_arms(arms, CompareOptions(resamples=1000))
    assert set(SESSION_METRICS) <= {row.metric for row in found.noise_floor}
    assert effects(found)["session slowdown mean"].verdict is Verdict.WORSE
    assert 0 < effects(found)["session slowdown mean"].noise_floor < 0.1


def test_too_few_sessions_beyond_a_quantile_are_not_judged() -> None:
    found = effects(compare(closed_loop(sessions=60), closed_loop("b", sessions=60)))
    assert found["session time p90"].note == "only 6 of 60 sessions lie beyond it"
    assert not found["session time p50"].note
    assert not found["session time mean"].note


def test_units_and_directions() -> None:
    by_name = {metric.name: metric for metric in metrics_of(Slo())}
    assert [name for name in by_name if name.startswith("session")] == SESSION_METRICS
    for name in SESSION_METRICS:
        assert by_name[name].lower_is_better
        assert by_name[name].unit == ("factor" if "slowdown" in name else "s")
    assert as_change(Metric("x", "session_s", mean=True), np.log(1.1), 3.0) == pytest.approx(0.1)
    found = effects(compare(closed_loop(), closed_loop("b")))
    assert baseline_value(found["session slowdown mean"]).endswith("×")
    assert baseline_value(found["session time mean"]).endswith(" s")
