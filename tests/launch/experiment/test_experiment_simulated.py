"""Simulated experiments, end to end, and the environment they record."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import typer
import yaml
from typer.testing import CliRunner

from launch.__main__ import app
from launch.experiment.definition.file import LoadedExperiment
from launch.experiment.definition.order import Slot
from launch.experiment.definition.sections import ComparisonSettings
from launch.experiment.records import environment
from launch.experiment.records.freshness import SimulatedProof, read_proof, simulated_proof
from launch.experiment.records.state import read_experiment
from launch.experiment.run import simulated
from launch.experiment.run.runner import failed_requests
from launch.experiment.run.simulated import simulator_command
from launch.experiment.verify import verify
from launch.run.processes import ManagedProcess
from replayer.compare.comparison import KeptSettings, kept_settings
from replayer.records.runs import RequestRecord, read_run
from replayer.report.cli import register
from replayer.report.inputs import read_inputs
from replayer.traces.formats.source import file_sha256
from tests.launch.conftest import REPOSITORY, until
from tests.launch.experiment.conftest import simulating_here

SMALL: dict[str, Any] = {
    "name": "small",
    "trace": {"synth": {"requests": 60, "seed": 3, "rate_per_s": 2.0, "length_scale": 0.2}},
    "replay": {"time_scale": 2, "max_inflight_sessions": 40, "idle_gap_cap_s": 30},
    "arms": {
        "plain": {"policy": "linear"},
        "slow": {"policy": {"name": "linear", "params": {"alpha": 1.0}}, "fleet": {"slowdown": 1.5}},
    },
    "repeats": 2,
    "order": "randomised",
    "backend": {
        "kind": "simulated",
        "instances": 3,
        "profile": "h20",
        "pool_tokens": 200_000,
        "noise": {"arrival_jitter_s": 0.5, "speed_sigma": 0.05},
    },
    "comparison": {"resamples": 1000, "clock": "scheduled", "skip_first_s": 0},
}


def written(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **values}, sort_keys=False))
    return path


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
def test_the_whole_of_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    config = written(tmp_path)
    ended = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory), "--jobs", "2"])
    assert ended.exit_code == 0, ended.output
    assert "slow against plain:" in ended.output
    state = read_experiment(directory)
    assert (state.state, state.backend, state.arms, state.baseline) == ("done", "simulated", ["plain", "slow"], "plain")
    seeds = set()
    for run in state.runs:
        folder = directory / run.path
        assert run.path == f"arms/{run.arm}/{run.repeat}"
        assert (run.state, run.requests, run.ok, run.seed) == ("done", 60, 60, run.repeat - 1)
        header = read_run(folder / "run.jsonl").header
        assert (header.label, header.time_scale, header.max_inflight_sessions) == (run.arm, 2, 40)
        assert header.trace_sha256 == state.trace.sha256
        seeds.add(header.seed)
        record = json.loads((folder / "arm.json").read_text())
        assert (record["instances"], record["noise_seed"]) == (3, header.seed)
        assert record["policy"]["name"] == "linear"
        assert record["policy"]["resolved"]["alpha"] == 1.0
        assert record["kv_capacity_tokens"] == pytest.approx(200_000, abs=64)
        assert len((folder / "breakdown.jsonl").read_text().splitlines()) == 60
        assert isinstance(read_proof(folder), SimulatedProof)
        assert {"run.jsonl", "breakdown.jsonl", "fresh.json", "arm.json"} == set(run.files)
    assert len(seeds) == 4
    assert verify(directory).problems == []
    reported = json.loads((directory / "comparison.json").read_text())["comparisons"][0]
    change = {effect["metric"]: effect["change"] for effect in reported["effects"]}
    assert change["TPOT p50"] > 0.2
    comparing = typer.Typer()
    register(comparing)
    again = CliRunner().invoke(comparing, ["compare", str(directory), "--json"])
    assert json.loads(again.output)[0]["effects"] == reported["effects"]
    _environment_was_noted(directory)


def test_every_reader_of_a_made_trace_reads_it_as_it_was_made(tmp_path: Path) -> None:
    """Blocks of a size that is not detected, and arrivals that only a given unit of time lets pass."""
    synth = {"requests": 40, "seed": 3, "rate_per_s": 20_000.0, "length_scale": 0.1, "block_tokens": 48}
    directory = tmp_path / "run"
    config = written(tmp_path, trace={"synth": synth}, replay={}, repeats=1)
    ended = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory)])
    assert ended.exit_code == 0, ended.output
    assert "slow against plain:" in ended.output
    comparing = typer.Typer()
    register(comparing)
    again = CliRunner().invoke(comparing, ["compare", str(directory)])
    assert again.exit_code == 0, again.output
    trace = read_inputs([directory]).trace
    assert trace is not None
    assert trace.block_tokens == 48


def _environment_was_noted(directory: Path) -> None:
    noted = msgspec.json.decode((directory / "environment.json").read_bytes(), type=environment.Environment)
    assert noted.software.packages["msgspec"] == msgspec.__version__
    assert noted.hardware.processors == psutil.cpu_count()
    assert noted.hardware.memory_bytes == psutil.virtual_memory().total
    assert set(noted.files) == {"experiment", "hardware profile h20", "trace as replayed"}
    assert all(len(digest) == 64 for digest in noted.files.values())
    commit = subprocess.run(["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"], capture_output=True, check=False)
    assert (noted.software.git is None) == (commit.returncode != 0)
    if noted.software.git is not None:
        assert len(noted.software.git.commit) == 40


OWN = """
from dataclasses import dataclass

