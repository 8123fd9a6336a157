"""Any order of changes to a serving fleet, against a model; every stream must end properly."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import httpx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.core import Core
from proxy.settings import load_settings
from tests.proxy.conftest import ledger_is_zero, serving
from tests.proxy.fleet_client import ADMIN, KEYS, was_completed
from tests.proxy.stub_engine import StubEngine

NAMES = ["a", "b", "c"]
ENGINES = range(4)
TOKENS = 5

names = st.sampled_from(NAMES)
engines = st.sampled_from(ENGINES)


@dataclass
class Modelled:
    engine: int
    draining: bool = False


@dataclass
class Stream:
    engine: int
    reading: asyncio.Task[str]
    cut: bool = False
    """Its engine left without grace, so it may have been cut."""


class FleetMachine(RuleBasedStateMachine):
    core: Core
    client: httpx.AsyncClient

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.stack = contextlib.AsyncExitStack()
        self.fleet = {"a": Modelled(0), "b": Modelled(1)}
        self.streams: list[Stream] = []
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.engines = [await StubEngine(tokens=TOKENS, token_delay_s=0.01).start() for _ in ENGINES]
        for each in self.engines:
            self.stack.push_async_callback(each.stop)
        instances = [{"name": name, "url": self.engines[each.engine].url} for name, each in self.fleet.items()]
        given: dict[str, Any] = {
            "port": 0,
            "instances": instances,
            "keys": KEYS,
            "policy": {"name": "round_robin"},
            "log_level": "error",
        }
        app, url = await self.stack.enter_async_context(serving(load_settings(None, **given)))
        self.core, self.operations = app.core, app.operations
        self.client = await self.stack.enter_async_context(
            httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=20, trust_env=False)
        )

    def _do(self, method: str, path: str, body: dict[str, Any] | None = None, **query: Any) -> int:
        asking = self.client.request(method, path, json=body, params=query)
        return self.loop.run_until_complete(asking).status_code

    def _used(self, engine: int, but: str | None = None) -> bool:
        return any(each.engine == engine for name, each in self.fleet.items() if name != but)

    @rule(name=names, engine=engines)
    def add(self, name: str, engine: int) -> None:
        status = self._do("POST", "/instances", {"name": name, "url": self.engines[engine].url})
        if name in self.fleet or self._used(engine):
            assert status == 409
        else:
            assert status == 201
            self.fleet[name] = Modelled(engine)

    @rule(name=names, grace_s=st.sampled_from([0, 10]))
    def remove(self, name: str, grace_s: int) -> None:
        status = self._do("DELETE", f"/instances/{name}", grace_s=grace_s)
        assert status == (200 if name in self.fleet else 404)
        if name in self.fleet:
            self._left(self.fleet.pop(name), grace_s)

    @rule(name=names, engine=engines, grace_s=st.sampled_from([0, 10]))
    def replace(self, name: str, engine: int, grace_s: int) -> None:
        status = self._do("PUT", f"/instances/{name}", {"url": self.engines[engine].url}, grace_s=grace_s)
        if name not in self.fleet:
            assert status == 404
        elif self._used(engine, but=name):
            assert status == 409
        else:
            assert status == 200
            if engine != self.fleet[name].engine:
                self._left(self.fleet[name], grace_s)
                self.fleet[name] = Modelled(engine, self.fleet[name].draining)

    @rule(name=names, draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        status = self._do("POST", f"/instances/{name}/{'drain' if draining else 'undrain'}")
        assert status == (200 if name in self.fleet else 404)
        if name in self.fleet:
            self.fleet[name].draining = draining

    @rule(count=st.integers(1, 3))
    def ask(self, count: int) -> None:
        for _ in range(count):
            self.loop.run_until_complete(self._ask())

    @precondition(lambda self: len(self.streams) > 3)
    @rule()
    def finish(self) -> None:
        for stream in self.streams:
            completed = was_completed(self.loop.run_until_complete(stream.reading), TOKENS)
            assert completed or stream.cut
        self.streams.clear()

    async def _ask(self) -> None:
        body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": TOKENS, "stream": True}
        request = self.client.build_request("POST", "/v1/completions", json=body)
        answer = await self.client.send(request, stream=True)
        routable = {name: each.engine for name, each in self.fleet.items() if not each.draining}
        assert answer.status_code == (200 if routable else 503)
        if routable:
            engine = routable[answer.headers["x-warmroute-instance"]]
            self.streams.append(Stream(engine, asyncio.create_task(self._read(answer))))
        else:
            await answer.aclose()

    async def _read(self, answer: httpx.Response) -> str:
        try:
            return (await answer.aread()).decode()
        finally:
            await answer.aclose()

    def _left(self, modelled: Modelled, grace_s: int) -> None:
        for stream in self.streams:
            stream.cut = stream.cut or (stream.engine == modelled.engine and grace_s == 0)

    @invariant()
    def it_says_what_the_model_says(self) -> None:
        if not hasattr(self, "core"):
            return
        rows = self.loop.run_until_complete(self.client.get("/instances")).json()["instances"]
        assert {row["name"]: (row["url"], row["draining"], row["leaving"]) for row in rows} == {
            name: (self.engines[each.engine].url, each.draining, False) for name, each in self.fleet.items()
        }
        assert sorted(self.core.router.state.instances) == sorted(self.fleet)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        try:
            self.finish()
            self.loop.run_until_complete(self._idle())
        finally:
            self.loop.run_until_complete(self.stack.aclose())
            self.loop.close()

    async def _idle(self) -> None:
        for _ in range(500):
            stats = (await self.client.get("/stats")).json()
            if not stats["requests"]["in_flight"] and not self.operations.fleet.departures:
                break
            await asyncio.sleep(0.02)
        assert self.operations.fleet.departures == ()
        assert ledger_is_zero(stats)
        assert [self.core.upstream.in_use(each.url) for each in self.engines] == [0 for _ in self.engines]


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(
    max_examples=10, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
