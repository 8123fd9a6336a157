"""Processes: started, noticed, restarted, always ended (with stubs for engines)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from launch.engines.commands import ProcessSpec
from launch.fleet.file import FleetFile
from launch.run import guard
from launch.run.processes import ManagedProcess, StartError, creation_time, end_recorded, same_process, stop_processes
from launch.run.state import FleetRecord, ProcessState, StateError, find_run_dir, read_state, write_state
from launch.run.supervisor import PROXY_CONFIG, Fleet
from tests.launch.conftest import soon, until
from tests.launch.stub_launch import StubEngine

pytestmark = pytest.mark.usefixtures("leaves_nothing")
MakeFleet = Callable[..., FleetFile]


@pytest.mark.usefixtures("stubs")
async def test_start_state_and_stop(small_fleet: MakeFleet, tmp_path: Path) -> None:
    async with Fleet(small_fleet(), tmp_path, source="f.yaml", with_proxy=False) as fleet:
        state = read_state(tmp_path)
        assert state == fleet.state
        assert state.status == "ready"
        assert state.supervised
        assert [process.status for process in state.running] == ["ready", "ready"]
        assert len({os.getpgid(process.pid) for process in state.running} | {os.getpgid(0)}) == 3
    state = read_state(tmp_path)
    assert state.status == "stopped"
    assert not state.running
    assert [process.status for process in state.processes] == ["stopped", "stopped"]


@pytest.mark.usefixtures("stubs")
async def test_an_unexpected_exit_is_noticed(small_fleet: MakeFleet, tmp_path: Path) -> None:
    reported: list[str] = []
    async with Fleet(small_fleet(), tmp_path, with_proxy=False, notify=reported.append) as fleet:
        os.kill(fleet.state.processes[1].pid, signal.SIGKILL)
        await soon(lambda: reported)
        assert reported == fleet.unexpected_exits
        assert "inst-1 ended unexpectedly with code -9" in reported[0]
        assert read_state(tmp_path).processes[1].status == "exited"
        assert read_state(tmp_path).processes[0].status == "ready"
        os.kill(fleet.state.processes[0].pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            assert await fleet.wait() == "every engine is gone"


@pytest.mark.usefixtures("stubs")
async def test_restart_with_back_off_and_a_limit(small_fleet: MakeFleet, tmp_path: Path) -> None:
    values = small_fleet(count=1, restart="on_failure", max_restarts=1, restart_backoff_s=0.05)
    reported: list[str] = []
    async with Fleet(values, tmp_path, with_proxy=False, notify=reported.append) as fleet:
        first = fleet.state.processes[0].pid
        os.kill(first, signal.SIGKILL)
        await soon(lambda: fleet.state.processes[0].restarts == 1 and fleet.state.processes[0].status == "ready")
        second = fleet.state.processes[0].pid
        assert second != first
        assert fleet.state.processes[0].alive
        os.kill(second, signal.SIGKILL)
        async with asyncio.timeout(20):
            assert await fleet.wait() == "every engine is gone"
        assert fleet.state.processes[0].restarts == 1
    assert any("inst-0 is not restarted again, max_restarts is 1; log: " in message for message in reported)


async def test_what_an_engine_started_ends_with_it(
    small_fleet: MakeFleet, tmp_path: Path, stubs: Callable[..., None]
) -> None:
    stubs("child")
    async with Fleet(small_fleet(count=1), tmp_path, with_proxy=False) as fleet:
        [child] = psutil.Process(fleet.state.processes[0].pid).children()
        # The engine goes first and leaves its child alone in the group.
        os.kill(fleet.state.processes[0].pid, signal.SIGKILL)
        await soon(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_a_process_that_dies_at_once_is_an_error_with_its_log(
    small_fleet: MakeFleet, tmp_path: Path, stubs: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.launch.stub_launch.STUB", tmp_path / "missing.py")
    with pytest.raises(StartError, match=r"(?s)inst-\d exited with code 2 before it was ready.*can't open file"):
        async with Fleet(small_fleet(), tmp_path, with_proxy=False):
            pytest.fail("started")
    assert read_state(tmp_path).status == "failed"


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize("waits_for", ["the next start", "another engine"])
async def test_an_engine_that_exits_while_others_start_ends_the_start_at_once(
    small_fleet: MakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """Not after ``stagger_s`` for each further engine, or ``ready_timeout_s`` for one that loads for long."""
    values = small_fleet(count=2, ready_timeout_s=600, stagger_s=600 if waits_for == "the next start" else 0)
    urls = StubEngine.ready_urls
    monkeypatch.setattr(
        StubEngine,
        "ready_urls",
        lambda self, fleet, index: ("http://127.0.0.1:9/health",) if index else urls(self, fleet, index),
    )
    fleet = Fleet(values, tmp_path, with_proxy=False)
    start = asyncio.create_task(fleet.__aenter__())
    expected = "starting" if waits_for == "the next start" else "ready"
    await soon(lambda: bool(fleet.state.processes) and fleet.state.processes[0].status == expected)
    os.kill(fleet.state.processes[0].pid, signal.SIGKILL)
    before = "it" if expected == "starting" else "the fleet"
    with pytest.raises(StartError, match=f"inst-0 exited with code -9 before {before} was ready"):
        async with asyncio.timeout(30):
            await start
    assert read_state(tmp_path).status == "failed"


@pytest.mark.usefixtures("stubs")
async def test_never_ready_is_an_error(small_fleet: MakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.launch.stub_launch.StubEngine.ready_urls", lambda self, fleet, index: ("http://127.0.0.1:9/health",)
    )
    with pytest.raises(StartError, match=r"not ready within 0\.3 s: http://127\.0\.0\.1:9/health: ConnectError"):
        async with Fleet(small_fleet(ready_timeout_s=0.3), tmp_path, with_proxy=False):
            pytest.fail("started")


@pytest.mark.usefixtures("stubs")
async def test_an_error_inside_stops_the_fleet(small_fleet: MakeFleet, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Fleet(small_fleet(), tmp_path, with_proxy=False):
            raise ZeroDivisionError
    assert not read_state(tmp_path).running


@pytest.mark.usefixtures("stubs")
async def test_cancelling_during_the_stop_still_stops(small_fleet: MakeFleet, tmp_path: Path) -> None:
    inside, release = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with Fleet(small_fleet(), tmp_path, with_proxy=False):
            inside.set()
            await release.wait()

    task = asyncio.create_task(hold())
    await inside.wait()
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not read_state(tmp_path).running


@pytest.mark.usefixtures("stubs")
async def test_a_used_run_directory_or_port_is_refused(small_fleet: MakeFleet, tmp_path: Path) -> None:
    values = small_fleet(count=1)
    async with Fleet(values, tmp_path / "a", with_proxy=False) as fleet:
        with pytest.raises(StartError, match="a fleet is already running from this directory"):
            async with Fleet(values, tmp_path / "a", with_proxy=False):
                pytest.fail("started")
        with pytest.raises(StartError, match=f"port {values.base_port} for inst-0 is not free"):
            async with Fleet(values, tmp_path / "b", with_proxy=False):
                pytest.fail("started")
        assert fleet.state.processes[0].alive


async def test_sigkill_after_the_grace(tmp_path: Path) -> None:
    deaf = (
        "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
    )
    process = ManagedProcess(ProcessSpec("deaf", "sim", (sys.executable, "-c", deaf)), tmp_path / "log")
    process.start()
    try:
        await soon(lambda: "deaf" in (tmp_path / "log").read_text())
    finally:
        await stop_processes([process], 0.2)
    assert process.exit_code == -signal.SIGKILL


async def test_added_variables_are_received_and_dropped_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_PORT", "1")
    command = (
        sys.executable,
        "-c",
        "import os; print(sorted(n for n in os.environ if 'WARM' in n), flush=True); input()",
    )
    spec = ProcessSpec("p", "sim", command, {"WARM_A": "1"}, drop_environment_prefix="WARMROUTE_")
    process = ManagedProcess(spec, tmp_path / "log")
    process.start()
    try:
        await soon(lambda: "WARM_A" in (tmp_path / "log").read_text())
        assert "WARMROUTE_PORT" not in (tmp_path / "log").read_text()
        await soon(process.exited)  # standard input is closed
    finally:
        await stop_processes([process], 1)
    assert process.exit_code == 1


def test_a_recycled_pid_is_not_ours() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        created = creation_time(child.pid)
        assert created is not None
        assert same_process(child.pid, created)
        assert not same_process(child.pid, created - 60)
        assert not end_recorded(child.pid, created - 60, signal.SIGKILL)
        assert child.poll() is None
        assert end_recorded(child.pid, created, signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM
    assert creation_time(child.pid) is None


def test_a_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    process = ManagedProcess(ProcessSpec("p", "sim", ("/nonesuch",)), tmp_path / "log")
    process.start()
    until(process.exited)
    assert process.reap() == 127
    assert "guard: cannot run /nonesuch: No such file" in process.log_tail()


def test_the_guard_refuses_when_its_launcher_is_gone() -> None:
    command = [sys.executable, str(guard.__file__), "1", sys.executable, "-c", "print('ran')"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (found.returncode, found.stdout) == (71, "")
    assert "the launcher is gone" in found.stderr


def test_state_files(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="No such file"):
        read_state(tmp_path)
    with pytest.raises(StateError, match="no fleet is running"):
        find_run_dir(tmp_path)
    mine = creation_time(os.getpid())
    assert mine is not None
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        state = FleetRecord(fleet=f"/fleets/{name}.yaml", supervisor_pid=os.getpid(), supervisor_created_unix_s=mine)
        state.processes.append(
            ProcessState(name="inst-0", kind="sim", pid=os.getpid(), created_unix_s=mine - 99, url="u", log="l")
        )
        write_state(tmp_path / name, state)
        assert read_state(tmp_path / name) == state
        assert not state.running
        if name == "one":
            assert find_run_dir(tmp_path) == tmp_path / "one"
    with pytest.raises(StateError, match="several fleets are running"):
        find_run_dir(tmp_path)
    assert {find_run_dir(tmp_path, each).name for each in ("one", "one.yaml", "elsewhere/one.yaml")} == {"one"}
    with pytest.raises(StateError, match=r"no fleet 'three' is running .*; running: one, two; give its run directory"):
        find_run_dir(tmp_path, "three")
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(StateError, match="not a state file"):
        read_state(tmp_path / "one")
    assert find_run_dir(tmp_path) == tmp_path / "two"


@pytest.mark.fleet
@pytest.mark.parametrize(("reported", "known"), [("nvlink", "nvlink"), (None, None)])
async def test_a_simulated_transport_is_known_if_it_was_named(
    small_fleet: MakeFleet, tmp_path: Path, reported: str | None, known: str | None
) -> None:
    async with Fleet(small_fleet(sim={"profile": "h200", "transport": reported}), tmp_path) as fleet:
        assert [process.transport for process in fleet.state.processes if process.kind != "proxy"] == [known, known]
        settings = yaml.safe_load((tmp_path / PROXY_CONFIG).read_text())
        assert [each.get("transport") for each in settings["instances"]] == [known, known]


@pytest.mark.fleet
async def test_a_fleet_on_an_ipv6_address_answers(small_fleet: MakeFleet, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    async with Fleet(small_fleet(count=1, host="::1"), tmp_path) as fleet, httpx.AsyncClient() as client:
        [proxy] = [process for process in fleet.state.processes if process.kind == "proxy"]
        assert proxy.url is not None
        assert proxy.url.startswith("http://[::1]:")
        models = (await client.get(f"{proxy.url}/v1/models")).json()["data"]
        body = {"model": models[0]["id"], "prompt": [1, 2, 3], "max_tokens": 2}
        answer = await client.post(f"{proxy.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
