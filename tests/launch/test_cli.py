"""The launcher as a process: another shell can inspect and stop it, and no process survives its death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from launch.__main__ import app
from launch.fleet.file import FLEETS, load_fleet
from launch.freshness.proof import FRESH_FILE, FreshProof, StaleEngineError, prove_fresh
from launch.run.state import STATE_FILE, FleetRecord, ProcessState, StateError, read_state, write_state
from tests.launch.conftest import REPOSITORY, STUB_LAUNCH, fleet_values, until

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Launcher:
    """`up` in a child process."""

    def __init__(self, tmp_path: Path, *options: str, **values: Any) -> None:
        self.run_dir = tmp_path / "run"
        self.fleet_file = tmp_path / "fleet.yaml"
        self.fleet_file.write_text(yaml.safe_dump(fleet_values(**values)))
        self.command = [*STUB_LAUNCH, "up", str(self.fleet_file), "--run-dir", str(self.run_dir), *options]
        self.process = subprocess.Popen(
            self.command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def ready(self) -> FleetRecord:
        """Wait until the fleet is ready."""

        def state() -> FleetRecord | None:
            if self.process.poll() is not None:
                pytest.fail(self.process.communicate()[0])
            try:
                found = read_state(self.run_dir)
            except StateError:
                return None
            return found if found.status == "ready" else None

        found = until(state)
        assert isinstance(found, FleetRecord)
        return found

    def end(self, signum: int) -> tuple[int, str]:
        """Signal the launcher; its exit code and output."""
        self.process.send_signal(signum)
        output, _ = self.process.communicate(timeout=90)
        return self.process.returncode, output


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path, "--no-proxy")
    yield found
    if found.process.poll() is None:
        found.end(signal.SIGTERM)


def cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.mark.fleet
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_stop_everything(launcher: Launcher, signum: int, code: int) -> None:
    state = launcher.ready()
    assert len(state.running) == 2
    assert launcher.end(signum)[0] == code
    assert not state.running
    assert read_state(launcher.run_dir).status == "stopped"


def test_a_killed_launcher_leaves_nothing(launcher: Launcher) -> None:
    state = launcher.ready()
    processes = [psutil.Process(process.pid) for process in state.running]
    assert len(processes) == 2
    assert launcher.end(signal.SIGKILL)[0] == -signal.SIGKILL
    gone, alive = psutil.wait_procs(processes, timeout=20)
    assert len(gone) == 2, alive
    code, output = cli("status", "--run-dir", str(launcher.run_dir))
    assert code == 3
    assert "is no longer running" in output
    assert cli("down", "--run-dir", str(launcher.run_dir))[1].endswith("nothing is running\n")


def test_status_and_down_from_another_shell(launcher: Launcher) -> None:
    state = launcher.ready()
    directory = ("--run-dir", str(launcher.run_dir))
    code, output = cli("status", *directory, "--json")
    assert code == 0
    assert msgspec.json.decode(output, type=FleetRecord) == state
    code, output = cli("status", *directory)
    assert (code, output.count("ready")) == (0, 2)
    assert cli("down", *directory) == (0, f"{launcher.run_dir}: stopped 2 processes\n")
    assert launcher.process.wait(20) == 143
    assert not state.running


@pytest.mark.fleet
@pytest.mark.parametrize("option", [[], ["--detach"]])
def test_a_second_start_from_a_run_directory_touches_nothing(launcher: Launcher, option: list[str]) -> None:
    launcher.ready()
    kept = {launcher.run_dir / FRESH_FILE: b"proof", launcher.run_dir / "launcher.log": b"a line\n"}
    for path, content in kept.items():
        path.write_bytes(content)
    state = (launcher.run_dir / STATE_FILE).read_bytes()
    code, output = cli("up", str(launcher.fleet_file), "--run-dir", str(launcher.run_dir), "--no-proxy", *option)
    assert (code, "already running" in output, "stopped" in output) == (2, True, False)
    assert {path: path.read_bytes() for path in kept} == kept
    assert (launcher.run_dir / STATE_FILE).read_bytes() == state


def test_what_cannot_be_meant_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(fleet_values()))
    (tmp_path / "file").touch()
    for options, problem in (
        (["--run-dir", str(tmp_path / "file")], "cannot be a run directory"),
        (["--run-dir", str(tmp_path / "file"), "--detach"], "cannot be a run directory"),
        (["--ray-address", "127.0.0.1:6379"], "--ray-address is for --on ray"),
    ):
        code, output = cli("up", str(tmp_path / "fleet.yaml"), *options)
        assert (code, problem in output) == (2, True), output


def test_down_never_signals_a_recycled_pid(tmp_path: Path) -> None:
    """Old state files name pids that have been reused: here, by this test."""
    mine = {"pid": os.getpid(), "created_unix_s": 1e9}
    process = {"name": "inst-0", "kind": "sim", "url": "", "log": "", **mine}
    state = {"fleet": "f", "supervisor_pid": os.getpid(), "supervisor_created_unix_s": 1e9, "started_unix_s": 1e9}
    (tmp_path / "state.json").write_text(json.dumps({**state, "processes": [process]}))
    assert cli("down", "--run-dir", str(tmp_path)) == (0, f"{tmp_path}: nothing is running\n")


@pytest.mark.fleet
def test_a_crashed_engine_is_reported_and_shown(launcher: Launcher) -> None:
    state = launcher.ready()
    os.kill(state.processes[0].pid, signal.SIGKILL)
    until(lambda: read_state(launcher.run_dir).processes[0].status == "exited")
    code, output = cli("status", "--run-dir", str(launcher.run_dir))
    assert code == 3
    assert "exited" in output
    code, output = launcher.end(signal.SIGINT)
    assert code == 130
    assert "inst-0 ended unexpectedly with code -9" in output


def test_a_real_fleet_detached_proved_used_and_stopped(tmp_path: Path) -> None:
    """Two simulated engines and the proxy: seen from another process, fresh at first, stale after one request."""
    since = time.time()
    launcher = Launcher(tmp_path, "--detach", count=2)
    output, _ = launcher.process.communicate(timeout=90)
    assert launcher.process.returncode == 0, output
    directory = ("--run-dir", str(launcher.run_dir))
    state = read_state(launcher.run_dir)
    try:
        assert "detached; stop it with" in output
        assert state.supervised
        assert [process.kind for process in state.running] == ["sim", "sim", "proxy"]
        assert cli("status", *directory)[0] == 0
        proof = asyncio.run(prove_fresh(state.processes, since_unix_s=since))
        assert len(proof.engine_ids) == 2
        body = {"model": "warm-sim", "prompt": list(range(500)), "max_tokens": 2}
        answer = httpx.post(f"{state.proxy_url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200
        served = answer.headers["x-warmroute-instance"]
        with pytest.raises(
            StaleEngineError, match=rf"{served}: vllm:prefix_cache_queries_total is \d+, not 0"
        ) as stale:
            asyncio.run(prove_fresh(state.processes, since_unix_s=since))
        assert ({"inst-0", "inst-1"} - {served}).pop() not in str(stale.value)
    finally:
        code, reported = cli("down", *directory)
    assert (code, reported) == (0, f"{launcher.run_dir}: stopped 3 processes\n")
    assert not state.running
    assert not state.supervised


@pytest.mark.fleet
def test_failing_to_start_detached_shows_why(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "--detach", "--no-proxy", ready_timeout_s=0.001)
    output, _ = launcher.process.communicate(timeout=90)
    assert launcher.process.returncode == 2
    assert "was not ready within 0.001 s" in output


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.fleet),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.fleet),
    ],
)
def test_a_signal_while_a_detached_start_waits_stops_the_fleet(tmp_path: Path, signum: int, code: int) -> None:
    launcher = Launcher(tmp_path, "--detach", "--no-proxy", stagger_s=600)

    def first_engine() -> FleetRecord | None:
        try:
            found = read_state(launcher.run_dir)
        except StateError:
            return None
        return found if found.running else None

    state = until(first_engine)
    try:
        log = launcher.run_dir / "launcher.log"
        assert launcher.end(signum) == (code, f"interrupted: the fleet is being stopped, see {log}\n")
        until(lambda: not state.supervised and not state.running)
    finally:
        if state.supervised:
            os.kill(state.supervisor_pid, signal.SIGTERM)


def test_the_launcher_s_log_of_an_earlier_start_is_kept_but_not_shown(tmp_path: Path) -> None:
    """A port of the fleet is taken, so that the launcher ends before it starts anything."""
    values = fleet_values()
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(values))
    log = tmp_path / "launcher.log"
    log.write_text("a line of the earlier start\n")
    with socket.create_server(("127.0.0.1", values["base_port"])):
        code, output = cli("up", str(tmp_path / "fleet.yaml"), "--run-dir", str(tmp_path), "--detach", "--no-proxy")
    assert code == 2
    assert (output.count(f"port {values['base_port']} "), output.count("earlier start")) == (1, 0)
    assert log.read_text().startswith("a line of the earlier start\nerror: port ")


def test_a_refused_start_leaves_no_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was named stays, since others may have made it."""
    values = fleet_values()
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", values["base_port"])):
        for options in ([], ["--run-dir", "named"]):
            code, output = cli("up", "fleet.yaml", "--no-proxy", *options)
            assert (code, f"port {values['base_port']} " in output) == (1, True)
    assert (list(Path("runs").iterdir()), Path("named").is_dir()) == ([], True)


