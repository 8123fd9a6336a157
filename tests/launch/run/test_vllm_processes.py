"""vLLM fleets as processes, with a stub for vLLM: effective configuration, proof, recycles, death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from launch.__main__ import app
from launch.engines.commands import ProcessSpec
from launch.fleet.checks import ALLOCATOR_VARIABLES
from launch.fleet.file import FleetFile, parse_fleet
from launch.fleet.overrides import MODEL_VARIABLE, PYTHON_VARIABLE
from launch.run.processes import ManagedProcess, StartError, creation_time, marked, stop_processes
from launch.run.recycling import DEAD_AFTER, HealthRecord, RecycleRequests
from launch.run.state import FleetRecord, StateError, read_state
from launch.run.supervisor import Fleet
from tests.launch.conftest import REPOSITORY, free_base, soon, until

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("leaves_nothing")]
STUBS = Path(__file__).parents[1]


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Make a small vLLM fleet, as the contents of a fleet file, with the stub for Python."""
    for name in ("CUDA_VISIBLE_DEVICES", "MC_FORCE_TCP", PYTHON_VARIABLE, MODEL_VARIABLE, *ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUBS / "stub_vllm.py"}" "$@"\n')
    python.chmod(0o755)

    def make(count: int = 1, vllm: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        base = free_base()
        ports = {"base_port": base, "base_bootstrap_port": base + 5, "base_master_port": base + 10}
        ports |= {"base_events_port": base + 15, "base_events_replay_port": base + 20}
        return {
            "kind": "vllm",
            "count": count,
            "model": "some/model",
            **ports,
            "vllm": {"python": str(python), **(vllm or {})},
            "ready_timeout_s": 90,
            "stop_grace_s": 3,
            "proxy": {"port": base + 25},
            **more,
        }

    return make


@pytest.fixture
def make_fleet(values: Callable[..., dict[str, Any]]) -> Callable[..., FleetFile]:
    """The same, checked."""
    return lambda *arguments, **more: parse_fleet(values(*arguments, **more))


def trees(state: FleetRecord) -> list[psutil.Process]:
    """Everything below the fleet's guards, and the guards."""
    guards = [psutil.Process(process.pid) for process in state.running]
    return [*guards, *(child for guard in guards for child in guard.children(recursive=True))]


async def test_the_proxy_is_reported_what_the_logs_proved(make_fleet: Callable[..., FleetFile], tmp_path: Path) -> None:
    values = make_fleet(2, vllm={"transfer": {"protocol": "nvlink"}, "events": {"enabled": True}})
    async with Fleet(values, tmp_path / "run") as fleet:
        assert [process.transport for process in fleet.state.processes] == ["nvlink", "nvlink", None]
        assert [process.devices for process in fleet.state.processes] == [["0"], ["1"], []]
        written = yaml.safe_load((tmp_path / "run" / "proxy.yaml").read_text())["instances"]
        assert [(entry["name"], entry["transport"], entry["host"], entry["role"]) for entry in written] == [
            ("inst-0", "nvlink", "127.0.0.1", "kv_both"),
            ("inst-1", "nvlink", "127.0.0.1", "kv_both"),
        ]
        assert written[0]["events_url"] == f"tcp://127.0.0.1:{values.base_events_port}"
        output = CliRunner().invoke(app, ["status", "--run-dir", str(tmp_path / "run")], env={"COLUMNS": "160"}).output
        assert [word for word in ("role", "devices", "transport", "bootstrap") if word not in output] == []
        assert output.count("nvlink") == 2
        assert "nvlink?" not in output


@pytest.mark.parametrize(
    ("transfer", "environment", "message"),
    [
        ({"protocol": "nvlink"}, {"STUB_SILENT": "1"}, "should move KV over nvlink, but its log does not show any"),
        ({"protocol": "rdma", "transport_proof": "require"}, {}, "should move KV over rdma, but its log shows tcp"),
    ],
)
async def test_an_unproven_transport_is_refused(
    make_fleet: Callable[..., FleetFile],
    tmp_path: Path,
    transfer: dict[str, str],
    environment: dict[str, str],
    message: str,
) -> None:
    with pytest.raises(StartError, match=message):
        async with Fleet(make_fleet(vllm={"transfer": transfer}, env=environment), tmp_path / "run", with_proxy=False):
            pytest.fail("started")
    assert not (tmp_path / "run" / "proxy.yaml").exists()


async def test_an_unproven_transport_may_be_reported_only(make_fleet: Callable[..., FleetFile], tmp_path: Path) -> None:
    reported: list[str] = []
    values = make_fleet(
        vllm={"transfer": {"protocol": "nvlink", "transport_proof": "report"}}, env={"STUB_SILENT": "1"}
    )
    async with Fleet(values, tmp_path / "run", with_proxy=False, notify=reported.append) as fleet:
        assert fleet.state.processes[0].transport is None
        output = CliRunner().invoke(app, ["status", "--run-dir", str(tmp_path / "run")], env={"COLUMNS": "160"}).output
    assert "nvlink?" in output
    assert len(reported) == 1
    assert "its log does not show any transport" in reported[0]


async def test_a_variable_lost_on_the_way_to_the_engine_core_is_named(
    make_fleet: Callable[..., FleetFile], tmp_path: Path
) -> None:
    values = make_fleet(env={"STUB_HIDE": "VLLM_MOONCAKE_BOOTSTRAP_PORT"})
    lost = r"inst-0's child process python\S* \(\d+\) did not receive VLLM_MOONCAKE_BOOTSTRAP_PORT"
    with pytest.raises(StartError, match=lost):
        async with Fleet(values, tmp_path / "run", with_proxy=False):
            pytest.fail("started")


async def test_engines_that_differ_in_fact_are_refused(make_fleet: Callable[..., FleetFile], tmp_path: Path) -> None:
    """A peer is checked like an own engine; one that does not answer gives a warning."""
    reported: list[str] = []
    mine = make_fleet(name_prefix="mine-")
    async with Fleet(mine, tmp_path / "a", with_proxy=False):
        peer = {"name": "far", "url": mine.url(0), "role": "kv_both", "bootstrap_url": mine.bootstrap_url(0)}
        other = make_fleet(peers=[peer], env={"STUB_BLOCK": "32"})
        with pytest.raises(StartError, match="must be compatible: block_size is 32 on inst-0 and 16 on far"):
            async with Fleet(other, tmp_path / "b", with_proxy=False):
                pytest.fail("started")
        away = make_fleet(peers=[peer, {**peer, "name": "gone", "url": "http://127.0.0.1:9"}])
        async with Fleet(away, tmp_path / "c", with_proxy=False, notify=reported.append):
            assert [line.split(" does not")[0] for line in reported] == ["warning: gone (http://127.0.0.1:9)"]


async def test_an_inherited_nvlink_variable_is_dropped(
    make_fleet: Callable[..., FleetFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_INTRANODE_NVLINK", "0")  # any value would turn it on
    async with Fleet(make_fleet(), tmp_path / "run", with_proxy=False) as fleet:
        assert fleet.state.processes[0].transport == "tcp"


async def test_a_dead_engine_behind_a_living_server_is_restarted(
    make_fleet: Callable[..., FleetFile], tmp_path: Path
) -> None:
    values = make_fleet(restart="on_failure", max_restarts=1, restart_backoff_s=0.05)
    async with Fleet(values, tmp_path / "run", with_proxy=False) as fleet:
        found = fleet.state.processes[0]
        first = found.pid
        async with httpx.AsyncClient() as client:
            await client.post(f"{found.url}/die")
        await soon(lambda: found.restarts == 1 and found.status == "ready")
        assert found.pid != first
        assert not psutil.pid_exists(first)
        assert fleet.unexpected_exits[0].startswith("inst-0 answers 503 on /health: its engine is dead")


async def test_the_proxys_request_recycles_up_to_a_limit(
    make_fleet: Callable[..., FleetFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.json"
    idle: dict[str, Any] = {"name": "inst-1", "requests": 0, "recycle_wanted": None}

    def answer(**changes: Any) -> None:
        (tmp_path / "new.json").write_text(json.dumps({"instances": [{**idle, **changes}]}))
        (tmp_path / "new.json").replace(rows)

    def answers() -> int:
        return len(rows.with_name("rows.json.answers").read_bytes())

    def stub_proxy(fleet: FleetFile, config: Path) -> ProcessSpec:
        command = (sys.executable, str(STUBS / "stub_proxy.py"), str(fleet.proxy_port), str(rows))
        return ProcessSpec("proxy", "proxy", command, ready_urls=(f"{fleet.proxy_url()}/ready",))

    monkeypatch.setattr("launch.run.supervisor.proxy_spec", stub_proxy)
    reported: list[str] = []
    answer()
    async with Fleet(make_fleet(2, max_recycles=1), tmp_path / "run", notify=reported.append) as fleet:
        before = [process.pid for process in fleet.state.processes]
        found = fleet.state.processes[1]
        answer(recycle_wanted="leaked blocks")
        await soon(lambda: found.recycles == 1 and found.status == "ready")
        answer()  # the proxy has noticed
        seen = answers()
        await soon(lambda: answers() >= seen + 2)  # the supervisor has taken the first of them before it asks again
        answer(recycle_wanted="leaked blocks")
        await soon(lambda: any("not recycled" in line for line in reported))
        assert found.status == "ready"
        assert (found.recycles, found.restarts) == (1, 0)
        after = [process.pid for process in fleet.state.processes]
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
        assert fleet.unexpected_exits == []
        assert "inst-1 is recycled (recycle 1): leaked blocks" in reported


def test_a_recycle_request_waits_for_idleness_but_not_forever() -> None:
    now = [100.0]
    requests = RecycleRequests(drain_limit_s=30, clock=lambda: now[0])
    busy = {"name": "a", "requests": 2, "recycle_wanted": "why"}
    assert requests.due([busy, {"name": "b", "requests": 0, "recycle_wanted": None}]) == {}
    assert requests.due([{**busy, "requests": 0}]) == {"a": "why"}
    now[0] = 129.0
    assert requests.due([busy]) == {}
    now[0] = 130.0
    assert requests.due([busy]) == {"a": "why"}
    assert requests.due([{**busy, "recycle_wanted": None}]) == {}  # withdrawn: the next request counts again
    assert requests.due([busy]) == {}
    now[0] = 159.0
    assert requests.due([busy]) == {}


def test_a_recycle_request_about_a_gone_engine_is_not_approved_twice() -> None:
    requests = RecycleRequests()
    wanted = {"name": "a", "requests": 0, "recycle_wanted": "why"}
    assert requests.due([wanted]) == {"a": "why"}
    requests.approve("a")
    assert requests.due([wanted]) == {}, "the new engine is up, the proxy has not probed it yet"
    assert requests.due([]) == {}, "the proxy did not answer: that changes nothing"
    assert requests.due([wanted]) == {}
    assert requests.due([{**wanted, "recycle_wanted": None}]) == {}
    assert requests.due([wanted]) == {"a": "why"}, "a request about the new engine counts"


def test_only_server_errors_in_a_row_make_an_engine_dead() -> None:
    record = HealthRecord()
    answers = [503] * (DEAD_AFTER - 1) + [200] + [None] * DEAD_AFTER + [503] * (DEAD_AFTER - 1)
    assert not any(record.dead("a", status) for status in answers)
    assert record.dead("a", 503)
    record.forget("a")
    assert not record.dead("a", 503)


class Launcher:
    """`up --no-proxy` of two stubs in a child process."""

    def __init__(self, tmp_path: Path, values: dict[str, Any]) -> None:
        self.run_dir = tmp_path / "run"
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(values))
        command = [sys.executable, "-m", "launch", "up", str(tmp_path / "fleet.yaml"), "--no-proxy"]
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(self.run_dir)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ready(self) -> FleetRecord:
        def state() -> FleetRecord | None:
            if self.process.poll() is not None:
                pytest.fail(self.process.communicate()[0])
            try:
                found = read_state(self.run_dir)
            except StateError:
                return None
            return found if found.status == "ready" else None

        found: FleetRecord = until(state)
        return found


@pytest.fixture
def launcher(tmp_path: Path, values: Callable[..., dict[str, Any]]) -> Iterator[Launcher]:
    found = Launcher(tmp_path, values(2))
    yield found
    if found.process.poll() is None:
        found.process.terminate()
    found.process.communicate(timeout=30)


def test_a_detached_fleet_that_cannot_prove_itself_fresh_is_an_error(
    tmp_path: Path, values: Callable[..., dict[str, Any]]
) -> None:
    """The stub reports served requests."""
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(values()))
    options = ["--no-proxy", "--detach", "--require-fresh", "--run-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["up", str(file), *options])
    assert result.exit_code == 2
    assert "inst-0: vllm:prompt_tokens_total is 7, not 0" in result.output
    assert read_state(tmp_path / "run").status == "stopped"


def check_tree(processes: list[psutil.Process]) -> None:
    """Two guards, two API servers and two engine cores, which have separate sessions and ignore SIGTERM."""
    assert len(processes) == 6
    cores = [process for process in processes if "signal.SIG_IGN" in " ".join(process.cmdline())]
    assert len(cores) == 2
    for core in cores:
        assert os.getsid(core.pid) == core.pid


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_the_launcher(launcher: Launcher, signum: int) -> None:
    state = launcher.ready()
    processes = trees(state)
    check_tree(processes)
    launcher.process.send_signal(signum)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    assert marked(state.marks) == []


def test_down_from_another_shell_ends_the_cores_too(launcher: Launcher) -> None:
    processes = trees(launcher.ready())
    check_tree(processes)
    result = CliRunner().invoke(app, ["down", "--run-dir", str(launcher.run_dir)])
    assert (result.exit_code, result.output) == (0, f"{launcher.run_dir}: stopped 2 processes\n")
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_down_finds_what_killed_guards_left(launcher: Launcher) -> None:
    """The worst case: launcher and guards are killed together, and the cores survive, without a known parent."""
    state = launcher.ready()
    processes = trees(state)
    check_tree(processes)
    for guard in state.running:
        psutil.Process(guard.pid).suspend()  # so that it cannot react to the launcher's death
    launcher.process.kill()
    launcher.process.wait(10)
    for process in processes[:2]:
        process.kill()
    psutil.wait_procs(processes[:2], timeout=10)
    left = until(lambda: marked(state.marks) if len(marked(state.marks)) == 2 else None)
    result = CliRunner().invoke(app, ["down", "--run-dir", str(launcher.run_dir)])
    assert (result.exit_code, result.output) == (0, f"{launcher.run_dir}: stopped 0 processes\n")
    # Their new parent may take a while to collect them.
    assert [pid for pid in left if creation_time(pid) is not None] == []


@pytest.mark.parametrize("guard_too", [False, True])
async def test_a_crashed_engine_takes_its_core_along(
    make_fleet: Callable[..., FleetFile], tmp_path: Path, guard_too: bool
) -> None:
    async with Fleet(make_fleet(), tmp_path / "run", with_proxy=False) as fleet:
        server, core = fleet.processes[0].tree()
        if guard_too:
            os.kill(fleet.state.processes[0].pid, signal.SIGKILL)
        else:
            server.send_signal(signal.SIGSEGV)
        await soon(lambda: fleet.unexpected_exits)
        assert f"inst-0 ended unexpectedly with code {-9 if guard_too else -11}" in fleet.unexpected_exits[0]
        await soon(lambda: all(creation_time(process.pid) is None for process in (server, core)))


async def test_a_frozen_guard_is_killed_with_its_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.run.processes._END_S", 0.3)
    command = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
    process = ManagedProcess(ProcessSpec("p", "vllm", command), tmp_path / "log")
    process.start()
    await soon(lambda: "up" in process.log_text())
    [child] = process.tree()
    psutil.Process(process.pid).suspend()
    await stop_processes([process], 0.1)
    assert process.exit_code == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_signals_reach_the_command_once_and_its_status_comes_back(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "count = [0]\n"
        "def on(*_): count[0] += 1; print('got', flush=True)\n"
        "signal.signal(signal.SIGTERM, on); signal.signal(signal.SIGINT, lambda *_: sys.exit(count[0] + 40))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    process = ManagedProcess(ProcessSpec("p", "vllm", (sys.executable, "-c", script)), tmp_path / "log")
    process.start()
    until(lambda: "up" in process.log_text())
    process.signal(signal.SIGTERM)
    until(lambda: "got" in process.log_text())
    process.signal(signal.SIGINT)
    until(process.exited)
    assert process.reap() == 41
