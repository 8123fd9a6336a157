"""Live experiments on real simulated engines: killed, resumed, verified; a warm engine; a changed file."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from launch import arm as launch_arm
from launch.__main__ import app
from launch.experiment.comparison import comparable
from launch.experiment.records.freshness import read_proof
from launch.experiment.records.state import read_experiment
from launch.experiment.verify import verify
from launch.freshness.proof import FreshProof, prove_fresh
from launch.run.state import ProcessState, read_state
from replayer.compare.arms import ArmFilesError
from replayer.compare.arms import read_experiment as read_arms
from replayer.records.runs import read_run
from tests.launch.conftest import REPOSITORY, free_base, until

SMALL: dict[str, Any] = {
    "name": "small",
    "trace": {"synth": {"requests": 30, "seed": 1, "rate_per_s": 2.0, "length_scale": 0.1}},
    "arms": {"spread": {"policy": "round_robin"}, "sticky": {"policy": "session_sticky"}},
    "repeats": 2,
    "comparison": {"resamples": 1000},
}


def fleet(count: int = 2, **values: Any) -> dict[str, Any]:
    engines = {"kind": "sim", "count": count, "role": "kv_both", "sim": {"time_scale": 40}, "stop_grace_s": 3}
    return {"kind": "live", "base_port": free_base(), "fleet": {**engines, **values}}


def written(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **values}, sort_keys=False))
    return path


def alive(pids: Collection[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.fleet
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("leaves_nothing")
def test_killed_resumed_and_verified(tmp_path: Path) -> None:
    """Two arms twice; the runner is killed in the second run, and the resumed experiment gives the same result."""
    # A quarter of the usual rate: the second run must not be over before the runner is killed.
    trace = {"synth": {**SMALL["trace"]["synth"], "rate_per_s": 0.5}}
    directory, config = tmp_path / "run", written(tmp_path, backend=fleet(1), trace=trace)
    command = [sys.executable, "-m", "launch", "experiment", "run", str(config), "--output", str(directory)]
    runner = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    second = directory / "arms" / "sticky" / "1"

    def in_the_middle() -> bool:
        assert runner.poll() is None, runner.communicate()[0]
        return (second / "run.jsonl").exists()

    try:
        until(in_the_middle, 180)
        pids = [process.pid for process in read_state(second).running]
        assert len(pids) == 2
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.communicate(timeout=30)
    until(lambda: not alive(pids), 20)
    cut = read_experiment(directory)
    assert cut.state == "running"
    assert not cut.alive
    assert [run.state for run in cut.runs] == ["done", "running", "pending", "pending"]
    first = (directory / "arms" / "spread" / "1" / "run.jsonl").read_bytes()
    assert CliRunner().invoke(app, ["experiment", "status", str(directory)]).exit_code == 3

    again = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory)])
    assert again.exit_code == 2
    assert "is not empty" in again.output

    resumed = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory), "--resume"])
    assert resumed.exit_code == 0, resumed.output
    assert "sticky against spread:" in resumed.output
    state = read_experiment(directory)
    assert state.state == "done"
    assert [(run.name, run.state, run.attempts) for run in state.runs] == [
        ("spread, repeat 1", "done", 1),
        ("sticky, repeat 1", "done", 2),
        ("sticky, repeat 2", "done", 1),
        ("spread, repeat 2", "done", 1),
    ]
    assert (directory / "arms" / "spread" / "1" / "run.jsonl").read_bytes() == first
    lines = [json.loads(line) for line in (second / "run.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", *["request"] * 30, "end"]
    assert "resumed_after_requests" not in lines[0]["options"]
    assert (directory / "cut" / "sticky" / "1-1" / "run.jsonl").exists()

    ids: set[str] = set()
    for run in state.runs:
        proof = read_proof(directory / run.path)
        assert isinstance(proof, FreshProof)
        assert proof.fresh
        assert ids <= set(proof.previous_engine_ids)
        assert not ids & proof.engine_ids
        ids |= proof.engine_ids
        assert (run.requests, run.ok) == (30, 30)
        record = json.loads((directory / run.path / "arm.json").read_text())
        assert record["kv_capacity_tokens"] > 0
        assert record["load_before"]["processors"] == psutil.cpu_count()
        assert len((directory / run.path / "breakdown.jsonl").read_text().splitlines()) == 30
        header = read_run(directory / run.path / "run.jsonl").header
        assert (header.label, header.seed, header.clock_scale) == (run.arm, run.repeat - 1, 40)
    assert len(ids) == 4

    found = verify(directory)
    assert found.problems == []
    assert (found.runs, found.requests) == (4, 120)
    reported = json.loads((directory / "comparison.json").read_text())
    assert [(one["candidate"], one["runs"]) for one in reported["comparisons"]] == [
        ("sticky", {"baseline": 2, "candidate": 2})
    ]
    assert CliRunner().invoke(app, ["experiment", "status", str(directory)]).exit_code == 0

    _changes_are_refused(config, directory)
    _tampering_is_found(directory, tmp_path)
    _an_engine_that_served_twice_is_refused(directory, tmp_path)


def _changes_are_refused(config: Path, directory: Path) -> None:
    arguments = ["experiment", "run", str(config), "--output", str(directory), "--resume"]
    changed = CliRunner().invoke(
        app, [*arguments, "--set", "replay.time_scale=2", "--set", "arms.sticky.policy=linear"]
    )
    assert changed.exit_code == 2
    assert "replay.time_scale: was 1.0, now 2.0" in changed.output
    assert 'arms.sticky.policy.name: was "session_sticky", now "linear"' in changed.output
    trace = directory / "trace.jsonl"
    stored = trace.read_bytes()
    trace.write_bytes(stored.replace(b'"output_length": ', b'"output_length": 1') + b"\n")
    changed = CliRunner().invoke(app, arguments)
    trace.write_bytes(stored)
    assert changed.exit_code == 2
    assert "trace as replayed: its SHA-256 was" in changed.output


def _tampering_is_found(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tampered"
    shutil.copytree(directory, copy)
    path = copy / "arms" / "sticky" / "2" / "run.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"ok":true', b'"ok":false', 1))
    (copy / "arms" / "spread" / "2" / "breakdown.jsonl").unlink()
    (copy / "config.yaml").write_text("name: other\n")
    problems = verify(copy).problems
    assert "sticky, repeat 2: run.jsonl has changed since it was written (SHA-256)" in problems
    assert "spread, repeat 2: breakdown.jsonl is missing" in problems
    assert "config.yaml is not the file the experiment was run from" in problems
    assert len(problems) == 3
    assert CliRunner().invoke(app, ["experiment", "verify", str(copy)]).exit_code == 1


def _an_engine_that_served_twice_is_refused(directory: Path, tmp_path: Path) -> None:
    """The proof of one run replaces another's: its engines were warm, then."""
    copy = tmp_path / "twice"
    shutil.copytree(directory, copy)
    shutil.copy(copy / "arms" / "spread" / "1" / "fresh.json", copy / "arms" / "sticky" / "2" / "fresh.json")
    good, refusals = comparable(copy, read_experiment(copy))
    assert [run.name for run in good] == ["spread, repeat 1", "sticky, repeat 1", "spread, repeat 2"]
    assert "served spread, repeat 1 before" in refusals[0]
    assert any("not fresh: engine id" in problem for problem in verify(copy).problems)


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
def test_a_warm_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run's engine computes a prompt before its freshness is checked."""
    asked: list[str] = []

    async def after_a_request(processes: list[ProcessState], **options: Any) -> FreshProof:
        asked.append(processes[0].url)
        if len(asked) == 2:
            async with httpx.AsyncClient(timeout=30) as client:
                body = {"model": "warm-sim", "prompt": list(range(1, 200)), "max_tokens": 1}
                (await client.post(f"{processes[0].url}/v1/completions", json=body)).raise_for_status()
        return await prove_fresh(processes, **options)

    monkeypatch.setattr(launch_arm, "prove_fresh", after_a_request)
    arms = {name: {"policy": "linear"} for name in ("one", "warmed", "three")}
    trace = {"synth": {"requests": 10, "rate_per_s": 4.0, "length_scale": 0.02}}
    config = written(tmp_path, backend=fleet(1), arms=arms, trace=trace, repeats=1)
    directory = tmp_path / "run"
    ended = CliRunner().invoke(app, ["experiment", "run", str(config), "--output", str(directory)])
    assert ended.exit_code == 1
    state = read_experiment(directory)
    assert state.state == "stopped"
    assert [run.state for run in state.runs] == ["done", "refused", "pending"]
    [reason] = state.runs[1].reasons
    assert "inst-0: vllm:prefix_cache_queries_total is 199, not 0" in reason
    assert not (directory / "arms" / "warmed" / "1" / "run.jsonl").exists()
    good, refusals = comparable(directory, state)
    assert [run.arm for run in good] == ["one"]
    assert refusals == [
        f"warmed, repeat 1 is not compared: refused ({reason})",
        "three, repeat 1 is not compared: pending",
    ]
    assert json.loads((directory / "comparison.json").read_text())["comparisons"] == []
    with pytest.raises(ArmFilesError, match="run 1 of arm 'warmed' is refused: the fleet is not fresh"):
        read_arms(directory)
    assert f"warmed, repeat 1: refused ({reason})" in verify(directory).problems
    assert "warmed, repeat 1 is not compared: refused" in ended.output
