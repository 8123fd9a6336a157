"""A warm arm is refused: by what its files say, and by hits that a fresh fleet could not have had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policies.registry import make_routing
from replayer.compare.arms import ArmRun, ArmRuns
from replayer.compare.freshness import stale_reasons
from replayer.compare.runs import CompareOptions, ComparisonError, compare, compare_arms
from replayer.records.runs import Run
from replayer.records.summary import summarise
from replayer.traces.synth import SynthOptions, synthetic_trace
from replayer.traces.trace import Trace
from sim.offline.simulate import Noise, SimOptions, simulate
from tests.replayer.constructed_runs import make_run


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic_trace(SynthOptions(requests=150, seed=3, rate_per_s=2.0))


@pytest.fixture(scope="module")
def fresh(trace: Trace) -> Run:
    options = SimOptions(instances=2, noise=Noise(arrival_jitter_s=0.5), label="fresh")
    return simulate(trace, options, make_routing("lmetric", {})).run


def warmed(run: Run, by_tokens: int, *, after: int = 0) -> Run:
    """The run as its records would be on engines that held more: hits up to the whole prompt, from some request on."""
    records = []
    for number, record in enumerate(sorted(run.records, key=lambda one: one.sent_s or 0.0)):
        hits = min((record.cached_tokens or 0) + by_tokens, (record.prompt_tokens or 0) - 1)
        values = {name: getattr(record, name) for name in record.__struct_fields__}
        records.append(type(record)(**{**values, "cached_tokens": hits if number >= after else record.cached_tokens}))
    return run._replace(records=records)


def test_a_fresh_fleet_passes_with_and_without_the_trace(fresh: Run, trace: Trace) -> None:
    assert stale_reasons(fresh) == []
    assert stale_reasons(fresh, trace=trace) == []


def test_a_replay_on_engines_that_replayed_it_before_is_refused(fresh: Run, trace: Trace) -> None:
    warm = warmed(fresh, 10**6)
    warm = warm._replace(header=type(warm.header)(**{**_fields(warm), "label": "warm"}))
    for known in (None, trace):
        options = CompareOptions(resamples=1000, trace=known)
        arms = [ArmRuns("fresh", [ArmRun(fresh)]), ArmRuns("warm", [ArmRun(warm)])]
        with pytest.raises(ComparisonError, match=r"'warm' was measured on a warm fleet.*restart its engines"):
            compare_arms(arms, options)
        with pytest.raises(ComparisonError, match="'warm' was measured"):
            compare_arms(arms[::-1], options)
    found = compare(fresh, warm, force=True)
    assert any("warm fleet: its first request" in note for note in found.notes)


def _fields(run: Run) -> dict[str, Any]:
    return {name: getattr(run.header, name) for name in run.header.__struct_fields__}


def test_hits_are_held_against_the_ideal_of_the_plan(fresh: Run) -> None:
    # The first request is as it should be; only the total cannot be.
    warm = warmed(fresh, 20_000, after=5)
    [reason] = stale_reasons(warm)
    assert "above the" in reason
    assert "one infinite cache" in reason


@pytest.mark.parametrize("more_cached", [0, 30_000])
def test_requests_that_failed_are_part_of_the_ideal(fresh: Run, more_cached: int) -> None:
    """The survivors of timeouts and refusals hit more than the plan as a whole; nothing warm is needed for that."""
    ttfts_s = sorted(record.ttft_s or 0.0 for record in fresh.records)
    limit_s = ttfts_s[len(ttfts_s) * 3 // 4]
    records = []
    for record in warmed(fresh, more_cached, after=5).records:
        failed = {"ok": False, "error": "timeout", "prompt_tokens": None, "completion_tokens": None}
        late = {**failed, "cached_tokens": None} if (record.ttft_s or 0.0) > limit_s else {}
        records.append(msgspec.structs.replace(record, **late))
    run = fresh._replace(records=records)
    assert (summarise(run).apc or 0.0) > fresh.header.offered["ideal_apc"] + 0.05
    reasons = stale_reasons(run)
    assert ["above the" in reason for reason in reasons] == ([True] if more_cached else [])


def test_the_trace_shows_what_totals_do_not(fresh: Run, trace: Trace) -> None:
    """A little more cached than could be, in total still below the ideal: only request by request can that be seen."""
    records = sorted(fresh.records, key=lambda one: one.sent_s or 0.0)
    first_turns = [record for record in records[5:] if record.turn == 1 and (record.prompt_tokens or 0) > 5_000]
    changed = {id(record): record.prompt_tokens for record in first_turns[:3]}
    warm = fresh._replace(
        records=[
            type(record)(
                **{
                    **{name: getattr(record, name) for name in record.__struct_fields__},
                    "cached_tokens": changed.get(id(record), record.cached_tokens),
                }
            )
            for record in records
        ]
    )
    assert stale_reasons(warm) == []
    [reason] = stale_reasons(warm, trace=trace)
    assert reason.startswith("3 requests found more cached than the trace's earlier requests could have left")


def test_another_trace_is_refused_as_evidence(fresh: Run, trace: Trace) -> None:
    other = synthetic_trace(SynthOptions(requests=150, seed=4, rate_per_s=2.0))
    other.sha256 = "cd" * 32
    run = fresh._replace(header=type(fresh.header)(**{**_fields(fresh), "trace_sha256": "ab" * 32}))
    arms = [ArmRuns("a", [ArmRun(run)]), ArmRuns("b", [ArmRun(run)])]
    with pytest.raises(ComparisonError, match="is not the trace that was replayed"):
        compare_arms(arms, CompareOptions(trace=other))


def test_a_first_request_that_failed_proves_nothing() -> None:
    run = make_run(fail_every=1000)
    assert not run.records[0].ok
    assert run.records[1].cached_tokens
    assert stale_reasons(run) == []


def test_engines_that_report_no_hits_cannot_be_judged_by_them() -> None:
    run = make_run()
    for record in run.records:
        record.cached_tokens = None
    assert stale_reasons(run) == []


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (False, "its header says the fleet was not fresh"),
        ({"fresh": False, "reason": "old engines"}, "its header says the fleet was not fresh (old engines)"),
        ({"fresh": True}, None),
        (True, None),
    ],
)
def test_the_header_is_believed(stated: object, expected: str | None) -> None:
    run = make_run(options={"fresh": stated})
    assert stale_reasons(run) == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("proof", "expected"),
    [
        ({"engines": [{"instance": "inst-0", "problems": []}], "gpus": {"status": "ok"}}, ""),
        ({"kind": "simulated", "engines": [], "gpus": None}, ""),
        (
            {"engines": [{"instance": "inst-0", "problems": ["vllm:prompt_tokens_total is 64, not 0"]}]},
            "inst-0: vllm:prompt_tokens_total is 64, not 0",
        ),
        ({"engines": [], "gpus": {"status": "ok"}}, "names no engine"),
        (
            {
                "engines": [{"instance": "a", "problems": []}],
                "gpus": {"status": "foreign", "foreign": ["pid 7 on GPU 0"]},
            },
            "pid 7 on GPU 0",
        ),
    ],
)
def test_the_proof_beside_a_run_is_read(tmp_path: Path, proof: dict[str, Any], expected: str) -> None:
    (tmp_path / "fresh.json").write_text(json.dumps(proof))
    reasons = stale_reasons(make_run(), directory=tmp_path)
    assert expected in "; ".join(reasons)
    assert bool(reasons) == bool(expected)


def test_a_proof_that_cannot_be_read_is_no_proof(tmp_path: Path) -> None:
    (tmp_path / "fresh.json").write_text("{")
    [reason] = stale_reasons(make_run(), directory=tmp_path)
    assert "cannot be read" in reason


def test_a_live_run_of_an_experiment_needs_its_proof(tmp_path: Path) -> None:
    arms = [
        ArmRuns(name, [ArmRun(make_run(name), tmp_path / name / "run.jsonl", needs_proof=name == "b")]) for name in "ab"
    ]
    with pytest.raises(ComparisonError, match=r"'b' was measured on a warm fleet: there is no fresh\.json"):
        compare_arms(arms)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({"engine_ids": ["e1"]}, {"engine_ids": ["e1"]}, "engine id e1"),
        ({"pid": 7, "process_started_unix_s": 5.5}, {"pid": 7, "process_started_unix_s": 5.5}, "pid 7 started at 5.5"),
        ({"pid": 7, "process_started_unix_s": 5.5}, {"pid": 7, "process_started_unix_s": 9.5}, ""),
        ({"engine_ids": ["e1"]}, {"engine_ids": ["e2"]}, ""),
    ],
)
def test_engines_that_served_two_runs_were_warm_in_one(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], shared: str
) -> None:
    arms = []
    for name, engine in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        proof = {"engines": [{"instance": "inst-0", "problems": [], **engine}]}
        (tmp_path / name / "fresh.json").write_text(json.dumps(proof))
        arms.append(ArmRuns(name, [ArmRun(make_run(name), tmp_path / name / "run.jsonl")]))
    if shared:
        with pytest.raises(ComparisonError, match=f"'b' was measured on a warm fleet: {shared} served 'a' as well"):
            compare_arms(arms)
    else:
        assert compare_arms(arms)
