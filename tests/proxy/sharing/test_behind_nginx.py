"""Two replicas behind nginx with the shipped configuration: one is killed or stopped, and clients notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from bench.replicas.processes import ReplicaProcess, free_port, replica_processes
from tests.proxy.sharing.store_server import StoreServer, needs_store
from tests.proxy.stub_engine import StubEngine

FOLDER = Path(__file__).parents[3] / "configs" / "deploy"
CONFIGURATION = FOLDER / "nginx-replicas.conf"
REPLICA = yaml.safe_load((FOLDER / "compose-replicas.yaml").read_text(encoding="utf-8"))["services"]["replica-1"][
    "environment"
]
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

pytestmark = [
    needs_store,
    pytest.mark.fleet,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed on this machine"),
]


Deployment = tuple[aiohttp.ClientSession, str, list[ReplicaProcess]]


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    engine = await StubEngine().start()
    yield engine
    await engine.stop()


def configured(folder: Path, listen: int, replicas: list[int]) -> Path:
    """The shipped configuration with free ports, for one user."""
    text = CONFIGURATION.read_text(encoding="utf-8").replace("/tmp/nginx.pid", str(folder / "nginx.pid"))
    for shipped, port in zip((9090, 9091, 9092), (listen, *replicas), strict=True):
        assert f"127.0.0.1:{shipped}" in text
        text = text.replace(f"127.0.0.1:{shipped}", f"127.0.0.1:{port}")
    path = folder / "nginx.conf"
    path.write_text(text, encoding="utf-8")
    return path


async def asked(session: aiohttp.ClientSession, url: str, count: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    for number in range(count):
        body = {"model": "stub", "prompt": [number] * 64, "max_tokens": 4}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            await answer.read()
            statuses[answer.status] += 1
    return statuses


async def until_ready(session: aiohttp.ClientSession, url: str) -> None:
    for _ in range(600):
        try:
            async with session.get(f"{url}/ready") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectorError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError(f"{url} did not become ready in a minute")


@contextlib.asynccontextmanager
async def deployed(tmp_path: Path, engine: StubEngine, **more: Any) -> AsyncIterator[Deployment]:
    """Two replicas, ready, and nginx in front of them."""
    assert NGINX is not None
    store, port = StoreServer(tmp_path), free_port()

    def settings(number: int) -> dict[str, Any]:
        sharing = {"url": store.url, "replica": f"replica-{number}"}
        return {
            "instances": [{"name": "inst-0", "url": engine.url}],
            "log_level": "error",
            "sharing": sharing,
            **more,
        }

    store.start()
    try:
        with replica_processes(2, tmp_path, settings) as replicas:
            config = configured(tmp_path, port, [int(each.url.rpartition(":")[2]) for each in replicas])
            command = [NGINX, "-c", str(config), "-p", str(tmp_path), "-g", "daemon off;"]
            balancer = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
            try:
                async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session:
                    for each in replicas:
                        await until_ready(session, each.url)
                    await until_ready(session, f"http://127.0.0.1:{port}")
                    yield session, f"http://127.0.0.1:{port}", replicas
            finally:
                balancer.terminate()
                await asyncio.wait_for(balancer.wait(), 10)
    finally:
        store.kill()


async def test_a_replica_behind_nginx_is_killed_and_no_request_fails(tmp_path: Path, engine: StubEngine) -> None:
    async with deployed(tmp_path, engine) as (session, url, replicas):
        assert await asked(session, url, 20) == {200: 20}
        replicas[0].kill()
        await asyncio.to_thread(replicas[0].ended)
        await until_ready(session, url)
        assert await asked(session, url, 20) == {200: 20}


async def test_a_replica_behind_nginx_is_stopped_and_no_request_fails(tmp_path: Path, engine: StubEngine) -> None:
    """With the shipped delay: nginx does not probe, and sends requests until the connection is refused."""
    delay_s = float(REPLICA["WARMROUTE_DRAIN_DELAY_S"])
    async with deployed(tmp_path, engine, drain_delay_s=delay_s) as (session, url, replicas):

        async def until_ended() -> Counter[int]:
            statuses = await asked(session, url, 10)
            while replicas[0].alive:
                statuses += await asked(session, url, 4)
            return statuses + await asked(session, url, 10)

        clients = [asyncio.create_task(until_ended()) for _ in range(4)]
        await asked(session, url, 4)
        replicas[0].terminate()
        for statuses in await asyncio.gather(*clients):
            assert set(statuses) == {200}