from policies.routing.warm import Warm


@dataclass(frozen=True)
class Own(Warm):
    eager: bool = False
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the folder that commands run in, as when a user has one there; it is not imported yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_policy", raising=False)
    path = tmp_path / "own_policy.py"
    path.write_text(OWN)
    return path


WITH_OWN = {
    "arms": {"base": {"policy": "warm"}, "own": {"policy": {"name": "own_policy:Own", "params": {"eager": True}}}},
    "repeats": 1,
}


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
def test_a_class_of_ones_own_is_an_arm_and_its_record_is_read_without_it(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, config = tmp_path / "run", written(tmp_path, **WITH_OWN)
    ended = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory)])
    assert ended.exit_code == 0, ended.output
    assert "own against base:" in ended.output
    state = read_experiment(directory)
    assert state.files["module own_policy"] == file_sha256(own)
    options = read_run(directory / "arms" / "own" / "1" / "run.jsonl").header.options
    assert (options["policy"], options["policy_class"]) == ("warm", "own_policy:Own")
    assert "policy_class" not in read_run(directory / "arms" / "base" / "1" / "run.jsonl").header.options
    resolved = json.loads((directory / "arms" / "own" / "1" / "arm.json").read_text())["policy"]["resolved"]
    assert (resolved["eager"], resolved["others_weight"]) == (True, 1.0)
    own.unlink()
    monkeypatch.delitem(sys.modules, "own_policy")
    found = verify(directory)
    assert (found.problems, found.warnings) == ([], [])


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
def test_a_class_that_changes_during_the_experiment_fails_the_run(own: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    own.write_text(f"{OWN}\nopen(__file__, 'a').write('# edited\\n')\n")
    config = written(tmp_path, **WITH_OWN, order="interleaved")
    ended = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory)])
    assert ended.exit_code == 1, ended.output
    assert "module own_policy has changed since the experiment began" in ended.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an experiment that has been run once, for tests that change copies."""
    folder = tmp_path_factory.mktemp("finished")
    config, directory = written(folder, repeats=1), folder / "run"
    with simulating_here():
        assert CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory)]).exit_code == 0
    return directory


def test_a_record_with_an_objective_s_tokens_alone_is_verified_with_a_warning(finished: Path, tmp_path: Path) -> None:
    """Earlier versions accepted that."""
    directory = shutil.copytree(finished, tmp_path / "run")
    path = directory / "experiment.json"
    state = json.loads(path.read_text())
    state["config"]["comparison"]["slo"]["tokens"] = "new"
    path.write_text(json.dumps(state))
    found = verify(directory)
    assert (found.problems, found.warnings) == (
        [],
        ["comparison.slo.tokens has no effect: there is no length-scaled objective"],
    )
    state["runs"][0]["seed"] = 7
    path.write_text(json.dumps(state))
    assert "the runs are not those that the settings plan, in that order" in verify(directory).problems


@pytest.mark.usefixtures("simulated_here")
def test_a_record_with_an_objective_s_tokens_alone_is_resumed_without_the_key(finished: Path, tmp_path: Path) -> None:
    """A file that has it is refused now, with the advice to remove it."""
    directory = shutil.copytree(finished, tmp_path / "run")
    config = written(tmp_path, repeats=1)
    path = directory / "experiment.json"
    state = json.loads(path.read_text())
    state["config"]["comparison"]["slo"]["tokens"] = "new"
    state["runs"][1]["state"] = state["state"] = "interrupted"
    path.write_text(json.dumps(state))
    resume = ["experiment", "run", str(config), "--output", str(directory), "--resume"]
    refused = CliRunner().invoke(app, [*resume, "--set", "comparison.slo.tokens=new"])
    assert "remove it" in refused.output
    changed = CliRunner().invoke(app, [*resume, "--set", "comparison.resamples=1001"])
    assert "comparison.resamples: was 1000, now 1001" in changed.output
    assert "tokens" not in changed.output
    resumed = CliRunner().invoke(app, resume)
    assert resumed.exit_code == 0, resumed.output
    assert "slow against plain:" in resumed.output
    assert (read_experiment(directory).state, verify(directory).problems) == ("done", [])


def test_compare_reads_every_setting_of_the_section_comparison() -> None:
    section = ComparisonSettings.model_validate(
        {
            "skip_first_s": 1.0,
            "skip_last_s": 2.0,
            "resamples": 3000,
            "clock": "scheduled",
            "only_class": "WARM",
            "slo": {
                "ttft_s": 0.1,
                "tpot_s": 0.2,
                "e2e_s": 0.3,
                "ttft_base_s": 0.4,
                "ttft_per_1k_tokens_s": 0.5,
                "tokens": "new",
            },
        }
    )
    assert msgspec.to_builtins(kept_settings(section.model_dump())) == section.model_dump()
    assert msgspec.to_builtins(KeptSettings()) == ComparisonSettings().model_dump()


def test_failed_requests_are_a_warning_with_the_reason_of_most_of_them() -> None:
    def record(number: int, error: str | None) -> RequestRecord:
        return RequestRecord(
            request_id=str(number),
            session_id="s",
            turn=1,
            chat_id=number,
            trace_timestamp_s=0.0,
            scheduled_s=0.0,
            ok=error is None,
            error=error,
        )

    good, full, slow = record(0, None), record(1, "HTTP 400: no room"), record(2, "timed out after 600 s")
    assert failed_requests([good, good]) == []
    assert failed_requests([good, full, full]) == ["2 of 3 requests failed: HTTP 400: no room"]
    assert failed_requests([slow, full, full, good]) == ["3 of 4 requests failed, 2 of them: HTTP 400: no room"]


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
def test_one_arm_is_not_pointed_to_compare(tmp_path: Path) -> None:
    for arms in ({"plain": {"policy": "linear"}}, {name: {"policy": "linear"} for name in ("plain", "again")}):
        config, directory = written(tmp_path, arms=arms, repeats=1), tmp_path / str(len(arms))
        ended = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory)])
        assert ended.exit_code == 0, ended.output
        assert ("warmroute compare" in ended.output) == (len(arms) == 2)
        assert f"warmroute report {directory}" in ended.output


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
def test_failed_and_refused_runs_are_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first arm's simulator gets an unknown transport; the third's process claims to be the second's."""

    def proof(process: ManagedProcess) -> SimulatedProof:
        if process.log_path.parts[-3] == "again":
            kept = read_proof(directory / "arms" / "good" / "1")
            assert isinstance(kept, SimulatedProof)
            return kept
        return simulated_proof(process)

    def command(experiment: LoadedExperiment, slot: Slot, trace: Path, run_dir: Path) -> list[str]:
        return [*simulator_command(experiment, slot, trace, run_dir), *(["--transport=pigeon"] * (slot.arm == "bad"))]

    directory = tmp_path / "run"
    monkeypatch.setattr(simulated, "simulated_proof", proof)
    monkeypatch.setattr(simulated, "simulator_command", command)
    arms = {
        "bad": {"policy": "linear"},
        "good": {"policy": "linear"},
        "again": {"policy": "linear"},
        "last": {"policy": "linear"},
    }
    config = written(tmp_path, arms=arms, repeats=1, on_failure="skip", on_stale="skip", order="interleaved")
    ended = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory)])
    assert ended.exit_code == 1
    state = read_experiment(directory)
    assert (state.state, [run.state for run in state.runs]) == ("done", ["failed", "done", "refused", "done"])
    bad, _, again, _ = state.runs
    assert "pigeon" in bad.reasons[0]
    assert str(directory / bad.path / "simulate.log") in bad.reasons[0]
    assert "served good, repeat 1 before: its caches are warm" in again.reasons[0]
    assert "no run of the baseline 'bad' is left to compare with" in ended.output
    assert CliRunner().invoke(app, ["experiment", "verify", str(directory)]).exit_code == 1
    assert CliRunner().invoke(app, ["experiment", "status", str(directory)]).exit_code == 3


