"""Arms from run files and from experiments."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replayer.compare.arms import ArmFilesError, ArmRuns, parse_arm, read_arm, read_experiment, single, unique
from replayer.compare.comparison import CompareOptions
from replayer.compare.conditions import refuse_or_note
from replayer.compare.runs import ComparisonError, compare_arms
from replayer.records.runs import Run
from tests.replayer.compare.conftest import MakeExperiment
from tests.replayer.constructed_runs import make_run, write_run


def test_an_experiment_gives_its_arms_the_baseline_first(experiment: MakeExperiment) -> None:
    found = read_experiment(experiment(baseline="lmetric"))
    assert [arm.label for arm in found.arms] == ["lmetric", "linear"]
    assert [[one.repeat for one in arm.runs] for arm in found.arms] == [["1", "2"], ["1", "2"]]
    assert found.arms[0].configuration != found.arms[1].configuration != ""
    assert found.trace is None
    [comparison] = compare_arms(found.arms)
    assert comparison.runs == (2, 2)
    assert {row.groups for row in comparison.noise_floor} == {2}


def test_arms_may_be_objects_and_paths_files(experiment: MakeExperiment) -> None:
    root = experiment(repeats=1, arms=[{"name": "linear"}, {"name": "lmetric"}], trace={"path": "trace.jsonl"})
    plan = json.loads((root / "experiment.json").read_text())
    for run in plan["runs"]:
        run["path"] += "/run.jsonl"
        del run["state"]
    (root / "experiment.json").write_text(json.dumps(plan))
    found = read_experiment(root)
    assert [len(arm.runs) for arm in found.arms] == [1, 1]
    assert found.trace == root / "trace.jsonl"


@pytest.mark.parametrize("state", ["refused", "failed", "running", "pending", "interrupted"])
def test_only_runs_that_are_done_are_measurements(experiment: MakeExperiment, state: str) -> None:
    root = experiment()
    plan = json.loads((root / "experiment.json").read_text())
    plan["runs"][1] |= {"state": state, "reasons": ["inst-0 is stale"]}
    (root / "experiment.json").write_text(json.dumps(plan))
    with pytest.raises(ArmFilesError, match=f"run 1 of arm 'lmetric' is {state}: inst-0 is stale.*--force"):
        read_experiment(root)
    forced = read_experiment(root, force=True)
    assert [len(arm.runs) for arm in forced.arms] == [2, 1]
    assert forced.notes == [f"run 1 of arm 'lmetric' is {state}: inst-0 is stale; it is left out"]


@pytest.mark.parametrize("left", [0, 1])
def test_force_is_offered_only_where_it_leaves_two_arms(experiment: MakeExperiment, left: int) -> None:
    root = experiment(repeats=1)
    plan = json.loads((root / "experiment.json").read_text())
    for run in plan["runs"][left:]:
        run |= {"state": "failed", "reasons": ["inst-0 ended. The run is not a measurement."]}
    (root / "experiment.json").write_text(json.dumps(plan))
    with pytest.raises(ArmFilesError) as refused:
        read_experiment(root)
    assert str(refused.value).endswith(
        "is failed: inst-0 ended. The run is not a measurement. Resume the experiment; no two arms have a finished run."
    )


def test_an_arm_without_a_finished_run_is_refused(experiment: MakeExperiment) -> None:
    root = experiment(arms=["linear", "lmetric", "warm"])
    with pytest.raises(ArmFilesError, match="arm 'warm' has no finished run"):
        read_experiment(root)


def test_a_live_experiment_needs_proofs(experiment: MakeExperiment) -> None:
    proved = read_experiment(experiment(backend="live"))
    assert refuse_or_note(proved.arms, None, force=False) == []
    (Path(str(proved.arms[1].runs[0].path)).parent / "fresh.json").unlink()
    with pytest.raises(ComparisonError, match=r"'lmetric' \(run 1\) was measured on a warm fleet"):
        refuse_or_note(proved.arms, None, force=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "without experiment.json"),
        ("{", "not JSON"),
        ("[" * 5_000, "not JSON"),
        ("[]", "names no arms"),
        ('{"arms": []}', "names no arms"),
    ],
)
def test_what_is_no_experiment_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(ArmFilesError, match=message):
        read_experiment(tmp_path)


def test_the_folder_of_a_sweep_is_refused_with_its_run_files(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ArmFilesError, match=r"is a sweep: give its run files, such as .*/\*\.jsonl"):
        read_experiment(tmp_path)


def test_a_run_of_an_unknown_arm_is_refused(experiment: MakeExperiment) -> None:
    with pytest.raises(ArmFilesError, match="arm 'lmetric', which is not among its arms"):
        read_experiment(experiment(arms=["linear"]))


def test_an_arm_from_files(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{number}.jsonl", make_run(noise_seed=number)) for number in range(2)]
    arm = parse_arm(f" two = {paths[0]} , {paths[1]}")
    assert (arm.label, len(arm.runs)) == ("two", 2)
    assert read_arm("", paths[:1]).label == "baseline"
    with pytest.raises(ArmFilesError, match="is given twice"):
        read_arm("x", [paths[0], paths[0]])
    empty = write_run(tmp_path / "empty.jsonl", make_run()._replace(records=[]))
    with pytest.raises(ArmFilesError, match="holds no request"):
        read_arm("x", [empty])


@pytest.mark.parametrize("text", ["linear", "=a.jsonl", "linear=", "linear= , "])
def test_an_arm_must_be_named_and_have_runs(text: str) -> None:
    with pytest.raises(ArmFilesError, match=r"expected NAME=RUN\.jsonl"):
        parse_arm(text)


def test_labels_become_unique() -> None:
    arms = [single(make_run("same")) for _ in range(3)]
    assert [arm.label for arm in unique(arms)] == ["same", "same (2)", "same (3)"]
    with pytest.raises(ComparisonError, match="same name"):
        compare_arms(arms)


def test_files_are_named_by_their_label_or_their_stem(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    files = (("a", ""), ("b", ""), ("deep/b", ""), ("c", "warm"), ("d", "warm"), ("warm", "warm"), ("e", "joint"))
    paths = [write_run(tmp_path / f"{name}.jsonl", make_run(label)) for name, label in files]
    names = [arm.label for arm in unique([read_arm("", [path]) for path in paths])]
    assert names == ["a", "b", "b (2)", "warm (c)", "warm (d)", "warm", "joint"]


def test_repeats_of_unlike_conditions_are_refused_by_name() -> None:
    arms = [
        ArmRuns("a", [*single(make_run()).runs, *single(make_run(time_scale=2.0)).runs]),
        single(make_run("b")),
    ]
    named = r"time_scale differs \(--arrival-speed 1.0 against 2.0, in 'a' \(run 1\) and 'a' \(run 2\)"
    with pytest.raises(ComparisonError, match=named):
        compare_arms(arms)


def with_options(label: str, **options: object) -> Run:
    return make_run(label, options={"policy": label, **options})


def test_other_fleets_of_loose_runs_are_named() -> None:
    eight, four = with_options("a", instances=8, slowdown=1.0), with_options("b", instances=4, slowdown=1.0)
    warnings = compare_arms([single(eight), single(four)])[0].warnings
    assert "instances differs (8 in 'a', 4 in 'b')" in warnings
    assert not any("slowdown" in warning for warning in warnings)
    # A replay does not know the fleet behind its endpoint.
    assert not any("instances" in one for one in compare_arms([single(eight), single(with_options("c"))])[0].warnings)
    declared = [replace(single(run), configuration=run.header.label) for run in (eight, four)]
    assert not any("instances" in warning for warning in compare_arms(declared)[0].warnings)


def test_answers_that_were_cut_short_are_named() -> None:
    """They count as successful, and are early because there was less to generate."""
    whole, cut = make_run("a"), make_run("b", noise_seed=2)
    assert not any("shorter" in one for one in compare_arms([single(whole), single(cut)])[0].warnings)
    for record in cut.records[:7]:
        record.completion_tokens = 50
    cut.records[7].completion_tokens = None
    warnings = compare_arms([single(whole), single(cut)])[0].warnings
    assert "answers shorter than requested: 7 in 'b'; E2E and times of sessions are of less work there" in warnings


def test_an_instance_that_reports_no_cached_tokens_is_named() -> None:
    """Its requests count as misses, so the arm that sends it more has a lower hit rate."""
    reporting, silent = make_run("a"), make_run("b", noise_seed=2)
    for place, record in enumerate(silent.records):
        record.instance = "mute" if place < 12 else "inst-0"
        record.cached_tokens = None if place < 12 else record.cached_tokens
    sentence = "mute reported no cached tokens in 12 requests of 'b', which count as 0 cached"
    assert any(one.startswith(sentence) for one in compare_arms([single(reporting), single(silent)])[0].warnings)
    for record in silent.records:
        record.cached_tokens = None
    assert not any("mute" in one for one in compare_arms([single(reporting), single(silent)])[0].warnings)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"options": {"idle_gap_cap_s": 10.0}}, r"idle_gap_cap_s differs \(60.0 against 10.0"),
        ({"offered": {"requests": 9, "ideal_apc": 0.3}}, r"offered load differs \(ideal_apc 0.25 against 0.3"),
    ],
)
def test_runs_of_one_trace_with_another_plan_are_refused(other: dict[str, Any], message: str) -> None:
    plan: dict[str, Any] = {"options": {"idle_gap_cap_s": 60.0}, "offered": {"requests": 9, "ideal_apc": 0.25}}
    arms = [single(make_run("a", **plan)), single(make_run("b", noise_seed=2, **(plan | other)))]
    with pytest.raises(ComparisonError, match=message):
        compare_arms(arms)
    forced = compare_arms(arms, CompareOptions(force=True))[0].warnings
    assert any(re.search(message, warning) for warning in forced)


def test_repeats_that_are_equal_in_every_time_are_refused() -> None:
    arms = [ArmRuns("a", [*single(make_run()).runs, *single(make_run()).runs]), single(make_run("b", noise_seed=2))]
    with pytest.raises(ComparisonError, match=r"runs 1 and 2 of 'a' are equal in every time"):
        compare_arms(arms)
    forced = compare_arms(arms, CompareOptions(force=True))[0].warnings
    assert any("equal in every time" in warning for warning in forced)
