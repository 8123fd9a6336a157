"""Requests to engines with priority scheduling carry the due time of their own leg."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from policies.routing.round_robin import RoundRobin
from proxy.exchange.priority import TIER
from proxy.settings import InstanceSettings
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.handoff.test_offload import HEAVY, legs
from tests.proxy.handoff.test_offload import start as start_offloading
from tests.proxy.resume.rig import CHAT, GREEDY
from tests.proxy.resume.test_resume_serving import ask, started
from tests.proxy.stub_engine import StubEngine
from tests.proxy.tokens.engine import TokenEngine
from tests.proxy.typed_engine import TypedEngine

ORDERED = {"priority_scheduling": True}
SLOW = {"name": "warm", "params": {"slowdown": 20.0}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": list(range(100))},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}]},
}


async def start(start_proxy: StartProxy, *engines: StubEngine, each: Any = ORDERED, **settings: Any) -> Running:
    fleet = list(engines) or [StubEngine()]
    every = each if isinstance(each, list) else [each] * len(fleet)
    return await start_proxy(engines=fleet, each=every, **{"policy": SLOW, **settings})


async def post(proxy: Running, path: str = "/v1/completions", **fields: Any) -> None:
    body = {"model": "stub", "max_tokens": 4, **REQUESTS[path], **fields}
    answer = await proxy.client.post(path, json=body)
    assert answer.status_code == 200, answer.text


def now_ms() -> int:
    return int(time.time() * 1e3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_the_body_gets_the_due_time_and_changes_in_nothing_else(
    start_proxy: StartProxy, path: str, stream: bool
) -> None:
    engine, plain = TypedEngine(), TypedEngine()
    ordered = await start(start_proxy, engine)
    before_ms = now_ms()
    await post(ordered, path, stream=stream)
    await post(await start(start_proxy, plain, each={}), path, stream=stream)
    [seen], [without] = engine.seen, plain.seen
    assert "priority" not in without
    if path == "/v1/messages":
        assert seen == without
        return
    assert seen.pop("priority") >= before_ms
    assert seen == without
    assert ("stream_options" in seen) is (stream and "responses" not in path)


async def test_long_prefills_are_due_later_than_short_ones_that_arrive_after_them(start_proxy: StartProxy) -> None:
    engine = StubEngine()
    proxy = await start(start_proxy, engine)
    await post(proxy, prompt=list(range(60_000)))
    await post(proxy, prompt=list(range(10)))
    long, short = (body["priority"] for body in engine.seen)
    assert short < long
    assert [row["priority"] for row in await proxy.rows()] == [long, short]


async def test_a_policy_without_an_order_sends_none(start_proxy: StartProxy) -> None:
    engine = StubEngine()
    proxy = await start(start_proxy, engine, policy={"name": "warm", "params": {"slowdown": 0.0}})
    await post(proxy)
    (await proxy.client.put("/policy", json=SLOW)).raise_for_status()
    await post(proxy)
    (await proxy.client.put("/policy", json={"name": "round_robin"})).raise_for_status()
    await post(proxy)
    assert [("priority" in body) for body in engine.seen] == [False, True, False]
    assert [row["priority"] is not None for row in await proxy.rows()] == [False, True, False]


async def test_a_clients_own_priority_is_refused_or_a_tier(start_proxy: StartProxy) -> None:
    engine = StubEngine()
    proxy = await start(start_proxy, engine)
    body = {"model": "stub", "max_tokens": 4, "prompt": [1, 2], "priority": -2}
    assert (await proxy.client.post("/v1/completions", json=body)).status_code == 400
    permitting = await start(start_proxy, engine, fields={"allow": ["priority"]})
    await post(permitting, priority=-2)
    await post(permitting, priority=3)
    await post(permitting)
    assert [body["priority"] // TIER for body in engine.seen] == [-2, 3, 0]


async def test_a_retry_has_the_priority_of_its_own_instance(start_proxy: StartProxy) -> None:
    first, second = StubEngine(mode="error"), StubEngine(mode="error")
    proxy = await start(start_proxy, first, second, each=[ORDERED, {}])
    body = {"model": "stub", "max_tokens": 4, "prompt": [1, 2]}
    assert (await proxy.client.post("/v1/completions", json=body)).status_code == 502
    assert ["priority" in body for body in first.seen] == [True]
    assert ["priority" in body for body in second.seen] == [False]


@pytest.mark.parametrize("ordered", [(True, True), (True, False), (False, True)])
async def test_each_leg_of_a_hand_off_has_the_due_time_on_its_instance(
    start_proxy: StartProxy, ordered: tuple[bool, bool]
) -> None:
    each = [{"priority_scheduling": one} for one in ordered]
    proxy = await start_offloading(start_proxy, each=each, policy=SLOW)
    before_ms = now_ms()
    assert (await proxy.client.post("/v1/completions", json={**HEAVY, "stream": True})).status_code == 200
    p_body, d_body, p_engine = legs(proxy)
    p_ordered, d_ordered = ordered if p_engine is proxy.engines[0] else ordered[::-1]
    assert ("priority" in p_body, "priority" in d_body) == (p_ordered, d_ordered)
    assert all(body.get("priority", before_ms) >= before_ms for body in (p_body, d_body))
    assert (await proxy.rows())[0]["priority"] == (p_body if p_ordered else d_body).get("priority")
    if all(ordered):  # D has nothing to compute before its first token
        assert d_body["priority"] < p_body["priority"]


async def test_a_failed_hand_off_keeps_the_place_on_d(start_proxy: StartProxy) -> None:
    engines = [StubEngine(mode="p_error"), StubEngine(mode="p_error")]
    proxy = await start_offloading(start_proxy, engines=engines, each=[ORDERED] * 2, policy=SLOW)
    assert (await proxy.client.post("/v1/completions", json=HEAVY)).status_code == 200
    bodies = {bool(body.get("kv_transfer_params")): body for engine in engines for body in engine.seen}
    assert bodies[False]["priority"] < bodies[True]["priority"]


@dataclass(frozen=True)
class OrderedTurns(RoundRobin):
    """Instances in turn, with an order of prefills."""

    slowdown: float = 20.0


@pytest.mark.parametrize("ordered", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("asked", [GREEDY, CHAT], ids=["completion", "chat"])
async def test_a_resumed_stream_has_the_priority_of_its_new_routing(
    start_proxy: StartProxy, asked: dict[str, Any], ordered: tuple[bool, bool]
) -> None:
    engines = [TokenEngine(break_after=7), TokenEngine()]
    proxy = await started(start_proxy, engines)
    for name, one in zip(("inst-0", "inst-1"), ordered, strict=True):
        proxy.core.router.state.add_instance(name, ordered=one)
    proxy.core.router.routing.policy = OrderedTurns()
    await ask(proxy, asked)
    [first], [second] = engines[0].seen, engines[1].seen
    assert ("priority" in first, "priority" in second) == ordered
    assert "prompt" in second  # it was continued, not sent again as it was


async def test_a_change_of_the_instance_applies_to_the_next_request(start_proxy: StartProxy) -> None:
    engine = StubEngine()
    proxy = await start(start_proxy, engine, each={})
    await post(proxy)
    fleet = proxy.operations.fleet
    settings = InstanceSettings(name="inst-0", url=engine.url, priority_scheduling=True)
    await fleet.replace("inst-0", settings, 1.0)
    await post(proxy)
    await fleet.remove("inst-0", 1.0)
    await fleet.add(settings)
    await proxy.until(lambda: any(each.healthy for each in proxy.core.instances))
    await post(proxy)
    assert ["priority" in body for body in engine.seen] == [False, True, True]
    [row] = (await proxy.client.get("/instances")).json()["instances"]
    assert row["priority_scheduling"] is True
