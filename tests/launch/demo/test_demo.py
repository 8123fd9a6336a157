"""The demonstration, small: real simulated engines, real proxy, two policies; and its settings."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from launch.__main__ import app
from launch.arm import ArmError, run_arm
from launch.demo.run import make_trace, replay_options
from launch.demo.settings import DEMO_CONFIG, DemoSettings, choose_base_port, load_demo
from launch.fleet.file import FleetError
from launch.freshness.proof import FreshProof
from launch.hardware.processors import ProcessorSampler, summarise_samples
from launch.run.state import StateError, read_state
from replayer.records.runs import read_run
from tests.launch.conftest import REPOSITORY, free_base, until

SMALL: dict[str, Any] = {
    "arms": ["round_robin", "session_sticky"],
    "clock_scale": 40,
    "trace": {"requests": 40, "seed": 1, "rate_per_s": 2.0, "length_scale": 0.1},
    "fleet": {"kind": "sim", "count": 2, "role": "kv_both", "ready_timeout_s": 60, "stop_grace_s": 3},
    "resamples": 1000,
}


def small(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **values}))
    return path


def settings(tmp_path: Path, **values: Any) -> DemoSettings:
    return load_demo(small(tmp_path, **values))


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
def test_the_whole_of_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    options = ["--config", str(small(tmp_path)), "--output", str(run_dir), "--base-port", str(free_base())]
    result = CliRunner().invoke(app, ["demo", *options])
    assert result.exit_code == 0, result.output
    assert "session_sticky against round_robin:" in result.output
    assert result.output.splitlines()[-2] == f"Open the report: {run_dir / 'report.html'}"
    assert result.output.splitlines()[-1].endswith("dashboard: warmroute demo --ui")
    page = (run_dir / "report.html").read_text()
    assert 'class="matrix"' in page
    [stored] = msgspec.json.decode((run_dir / "comparison.json").read_bytes())
    assert stored["cells"][0]["metric"] == "TTFT p50"
    assert "Proxy breakdown: session_sticky" in page
    runs = {name: read_run(run_dir / name / "run.jsonl") for name in ("round_robin", "session_sticky")}
    for name, run in runs.items():
        assert run.end is not None
        assert (run.end.ok, run.end.requests) == (40, 40)
        assert run.header.label == name
        assert len({record.instance for record in run.records}) == 2
        assert len((run_dir / name / "breakdown.jsonl").read_text().splitlines()) == 40
    assert runs["round_robin"].header.trace_sha256 == runs["session_sticky"].header.trace_sha256
    sessions: dict[str, set[str | None]] = {}
    for record in runs["session_sticky"].records:
        sessions.setdefault(record.session_id, set()).add(record.instance)
    split: dict[str, set[str | None]] = {}
    for record in runs["round_robin"].records:
        split.setdefault(record.session_id, set()).add(record.instance)
    assert sum(map(len, sessions.values())) < sum(map(len, split.values()))
    proofs = [
        msgspec.json.decode((run_dir / name / "fresh.json").read_bytes(), type=FreshProof)
        for name in ("round_robin", "session_sticky")
    ]
    assert set(proofs[1].previous_engine_ids) == proofs[0].engine_ids
    assert all(proof.fresh for proof in proofs)


@pytest.mark.fleet
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("leaves_nothing")
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    config = small(tmp_path, clock_scale=1, fleet={**SMALL["fleet"], "count": 1})
    command = [sys.executable, "-m", "launch", "demo", "--config", str(config)]
    command += ["--output", str(run_dir), "--base-port", str(free_base())]
    demo = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes: list[psutil.Process] = []
    try:

        def replaying() -> bool:
            assert demo.poll() is None, demo.communicate()[0]
            return (run_dir / "round_robin" / "run.jsonl").exists()

        until(replaying, 180)
        processes = [psutil.Process(process.pid) for process in read_state(run_dir / "round_robin").running]
        assert len(processes) == 2
    finally:
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert not [process for process in processes if process.is_running()]


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
async def test_an_engine_that_dies_spoils_the_arm(tmp_path: Path) -> None:
    chosen = settings(tmp_path, trace={**SMALL["trace"], "requests": 12})
    trace = await asyncio.to_thread(make_trace, chosen, tmp_path / "trace.jsonl")

    def kill(*_: object) -> None:
        os.kill(read_state(tmp_path / "arm").processes[0].pid, signal.SIGKILL)

    fleet = chosen.fleet_of(chosen.arms[0], free_base())
    with pytest.raises(ArmError, match="inst-0 ended unexpectedly with code -9"):
        await run_arm("arm", fleet, trace, replay_options(chosen), tmp_path / "arm", on_start=kill)
    assert not read_state(tmp_path / "arm").running


def test_shipped_settings_are_good() -> None:
    shipped = load_demo(DEMO_CONFIG)
    assert [arm.name for arm in shipped.arms] == ["round_robin", "linear", "lmetric", "session_sticky", "warm"]
    fleet = shipped.fleet_of(shipped.arms[2], 30000)
    assert (fleet.count, fleet.role.value) == (8, "kv_both")
    assert fleet.sim.time_scale == shipped.clock_scale
    assert fleet.proxy["policy"]["name"] == "lmetric"
    assert fleet.proxy["ledger"]["recent_half_life_s"] == 30 / shipped.clock_scale
    assert [port for port, _ in fleet.ports()] == list(range(30000, 30017))


def test_flags_lie_over_the_file() -> None:
    changed = load_demo(DEMO_CONFIG, arms=["random"], clock_scale=3, trace__requests=50, trace__seed=None)
    assert [arm.name for arm in changed.arms] == ["random"]
    assert (changed.clock_scale, changed.trace.requests) == (3, 50)
    assert changed.trace.seed == load_demo(DEMO_CONFIG).trace.seed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"armz": []}, "armz: unknown key"),
        ({"arms": ["nonesuch"]}, "nonesuch"),
        ({"arms": ["linear", "linear"]}, "arms share the name linear"),
        ({"arms": [{"policy": "linear", "label": "../x"}]}, "becomes a folder"),
        ({"trace": {"request": 1}}, "trace.request: unknown key"),
        ({"fleet": {"kind": "sim"}}, "count: Field required"),
        ({"resamples": 10}, "resamples: Input should be greater than or equal to 1000"),
    ],
)
def test_every_mistake_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError) as caught:
        settings(tmp_path, **values)
    assert message in str(caught.value)


def test_the_same_policy_may_run_under_two_labels(tmp_path: Path) -> None:
    arms = ["linear", {"policy": "linear", "label": "again"}]
    assert [arm.name for arm in settings(tmp_path, arms=arms).arms] == ["linear", "again"]


def test_a_used_run_directory_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--config", str(small(tmp_path)), "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "exists already" in result.output


def test_ports_are_looked_for(tmp_path: Path) -> None:
    import socket

    chosen, base = settings(tmp_path), free_base()
    assert choose_base_port(chosen, base) == base
    with socket.create_server(("127.0.0.1", base + 4)):
        assert choose_base_port(chosen, base) == base + 50
    with pytest.raises(StateError):
        read_state(tmp_path)


def test_full_processors_are_a_warning() -> None:
    calm, full = summarise_samples([0.5] * 19 + [1.0], own=0.4), summarise_samples([1.0] * 5 + [0.5] * 5, own=0.6)
    assert calm.warning is None
    assert calm.full_share == 0.05
    assert full.warning is not None
    assert "full in 50% of the samples (mean use 75%, of it 60% by this run)" in full.warning
    assert "lower the clock scale" in full.warning
    other = summarise_samples([1.0] * 10, own=0.1).warning
    assert other is not None
    assert "stop the other processes on this machine" in other
    assert summarise_samples([]).warning is None


async def test_own_use_is_counted() -> None:
    async with ProcessorSampler() as sampler:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        await asyncio.sleep(0.3)
        use = sampler.use
    assert use.samples >= 1
    assert 0 < use.own <= 1
