"""Simulated engines, each a process, that come and go during traffic: no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from proxy.app import ProxyApp
from proxy.settings import load_settings
from tests.integration.fleet import SimEngine, free_port, start_engines
from tests.proxy.conftest import serving
from tests.proxy.discovery.stub_api_server import stub_api_server
from tests.proxy.discovery.stub_dns import stub_dns

FLAGS = ("--model", "sim", "--role", "none", "--engine-speed", "20", "--profile", "h20")


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("condition did not come true in 60 s")


@dataclass
class Traffic:
    """Requests, each with its own prompt, four at a time, until it is ended; one that is lost ends it."""

    client: httpx.AsyncClient
    answered: Counter[str] = field(default_factory=Counter)
    ended: bool = False
    task: asyncio.Task[None] = field(init=False)

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(4)))

    async def _client(self, number: int) -> None:
        turn = 0
        while not self.ended:
            turn += 1
            prompt = [number * 1000 + turn + each for each in range(200)]
            body = {"model": "sim", "prompt": prompt, "max_tokens": 20, "stream": True}
            answer = await self.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.text.rstrip().endswith("data: [DONE]"), answer.text[-300:]
            self.answered[answer.headers["x-warmroute-instance"]] += 1

    async def until_answered_by(self, name: str, count: int) -> None:
        """Wait until an instance has answered ``count`` requests more."""
        wanted = self.answered[name] + count
        await until(lambda: self.answered[name] >= wanted or self.task.done())
        if self.task.done():
            self.task.result()


@contextlib.asynccontextmanager
async def traffic(url: str) -> AsyncIterator[Traffic]:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        running = Traffic(client)
        task = running.task = asyncio.create_task(running.run())
        try:
            yield running
        finally:
            running.ended = True
            async with asyncio.timeout(60):
                await task


async def gone(app: ProxyApp, name: str) -> None:
    await until(lambda: app.core.instances.get(name) is None)


@pytest.mark.fleet
async def test_engines_replaced_one_by_one_in_a_file_lose_no_request(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"

    def write(*engines: SimEngine) -> None:
        other = path.with_suffix(".new")
        other.write_text(json.dumps([{"url": each.url} for each in engines]))
        os.replace(other, path)

    def name(engine: SimEngine) -> str:
        return engine.url.removeprefix("http://")

    first = await start_engines(2, tmp_path, *FLAGS)
    second = [SimEngine(tmp_path / f"second-{number}.log", FLAGS) for number in range(2)]
    try:
        write(*first)
        found = {"source": "file", "file": {"path": path}, "interval_s": 0.1}
        settings = load_settings(None, port=0, discovery=found, policy={"name": "round_robin"}, grace_s=30)
        async with serving(settings) as (app, url), traffic(url) as running:
            for old, new in zip(first, second, strict=True):
                await running.until_answered_by(name(old), 5)
                new.start()
                await new.healthy(running.client)
                write(*(each for each in (*first, *second) if each.process is not None and each is not old))
                await running.until_answered_by(name(new), 5)
                await gone(app, name(old))
                old.kill()
            for new in second:
                await running.until_answered_by(name(new), 5)
        assert set(running.answered) == {name(each) for each in (*first, *second)}
    finally:
        for each in (*first, *second):
            each.kill()


@contextlib.asynccontextmanager
async def engines_at(folder: Path, *addresses: str) -> AsyncIterator[dict[str, SimEngine]]:
    """Engines with an address of their own and the same port, as pods have them."""
    port = free_port()
    engines = {
        address: SimEngine(folder / f"{address}.log", (*FLAGS, "--host", address), port=port, address=address)
        for address in addresses
    }
    try:
        for each in engines.values():
            each.start()
        async with httpx.AsyncClient(trust_env=False) as client:
            await asyncio.gather(*(each.healthy(client) for each in engines.values()))
        yield engines
    finally:
        for each in engines.values():
            each.kill()


@pytest.mark.fleet
async def test_engines_behind_one_name_come_and_go_with_its_addresses(tmp_path: Path) -> None:
    """As a headless service. The name server is a stub."""
    async with engines_at(tmp_path, "127.0.0.2", "127.0.0.3", "127.0.0.4") as engines, stub_dns() as server:
        first, second, third = (each.url.removeprefix("http://") for each in engines.values())
        server.records["engines.test.", "A"] = ["127.0.0.2", "127.0.0.3"]
        names = {"name": "engines.test.", "servers": [server.address], "absent_s": 0.3}
        port = engines["127.0.0.2"].port
        found = {"source": "dns", "dns": names, "engine": {"port": port}, "interval_s": 0.1}
        settings = load_settings(None, port=0, discovery=found, policy={"name": "round_robin"}, grace_s=30)
        async with serving(settings) as (app, url), traffic(url) as running:
            await running.until_answered_by(first, 5)
            server.records["engines.test.", "A"] = ["127.0.0.3", "127.0.0.4"]
            await gone(app, first)
            engines["127.0.0.2"].kill()
            await running.until_answered_by(third, 5)
            server.silent = True
            await running.until_answered_by(second, 5)


@pytest.mark.fleet
async def test_pods_come_and_go_and_the_api_server_fails_meanwhile(tmp_path: Path) -> None:
    """The API server is a stub; the engines are processes."""
    addresses = ("127.0.0.5", "127.0.0.6", "127.0.0.7")
    async with engines_at(tmp_path, *addresses) as engines, stub_api_server(tmp_path) as server:
        ports = {address: each.port for address, each in engines.items()}
        await server.put("engine-0", addresses[0], port=ports[addresses[0]])
        await server.put("engine-1", addresses[1], port=ports[addresses[1]])
        settings = load_settings(None, port=0, discovery=server.settings(), policy={"name": "round_robin"}, grace_s=30)
        async with serving(settings) as (app, url), traffic(url) as running:
            await running.until_answered_by("engine-0", 5)
            await server.begin_deletion("engine-0")
            await gone(app, "engine-0")
            engines[addresses[0]].kill()
            await server.delete("engine-0")
            await server.put("engine-2", addresses[2], port=ports[addresses[2]])
            await running.until_answered_by("engine-2", 5)
            port = server.port
            await server.stop()
            await until(lambda: app.core.discovery.failures_in_a_row > 1)
            await running.until_answered_by("engine-1", 5)
            await server.begin_deletion("engine-1")
            await server.start(port)
            await gone(app, "engine-1")
            await running.until_answered_by("engine-2", 5)