@pytest.mark.parametrize(("restarts", "shown"), [(0, False), (2, True)])
def test_urls_are_whole_on_a_narrow_terminal(restarts: int, shown: bool, tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in range(8101, 8104)]
    processes = [
        ProcessState(
            name=f"inst-{n}", kind="sim", pid=2_000_000 + n, created_unix_s=1.0, url=url, log="", role="kv_both",
            restarts=restarts, bootstrap_url=f"http://127.0.0.1:{9101 + n}",
        )
        for n, url in enumerate(urls)
    ]  # fmt: skip
    record = FleetRecord(fleet="f", supervisor_pid=2_000_000, supervisor_created_unix_s=1.0, processes=processes)
    write_state(tmp_path, record)
    output = CliRunner().invoke(app, ["status", "--run-dir", str(tmp_path)], env={"COLUMNS": "80"}).output
    assert ("restarts" in output, "recycles" in output) == (shown, False)
    if not shown:
        assert [url for url in urls if url not in output] == []


@pytest.mark.fleet
def test_a_stale_fleet_that_must_be_fresh_is_stopped(tmp_path: Path) -> None:
    stale = Launcher(tmp_path, "--no-proxy", "--require-fresh", env={"STUB_SERVED": "3"})
    output, _ = stale.process.communicate(timeout=90)
    assert stale.process.returncode == 1
    assert "inst-0: vllm:prefix_cache_queries_total is 300, not 0" in output
    assert not read_state(stale.run_dir).running
    assert msgspec.json.decode((stale.run_dir / FRESH_FILE).read_bytes(), type=FreshProof).fresh is False


