"""Fleets on a real Ray cluster of several local nodes; `make test-ray` runs these, in an environment with Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from launch.fleet.file import FleetFile, parse_fleet
from launch.on_ray.fleet import RayFleet
from proxy.discovery.ray import RayInstances
from proxy.settings import DiscoverySettings
from tests.integration.fleet import free_port

pytest.importorskip("ray", reason="needs Ray: make test-ray")

pytestmark = pytest.mark.ray

_PATIENCE_S = 90


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(_PATIENCE_S * 10):
        if holds():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"condition did not come true in {_PATIENCE_S} s")


def _ports() -> tuple[int, int]:
    """A base port, of which the next ones are used too, and the proxy's."""
    found = [free_port() for _ in range(8)]
    return found[0], found[-1]


def fleet_of(count: int, **other: Any) -> FleetFile:
    base, port = _ports()
    return parse_fleet(
        {
            "kind": "sim",
            "count": count,
            "base_port": base,
            "role": "none",
            "ready_timeout_s": _PATIENCE_S,
            "sim": {"profile": "h20", "time_scale": 20.0},
            "proxy": {"port": port, "policy": {"name": "round_robin"}, "health": {"interval_s": 0.5}},
            **other,
        }
    )


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room and three nodes with room for one engine each. A lost node is noticed after 2 s."""
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": "127.0.0.2", "_system_config": quick}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        for number in range(3):
            started.add_node(num_cpus=1, node_ip_address=f"127.0.0.{number + 3}")
        yield started
    finally:
        started.shutdown()


@asynccontextmanager
async def running(fleet: FleetFile, folder: Path, address: str) -> AsyncIterator[tuple[RayFleet, list[str]]]:
    notes: list[str] = []
    runner = RayFleet(fleet, folder, source=Path("test.yaml"), address=address, notify=notes.append)
    async with runner:
        yield runner, notes


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """Instance that answered a request; "" for one that failed."""
    body = {"model": "warm-sim", "prompt": [number + each for each in range(100)], "max_tokens": 4}
    answer = await client.post("/v1/completions", json=body)
    return answer.headers["x-warmroute-instance"] if answer.status_code == 200 else ""


async def test_a_lost_node_costs_its_own_requests_at_most_and_its_engine_starts_elsewhere(
    cluster: Any, tmp_path: Path
) -> None:
    fleet = fleet_of(2)
    async with (
        running(fleet, tmp_path, cluster.address) as (runner, notes),
        httpx.AsyncClient(base_url=fleet.proxy_url(), timeout=60, trust_env=False) as client,
    ):
        proof = await runner.prove_fresh()
        assert [each.instance for each in proof.engines] == ["inst-0", "inst-1"]
        assert all(each.pid and each.command_sha256 for each in proof.engines)
        first = {name: each.report for name, each in runner.placed.items()}
        assert len({report.node_id for report in first.values() if report}) == 2
        answered: Counter[str] = Counter()
        ended = False

        async def traffic() -> None:
            number = 0
            while not ended:
                number += 1
                answered[await ask(client, number * 1000)] += 1

        asking = asyncio.create_task(traffic())
        try:
            await until(lambda: min(answered["inst-0"], answered["inst-1"]) >= 5)
            lost = first["inst-1"]
            assert lost is not None
            node = next(each for each in cluster.worker_nodes if each.node_id == lost.node_id)
            await asyncio.to_thread(cluster.remove_node, node, False)
            seen = answered["inst-0"]
            await until(lambda: answered["inst-0"] >= seen + 20)
            await until(lambda: _moved(runner, lost.node_id))
            seen = answered["inst-1"]
            await until(lambda: answered["inst-1"] >= seen + 5)
        finally:
            ended = True
            await asking
        again = runner.placed["inst-1"].report
        assert again is not None
        assert again.node_id not in {each.node_id for each in first.values() if each is not None}
        # The traffic is one request at a time: the one that was running there, and none after it.
        assert answered[""] <= 1
        assert any("inst-1 does not answer" in note or "inst-1 was started again" in note for note in notes)
        nodes = {each["name"]: each for each in json.loads((tmp_path / "nodes.json").read_text())}
        assert (nodes["inst-1"]["status"], nodes["inst-1"]["node_id"]) == ("ready", again.node_id)
        assert all((tmp_path / f"inst-{number}.log").stat().st_size for number in range(2))
        pids = [each.report.pid for each in runner.placed.values() if each.report]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _moved(runner: RayFleet, node_id: str) -> bool:
    """True once inst-1 can be used on another node than this."""
    placed = runner.placed["inst-1"]
    return placed.usable and placed.report is not None and placed.report.node_id != node_id


async def test_an_engine_that_ends_is_started_again_on_its_node(cluster: Any, tmp_path: Path) -> None:
    fleet = fleet_of(1, restart="on_failure", restart_backoff_s=0.1)
    async with running(fleet, tmp_path, cluster.address) as (runner, notes):
        before = runner.placed["inst-0"].report
        assert before is not None
        # A proxy elsewhere finds the engine without the launcher's file.
        found = {"source": "ray", "ray": {"fleet": "test", "address": cluster.address}}
        async with aclosing(RayInstances(DiscoverySettings.model_validate(found)).sets()) as sets:
            (instance,) = (await anext(sets)).instances
        assert (instance.name, instance.url) == ("inst-0", before.instance["url"])
        os.kill(psutil.Process(before.pid).children()[0].pid, signal.SIGKILL)
        await until(lambda: any("restarts in" in note for note in notes))
        await until(lambda: runner.placed["inst-0"].usable)
        after = runner.placed["inst-0"].report
        assert after is not None
        assert (after.node_id, after.starts) == (before.node_id, 2)


async def test_up_is_one_command_on_one_machine(tmp_path: Path) -> None:
    fleet = tmp_path / "small.yaml"
    base, port = _ports()
    fleet.write_text(
        f"kind: sim\ncount: 2\nbase_port: {base}\nrole: none\nready_timeout_s: {_PATIENCE_S}\n"
        f"sim: {{profile: h20, time_scale: 20.0}}\nproxy: {{port: {port}}}\n"
    )
    flags = ("--on", "ray", "--require-fresh", "--run-dir", str(tmp_path / "run"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "launch", "up", str(fleet), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(_PATIENCE_S):
            async for line in process.stdout:
                lines.append(line.decode())
                if lines[-1].startswith("ready: "):
                    break
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            assert {await ask(client, number * 1000) for number in range(8)} == {"inst-0", "inst-1"}
        assert json.loads((tmp_path / "run" / "fresh.json").read_bytes())["engines"][1]["problems"] == []
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_PATIENCE_S):
            rest = (await process.stdout.read()).decode()
            assert await process.wait() == 143, rest
        assert "stopped; logs in" in rest
    except TimeoutError:
        raise AssertionError("".join(lines)) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
