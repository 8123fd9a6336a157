"""Two replicas behind nginx with the configuration that is shipped: one is killed, and clients notice nothing."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.replicas.processes import free_port, replica_processes
from tests.proxy.sharing.store_server import StoreServer, needs_store
from tests.proxy.stub_engine import StubEngine

CONFIGURATION = Path(__file__).parents[3] / "configs" / "deploy" / "nginx-replicas.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

pytestmark = [
    needs_store,
    pytest.mark.fleet,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed on this machine"),
]


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


async def test_a_replica_behind_nginx_is_killed_and_no_request_fails(tmp_path: Path) -> None:
    assert NGINX is not None
    store, engine, port = StoreServer(tmp_path), await StubEngine().start(), free_port()

    def settings(number: int) -> dict[str, Any]:
        sharing = {"url": store.url, "replica": f"replica-{number}"}
        return {"instances": [{"name": "inst-0", "url": engine.url}], "log_level": "error", "sharing": sharing}

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
                    assert await asked(session, f"http://127.0.0.1:{port}", 20) == {200: 20}
                    replicas[0].kill()
                    await asyncio.to_thread(replicas[0].ended)
                    await until_ready(session, f"http://127.0.0.1:{port}")
                    assert await asked(session, f"http://127.0.0.1:{port}", 20) == {200: 20}
            finally:
                balancer.terminate()
                await asyncio.wait_for(balancer.wait(), 10)
    finally:
        store.kill()
        await engine.stop()