def simulates(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[1:4] == ["-m", "sim", "simulate"]  # not its guard, which has them further right
    except psutil.Error:
        return False


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
def test_ctrl_c_ends_the_simulators(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    # Many instances make every decision slow.
    config = written(tmp_path, trace={"synth": {"requests": 2000}}, backend={**SMALL["backend"], "instances": 400})
    command = [sys.executable, "-m", "launch", "experiment", "run", str(config), "-o", str(directory), "-j", "2"]
    runner = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:

        def simulating() -> list[psutil.Process]:
            assert runner.poll() is None, runner.communicate()[0]
            return [child for child in psutil.Process(runner.pid).children(recursive=True) if simulates(child)]

        until(lambda: len(simulating()) == 2, 60)
        children = simulating()
        other = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory), "--resume"])
        assert "another process runs this experiment" in other.output
    finally:
        os.kill(runner.pid, signal.SIGINT)
        output, _ = runner.communicate(timeout=60)
    assert runner.returncode == 130, output
    assert not [child for child in children if child.is_running()]
    state = read_experiment(directory)
    assert state.state == "interrupted"
    assert [run.state for run in state.runs] == ["interrupted", "interrupted", "pending", "pending"]


class TestEnvironment:
    def test_secrets_are_left_out(self) -> None:
        found = environment._variables(
            {"VLLM_API_KEY": "s3cret", "WARMROUTE_ENGINE_MODEL": "tiny", "HOME": "/root", "MC_GID_INDEX": "3"}
        )
        assert found == {"MC_GID_INDEX": "3", "VLLM_API_KEY": "(not recorded)", "WARMROUTE_ENGINE_MODEL": "tiny"}

    def test_what_changed_is_named(self) -> None:
        before = environment.software([])
        packages = {**before.packages, "msgspec": "0.0.1", "newcomer": "1"}
        git = environment.GitState(root="/x", commit="0" * 40, dirty=True)
        now = msgspec.structs.replace(before, packages=packages, git=git, sources_sha256="f" * 64)
        reported = environment.differences(before, now)
        assert f"packages.msgspec: {msgspec.__version__}, now 0.0.1" in reported
        assert "packages.newcomer: absent, now 1" in reported
        assert any(change.startswith("git.commit:") and change.endswith("now " + "0" * 12) for change in reported)
        assert f"sources_sha256: {before.sources_sha256[:12]}, now {'f' * 12}" in reported
        assert environment.differences(before, before) == []

    def test_commit_and_dirty_flag_of_a_checkout(self, tmp_path: Path) -> None:
        def git(*arguments: str) -> str:
            identity = ["-c", "user.name=n", "-c", "user.email=e@localhost"]
            done = subprocess.run(
                ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
            )
            return done.stdout.strip()

        assert environment.git_state(tmp_path) is None
        git("init", "--quiet")
        (tmp_path / "file").write_text("one")
        git("add", "file")
        git("commit", "--quiet", "-m", "one")
        clean = environment.git_state(tmp_path)
        assert clean is not None
        assert (clean.commit, clean.dirty) == (git("rev-parse", "HEAD"), False)
        (tmp_path / "file").write_text("two")
        changed = environment.git_state(tmp_path)
        assert changed is not None
        assert changed.dirty
        (tmp_path / "below").mkdir()
        assert environment.git_state(tmp_path / "below") is None

    def test_a_busy_machine_is_a_warning(self) -> None:
        load = environment.host_load()
        assert 0 <= load.cpu_share <= 1
        assert load.processors == psutil.cpu_count()
        assert msgspec.structs.replace(load, cpu_share=0.2).warning is None
        busy = msgspec.structs.replace(load, cpu_share=0.8, load_1m=3.0, processors=2).warning
        assert busy is not None
        assert busy.startswith("80% of the processors were in use before the run started (load 3.0 on 2 processors)")
