"""`warmroute compare` on files and experiments."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from replayer.compare.arms import read_experiment
from replayer.compare.assumptions import ASSUMED_FLOOR
from replayer.records.runs import Run
from replayer.report.cli import register
from tests.replayer.compare.conftest import MakeExperiment
from tests.replayer.constructed_runs import make_run, write_run

WIDE = {"COLUMNS": "220"}


@pytest.fixture
def invoke() -> Callable[..., Result]:
    app = typer.Typer()
    register(app)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["compare", *map(str, arguments)], env=WIDE)

    return run


@pytest.fixture
def store(tmp_path: Path) -> Callable[[Run], Path]:
    def write(run: Run) -> Path:
        return write_run(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", run)

    return write


Invoke = Callable[..., Result]
Store = Callable[[Run], Path]


def test_an_experiment_in_one_argument(invoke: Invoke, experiment: MakeExperiment) -> None:
    root = experiment(repeats=3)
    shown = invoke(root, "--details")
    assert shown.exit_code == 0, shown.output
    assert "Replicates" in shown.output
    assert "lmetric against linear: " in shown.output
    assert "3 and 3 runs" in shown.output
    [found] = json.loads(invoke(root, "--json", "--baseline", "lmetric").output)
    assert (found["baseline"], found["candidate"]) == ("lmetric", "linear")
    assert found["runs"] == {"baseline": 3, "candidate": 3}
    assert {"smallest_detectable", "noise_floor", "standard_error"} <= found["effects"][0].keys()
    assert {row["metric"] for row in found["noise_floor"]} >= {"TTFT p50", "APC"}


KEPT = {
    "skip_first_s": 0.0,
    "skip_last_s": 0.0,
    "resamples": 1500,
    "clock": "scheduled",
    "slo": {"ttft_s": 0.5, "tokens": "prompt", "tpot_s": None},
}


def test_an_experiments_own_settings_are_the_defaults(invoke: Invoke, experiment: MakeExperiment) -> None:
    root = experiment(config={"arms": {}, "comparison": KEPT})
    [found] = json.loads(invoke(root, "--json").output)
    assert (found["clock"], found["resamples"], found["skipped"]) == ("scheduled", 1500, 0)
    assert found["pairs"] == len(make_run().records)
    assert list(found["goodput_per_s"]) == ["goodput"]
    sentence = (
        "Settings of the experiment: clock scheduled, skip_first_s 0, skip_last_s 0, resamples 1500, slo.ttft_s 0.5. "
        "Options override them."
    )
    assert found["notes"][0] == sentence
    shown = invoke(root).output
    assert sentence in shown
    assert "goodput (TTFT ≤ 0.5 s): " in shown


def test_options_override_an_experiments_settings_one_by_one(invoke: Invoke, experiment: MakeExperiment) -> None:
    root = experiment(config={"arms": {}, "comparison": KEPT})
    options = ["--clock", "sent", "--resamples", "2000", "--skip-first-s", "20", "--slo-tpot-s", "0.02"]
    shown = invoke(root, *options).output
    assert "Settings of the experiment: skip_last_s 0, slo.ttft_s 0.5. Options override them." in shown
    assert "goodput (TTFT ≤ 0.5 s, TPOT ≤ 0.02 s): " in shown
    [found] = json.loads(invoke(root, *options, "--json").output)
    assert (found["clock"], found["resamples"], found["window"]["first_s"]) == ("sent", 2000, 20)
    assert found["skipped"] > 0
    kept = json.loads(invoke(experiment_with(root, {"skip_first_s": 20.0}), "--keep-all", "--json").output)
    assert kept[0]["skipped"] == 0


def experiment_with(root: Path, comparison: dict[str, object]) -> Path:
    plan = json.loads((root / "experiment.json").read_text())
    plan["config"]["comparison"] = comparison
    (root / "experiment.json").write_text(json.dumps(plan))
    return root


FULL = "the processors were full in 83% of the samples, so these figures are invalid; run again"


def test_details_explain_their_columns_within_80_columns(
    invoke: Invoke, experiment: MakeExperiment, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WIDE, "COLUMNS", "80")
    shown = invoke(experiment(repeats=3), "--details").output
    assert "…" not in "".join(line for line in shown.splitlines() if line.startswith("metric"))
    assert re.search(r"^ +noise smallest$\n^metric .* p +floor +found$", shown, re.M)
    assert re.search(r"^metric +runs +of arms +1 SD +largest seen +floor of single runs$", shown, re.M)
    said = " ".join(shown.split())
    assert "noise floor, %: equal arms of so many runs differ by less in 95 of 100 cases, by the noise between" in said
    assert "floor of single runs: two runs of one arm differ by less in 95 of 100 cases" in said
    assert said.index("smallest found, %:") < said.index("Replicates: ")
    single = " ".join(invoke(store(make_run("a")), store(make_run("b", noise_seed=2)), "--details").output.split())
    assert "differ by less in 95 of 100 cases, as assumed for single runs; a change below it" in single
    assert "Replicates" not in single


def test_one_run_as_two_arms_is_named(invoke: Invoke, store: Store, tmp_path: Path) -> None:
    run, other = make_run("linear"), make_run("linear", noise_seed=2)
    path = store(run)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    for second, names, how in (
        (path, "'linear' and 'linear (2)'", "are the same file"),
        (link, f"'linear ({path.stem})' and 'linear (link)'", "are the same file"),
        (copy, f"'linear ({path.stem})' and 'linear (copy)'", "have the same content"),
    ):
        said = " ".join(invoke(path, second).output.split())
        assert f"! {names} {how}: a run is compared with itself" in said
    assert "compared with itself" not in invoke(path, store(other)).output


def test_runs_that_the_experiment_calls_invalid_are_named(invoke: Invoke, experiment: MakeExperiment) -> None:
    root = experiment()
    plan = json.loads((root / "experiment.json").read_text())
    plan["runs"][1]["warnings"] = ["the environment changed: python"]
    plan["runs"][2]["warnings"] = plan["runs"][3]["warnings"] = [FULL]
    (root / "experiment.json").write_text(json.dumps(plan))
    names = "'linear' (run 2), 'lmetric' (run 2)"
    marker = f"2 of 4 runs have invalid figures by the experiment's own record: {names}. 'linear' (run 2): {FULL}"
    others = "The experiment recorded further warnings of 'lmetric' (run 1)"
    shown = " ".join(invoke(root).output.split())
    assert f"! {marker}" in shown
    assert f"! {others}" in shown
    assert "the environment changed" not in shown
    assert "'lmetric' (run 1): the environment changed: python" in " ".join(invoke(root, "--details").output.split())
    [found] = json.loads(invoke(root, "--json").output)
    assert found["warnings"] == [marker, others]
    assert f"'lmetric' (run 2): {FULL}" in found["notes"]


def test_a_run_file_that_lost_a_record_is_refused_with_both_numbers(invoke: Invoke, store: Store) -> None:
    whole, lost = store(make_run()), store(make_run("lost"))
    count = len(make_run().records)
    kept = lost.read_bytes().splitlines(keepends=True)
    lost.write_bytes(b"".join([*kept[:5], *kept[6:]]))
    reason = f"the run 'lost' is not complete (the file is damaged: its last line counts {count} requests, it has "
    refused = invoke(whole, lost)
    assert refused.exit_code == 2
    assert f"{reason}{count - 1})" in " ".join(refused.output.split())
    assert reason in " ".join(invoke(whole, lost, "--force").output.split())


@pytest.mark.usefixtures("undrawn")
def test_a_run_file_that_has_changed_since_the_experiment_is_named(invoke: Invoke, experiment: MakeExperiment) -> None:
    root = experiment()
    plan = json.loads((root / "experiment.json").read_text())
    for run in plan["runs"]:
        content = (root / run["path"] / "run.jsonl").read_bytes()
        run["files"] = {"run.jsonl": {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}}
    (root / "experiment.json").write_text(json.dumps(plan))
    assert json.loads(invoke(root, "--json").output)[0]["warnings"] == []
    with (root / "arms" / "lmetric" / "2" / "run.jsonl").open("ab") as file:
        file.write(b"\n")
    marker = "'lmetric' (run 2): run.jsonl has changed since the experiment wrote it (SHA-256)"
    assert f"! {marker}" in " ".join(invoke(root).output.split())
    assert json.loads(invoke(root, "--json").output)[0]["warnings"][0].startswith(marker)
    page = root.parent / "page.html"
    typed = typer.Typer()
    register(typed)
    assert CliRunner().invoke(typed, ["report", str(root), "-o", str(page), "--resamples", "1000"]).exit_code == 0
    assert "run 2: run.jsonl has changed since the experiment wrote it" in page.read_text()


def test_a_negative_seed_is_refused(invoke: Invoke, store: Store) -> None:
    refused = invoke(store(make_run("x")), store(make_run("y")), "--seed", "-1")
    assert refused.exit_code == 2
    assert "Invalid value for '--seed'" in refused.output


def test_settings_that_no_comparison_has_are_refused(invoke: Invoke, experiment: MakeExperiment) -> None:
    result = invoke(experiment(config={"comparison": {"clock": "sun"}}))
    assert result.exit_code == 2
    assert "experiment.json: settings of the comparison: " in " ".join(result.output.split())


def test_arms_by_name_and_a_a_runs(invoke: Invoke, store: Store) -> None:
    paths = [store(make_run("x", noise_seed=number)) for number in range(6)]
    result = invoke(
        "--arm", f"one={paths[0]},{paths[1]}", "--arm", f"two={paths[2]}", "--aa", f"{paths[3]},{paths[4]}", "--json"
    )
    assert result.exit_code == 0, result.output
    [found] = json.loads(result.output)
    assert (found["baseline"], found["candidate"], found["runs"]) == ("one", "two", {"baseline": 2, "candidate": 1})
    assert {(row["runs"], row["degrees_of_freedom"]) for row in found["noise_floor"]} == {(4, 2)}


def test_the_start_and_the_end_are_left_out_by_default(invoke: Invoke, store: Store) -> None:
    paths = [store(make_run()), store(make_run("b"))]
    total = len(make_run().records)
    pairs = {
        options: json.loads(invoke(*paths, *options, "--json").output)[0]["pairs"]
        for options in ((), ("--keep-all",), ("--skip-first-s", "0", "--skip-last-s", "0"), ("--skip-first-s", "20"))
    }
    assert pairs[()] < total
    assert pairs["--keep-all",] == pairs["--skip-first-s", "0", "--skip-last-s", "0"] == total
    assert pairs["--skip-first-s", "20"] < pairs[()]
    assert "--keep-all keeps them" in invoke(*paths, "--details").output


def test_goodput_on_request(invoke: Invoke, store: Store) -> None:
    paths = [store(make_run()), store(make_run("b", slower=1.5)), store(make_run("c"))]
    options = [
        "--slo-ttft-s",
        "2",
        "--slo-tpot-s",
        "0.02",
        "--slo-ttft-base-s",
        "0.5",
        "--slo-ttft-per-1k-tokens-s",
        "1",
    ]
    shown = invoke(*paths, *options)
    assert shown.exit_code == 0, shown.output
    lines, number = " ".join(shown.output.split()), r"\d+\.\d{3} requests/s"
    goodput: dict[str, tuple[str, str]] = {}
    for arm in "bc":
        for name in (
            "goodput (TTFT ≤ 2 s, TPOT ≤ 0.02 s)",
            "goodput, scaled SLO (TTFT ≤ 0.5 s + 1 s per 1,000 prompt tokens, TPOT ≤ 0.02 s)",
        ):
            found = re.search(rf"{re.escape(name)}: {arm} ({number}) against baseline ({number})", lines)
            assert found, lines
            goodput[arm] = (found[1], found[2])
    # The slower arm's figure stands behind its own name.
    assert float(goodput["b"][0].split()[0]) < float(goodput["b"][1].split()[0])
    assert goodput["b"][1] == goodput["c"][1]


def test_tokens_of_the_objective_apply_to_a_scaled_one_only(invoke: Invoke, experiment: MakeExperiment) -> None:
    root = experiment()
    assert "give --slo-ttft-base-s" in " ".join(invoke(root, "--slo-tokens", "new").output.split())
    plan = json.loads((root / "experiment.json").read_text())
    plan["config"] = {**(plan.get("config") or {}), "comparison": {"slo": {"ttft_base_s": 0.5}}}
    (root / "experiment.json").write_text(json.dumps(plan))
    scaled = invoke(root, "--slo-tokens", "new")
    assert scaled.exit_code == 0, scaled.output
    assert "per 1,000 new tokens" in " ".join(scaled.output.split())


def test_a_warm_arm_ends_the_command_and_force_prints_why(invoke: Invoke, store: Store) -> None:
    warm = make_run("warm")
    warm.records[0].cached_tokens = warm.records[0].prompt_tokens
    paths = [store(make_run()), store(warm)]
    refused = invoke(*paths)
    assert refused.exit_code == 2
    assert "'warm' was measured on a warm fleet: its first request (s0, turn 1)" in refused.output
    forced = invoke(*paths, "--force")
    assert forced.exit_code == 0
    assert "'warm' was measured on a warm fleet" in forced.output


def test_the_run_that_a_forced_experiment_leaves_out_is_named(invoke: Invoke, experiment: MakeExperiment) -> None:
    root = experiment()
    plan = json.loads((root / "experiment.json").read_text())
    plan["runs"][3] |= {"state": "refused", "reasons": ["the fleet is not fresh"]}
    (root / "experiment.json").write_text(json.dumps(plan))
    assert "the fleet is not fresh" in invoke(root).output
    forced = invoke(root, "--force", "--json")
    assert "run 2 of arm 'lmetric' is refused" in json.loads(forced.output)[0]["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "compare needs two arms"),
        (["{run}"], "compare needs two arms"),
        (["{run}", "{run}", "--baseline", "nobody"], "there is no such arm; there are baseline, baseline (2)"),
        (["{run}", "{run}", "--keep-all", "--skip-last-s", "3"], "--keep-all leaves nothing out"),
        (["{run}", "--arm", "x"], "expected NAME=RUN.jsonl"),
        (["{run}", "{run}", "--aa", "{run}"], "--aa needs at least two replicates"),
        (
            ["--arm", "a={run}", "--arm", "a={run}"],
            "--arm a=... is given 2 times: separate the repeats of an arm by commas, --arm a=RUN.jsonl,RUN.jsonl",
        ),
        (["{run}", "{folder}"], "give it alone"),
        (["{run}", "{folder}/none.jsonl"], "No such file"),
        (["{run}", "{run}", "--trace", "{folder}/none.jsonl"], "no such file"),
        (["{run}", "{run}", "--slo-e2e-s", "0"], "--slo-e2e-s must be above 0"),
        (["{run}", "{run}", "--slo-tokens", "new"], "--slo-tokens is for the length-scaled objective: give --slo-ttft"),
        (["{run}", "{run}", "--slo-ttft-s", "1", "--slo-tokens", "prompt"], "--slo-tokens is for the length-scaled"),
    ],
)
def test_what_cannot_be_done_is_said(
    invoke: Invoke, store: Store, tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = store(make_run())
    result = invoke(*(one.format(run=path, folder=tmp_path) for one in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_help_states_the_defaults_of_the_code(invoke: Invoke) -> None:
    text = " ".join(invoke("--help").output.replace("│", " ").split())
    assert f"[default: {ASSUMED_FLOOR}]" in text
    assert "[default: 2000]" in text
    assert text.count("[default: (automatic)]") == 2


def test_a_lone_arm_has_nothing_to_be_compared_with(invoke: Invoke, experiment: MakeExperiment) -> None:
    root = experiment()
    plan = json.loads((root / "experiment.json").read_text())
    plan |= {"arms": ["linear"], "runs": [run for run in plan["runs"] if run["arm"] == "linear"]}
    (root / "experiment.json").write_text(json.dumps(plan))
    assert len(read_experiment(root).arms) == 1
    refused = invoke(root)
    assert refused.exit_code == 2
    assert "the experiment has one arm, linear, and compare needs two" in " ".join(refused.output.split())


def test_the_only_arm_with_finished_runs_is_named(invoke: Invoke, experiment: MakeExperiment) -> None:
    root = experiment()
    plan = json.loads((root / "experiment.json").read_text())
    for run in plan["runs"]:
        run["state"] = "done" if run["arm"] == "linear" else "failed"
    (root / "experiment.json").write_text(json.dumps(plan))
    forced = " ".join(invoke(root, "--force").output.split())
    assert "only one arm of the experiment has finished runs, linear," in forced
