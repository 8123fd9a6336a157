"""A proxy in front of engines that break the rules, and checks that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from proxy.app import ProxyApp
from proxy.clients import bounded, inbound
from proxy.core import Core
from proxy.fleet.instances import Instance
from proxy.settings import load_settings
from tests.chaos.rig.engine import ChaosEngine
from tests.chaos.rig.served import Served, proxy_in_thread
from tests.chaos.rig.wire import MODEL
from tests.proxy.conftest import ledger_is_zero, serving

BODY: dict[str, Any] = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 6}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 6}
HEAVY: dict[str, Any] = {"model": MODEL, "prompt": list(range(400)), "max_tokens": 6}

LONG = {
    "connect_s": 20.0,
    "first_byte_s": 30.0,
    "idle_s": 30.0,
    "total_s": 60.0,
    "body_s": 30.0,
    "header_s": 30.0,
    "client_stall_s": 30.0,
}
"""Bounds too long for any test to reach."""
SHORT = {"connect_s": 0.5, "first_byte_s": 0.8, "idle_s": 0.8, "total_s": 1.0}
"""Bounds on the engine short enough for a test to reach."""


def kinds_of_tasks() -> Counter[str]:
    """Tasks of the event loop by kind, without the engines' own."""
    names = (task.get_coro().__qualname__ for task in asyncio.all_tasks() if not task.done())  # type: ignore[union-attr]
    return Counter(name for name in names if not name.startswith("ChaosEngine."))


@dataclass
class Chaos:
    """A running proxy, its engines, and a client for it."""

    app: ProxyApp
    url: str
    engines: list[ChaosEngine]
    client: httpx.AsyncClient
    tasks_before: Counter[str]

    @property
    def core(self) -> Core:
        return self.app.core

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def instance(self, number: int = 0) -> Instance:
        return self.core.instances[f"inst-{number}"]

    async def rows(self) -> list[dict[str, Any]]:
        return (await self.client.get("/breakdown", params={"limit": 1000})).json()["rows"]

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(1000):
            if holds():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("condition did not come true in 20 s")

    async def probed_twice(self) -> None:
        """Wait until the first round of probes and the immediate second one are over, so that they do not meet a fault.

        A failed one is repeated, for example when the machine stalled for the half second allowed for an identity.
        """
        for patience in range(1, 1001):
            well = all(instance.healthy for instance in self.core.instances)
            if well and all(engine.probes >= 2 for engine in self.engines):
                return
            await asyncio.sleep(0.02)
            if patience % 100 == 0:
                for instance in self.core.instances:
                    await self.app.operations.fleet.probe(instance)
        raise AssertionError("the engines were not probed twice in 20 s")

    async def nothing_left(self) -> None:
        """Check that no request, lease, task or upstream answer is left."""
        await self.until(lambda: self.core.breakdown.started == self.core.breakdown.finished)
        await self.until(lambda: not len(self.core.abandoned))
        await self.until(lambda: not any(engine.busy for engine in self.engines))
        await self.until(lambda: not any(self.core.upstream.in_use(engine.url) for engine in self.engines))
        stats = (await self.client.get("/stats")).json()
        assert ledger_is_zero(stats), stats["ledger"]
        await self.until(lambda: not kinds_of_tasks() - self.tasks_before)


StartChaos = Callable[..., Awaitable[Chaos]]


@pytest.fixture
async def start_chaos() -> AsyncIterator[StartChaos]:
    """``await start_chaos(engine, ..., **settings)``: starts the engines that are not running.

    Round robin begins with the first engine. Probes run once at the start and then hardly ever, so that an instance's
    health in a test only depends on requests.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *engines: ChaosEngine, role: str = "none", connector: str = "mooncake", **overrides: Any
        ) -> Chaos:
            for engine in engines:
                if not engine.port:
                    await engine.start()
                stack.push_async_callback(engine.stop)
            settings = load_settings(
                None,
                **{
                    "port": 0,
                    "instances": [
                        {
                            "name": f"inst-{number}",
                            "url": engine.url,
                            "bootstrap_url": engine.url,
                            "role": role,
                            "connector": connector,
                        }
                        for number, engine in enumerate(engines)
                    ],
                    "policy": {"name": "round_robin"},
                    "health": {"interval_s": overrides.pop("probe_every_s", 60.0), "timeout_s": 10.0},
                    "log_level": "error",
                    "grace_s": 1.0,
                    **overrides,
                    "timeouts": {**LONG, **overrides.get("timeouts", {})},
                    "offload": {"abandoned_s": 0.4, "query_timeout_s": 10.0, **overrides.get("offload", {})},
                },
            )
            app, url = await stack.enter_async_context(serving(settings))
            # Loopback without TLS: `verify=False` avoids loading certificates.
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=False)
            )
            chaos = Chaos(app, url, list(engines), client, Counter())
            await chaos.probed_twice()
            assert (await client.get("/health")).status_code == 200
            chaos.tasks_before = kinds_of_tasks()
            return chaos

        yield start


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose client was refused while it sent is read for half a second, not two: 40 tests wait for it."""
    for module in (inbound, bounded):
        monkeypatch.setattr(module, "LINGER_S", 0.5)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One proxy for a module of synchronous tests."""
    with proxy_in_thread() as running:
        yield running