@pytest.mark.fleet
def test_a_fresh_fleet_is_proven_and_goes_on(tmp_path: Path) -> None:
    fresh = Launcher(tmp_path, "--no-proxy", "--require-fresh", "--detach", "--set", "count=1")
    output, _ = fresh.process.communicate(timeout=90)
    try:
        assert fresh.process.returncode == 0, output
        assert msgspec.json.decode((fresh.run_dir / FRESH_FILE).read_bytes(), type=FreshProof).fresh
        assert len(read_state(fresh.run_dir).running) == 1
    finally:
        assert cli("down", "--run-dir", str(fresh.run_dir))[0] == 0


@pytest.mark.parametrize("name", sorted(path.stem for path in FLEETS.glob("*.yaml")))
def test_dry_run_prints_commands_and_starts_nothing(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, output = cli("up", name, "--dry-run", "--run-dir", str(run_dir))
    assert code == 0
    engines = len(load_fleet(Path(name)).members)
    command = " -m sim --host 127.0.0.1 " if name.startswith("sim-") else " -m vllm.entrypoints.openai.api_server "
    assert output.count(command) == engines >= 2
    assert output.count("env -u MC_INTRANODE_NVLINK ") + output.count("env -u MC_FORCE_TCP ") == (
        0 if name.startswith("sim-") else engines
    )
    assert f"-m proxy --config {run_dir}/proxy.yaml" in output
    assert "instances:" in output
    assert ("  hold_s: 30.0\n" in output) == (" VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=30 " in output)
    assert not run_dir.exists()


def test_dry_run_hides_keys_in_the_settings_of_the_proxy(tmp_path: Path) -> None:
    given = ("proxy.engine_key=secret-1", "proxy.tracing.headers.x-key=secret-2", "proxy.sharing.password=secret-3")
    code, output = cli("up", "sim-4x", "--dry-run", *(each for one in given for each in ("--set", one)))
    assert code == 0
    assert "engine_key: '***'" in output
    assert "secret-" not in output


def test_dry_run_hides_the_hashes_of_keys(tmp_path: Path) -> None:
    """As a reload does, which shows what has changed."""
    fleet = tmp_path / "fleet.yaml"
    hashed = "0123456789abcdef" * 4
    fleet.write_text(
        "kind: sim\ncount: 1\nproxy:\n  keys:\n    client:\n"
        f"      - {{name: a, sha256: {hashed}}}\n      - {{name: b, sha256: {hashed[::-1]}, weight: 2.0}}\n"
    )
    code, output = cli("up", str(fleet), "--dry-run")
    assert code == 0, output
    assert output.count("sha256: '***'") == 2
    assert "weight: 2.0" in output
    assert "0123456789abcdef" not in output
    assert "fedcba9876543210" not in output


def test_dry_run_names_flags_that_simulated_engines_refuse(tmp_path: Path) -> None:
    longest = ("--set", "sim.max_model_len=9000000")
    code, output = cli("up", "sim-4x", "--dry-run", "--run-dir", str(tmp_path / "run"), *longest)
    assert code == 0
    assert output.count("warning: sim: max_model_len 9000000 does not fit the KV pool") == 1


def test_a_bad_fleet_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("kind: sim\ncount: 0\n")
    code, output = cli("up", str(path))
    assert code == 2
    assert "count: Input should be greater than or equal to 1" in output
    assert not (tmp_path / "runs").exists()


def test_nothing_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("status", "down"):
        code, output = cli(command)
        assert code == 2
        assert "no fleet is running" in output
        code, output = cli(command, "sim-4x")
        assert code == 2
        assert "no fleet 'sim-4x' is running" in output
        code, output = cli(command, "sim-4x", "--run-dir", str(tmp_path))
        assert code == 2
        assert "give FLEET or --run-dir, not both" in output
