"""A proxy on a free port in front of scripted engines, all in the test's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvloop

from proxy.app import ProxyApp
from proxy.core import Core
from proxy.operations.operations import Operations
from proxy.operations.shutdown import ProxyServer
from proxy.server import server_config
from proxy.settings import Settings, load_settings
from tests.proxy.stub_engine import StubEngine


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of `warmroute serve`: its transports differ from asyncio's in type and in when they write."""
    return {"uvloop": uvloop.new_event_loop}


@dataclass
class Running:
    """A running proxy, its engines, and a client for it."""

    app: ProxyApp
    url: str
    engines: list[StubEngine]
    client: httpx.AsyncClient

    @property
    def core(self) -> Core:
        return self.app.core

    @property
    def operations(self) -> Operations:
        return self.app.operations

    async def rows(self, **query: Any) -> list[dict[str, Any]]:
        return (await self.client.get("/breakdown", params={"limit": 1000, **query})).json()["rows"]

    async def settled(self) -> dict[str, Any]:
        """Statistics once nothing is in flight any more."""
        for _ in range(1500):
            stats = (await self.client.get("/stats")).json()
            if not stats["requests"]["in_flight"] and not stats["requests"]["abandoned_pulls"]:
                return stats
            await asyncio.sleep(0.02)
        raise AssertionError(f"requests still in flight: {stats}")

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(1500):
            if holds():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("condition did not come true in 30 s")


def ledger_is_zero(stats: dict[str, Any]) -> bool:
    return not any(stats["ledger"].values())


async def probed_twice(app: ProxyApp) -> None:
    """Wait until the first round of probes and the immediate second one are over, so that they do not disturb the test.

    A probe that failed because this process lacked CPU is repeated.
    """
    for instance in app.core.instances:
        for patience in range(100, 0, -1):
            if instance.good_probes_in_a_row + instance.bad_probes_in_a_row >= 2:
                break
            await asyncio.sleep(0.01)
            if patience <= 10:
                await app.operations.fleet.probe(instance)


class PromptServer(ProxyServer):
    """The real server, which looks for its end ten times as often: two thousand tests wait for that."""

    async def main_loop(self) -> None:
        for tick in itertools.count():
            if await self.on_tick(tick % 864_000):
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[ProxyApp, str]]:
    """The real server on a free port."""
    config = server_config(settings)
    app = config.app
    assert isinstance(app, ProxyApp)
    server = PromptServer(config, app.core, app.operations.reloader.on_hangup)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            if task.done():
                task.result()
                raise AssertionError("the server ended before it started")
            await asyncio.sleep(0.01)
        yield app, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


StartProxy = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_proxy() -> AsyncIterator[StartProxy]:
    """``await start_proxy(n_engines, **settings)``: everything is stopped when the test ends.

    ``role`` applies to every instance, ``each`` gives further settings per instance.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(count: int = 2, engines: list[StubEngine] | None = None, **overrides: Any) -> Running:
            fleet = engines or [StubEngine() for _ in range(count)]
            for engine in fleet:
                if not engine.port:
                    await engine.start()
                stack.push_async_callback(engine.stop)
            role = overrides.pop("role", "none")
            each: list[dict[str, Any]] = overrides.pop("each", [{}] * len(fleet))
            offload = {"abandoned_s": 0.4, **overrides.pop("offload", {})}
            known = [
                {"name": f"inst-{i}", "url": e.url, "bootstrap_url": e.url, "role": role} for i, e in enumerate(fleet)
            ]
            settings = load_settings(
                None,
                **{
                    "port": 0,
                    "instances": [{**instance, **more} for instance, more in zip(known, each, strict=True)],
                    "health": {"interval_s": 0.5, "timeout_s": 2.0},
                    "log_level": "warning",
                    "offload": offload,
                    **overrides,
                },
            )
            app, url = await stack.enter_async_context(serving(settings))
            await probed_twice(app)
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, trust_env=False))
            return Running(app, url, fleet, client)

        yield start
