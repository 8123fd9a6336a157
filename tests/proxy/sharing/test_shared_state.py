"""State that replicas share over a real store: load, pins, limits, drain marks, breakers; and the store's faults."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from policies.admission import elsewhere
from proxy.access.keys import digest_of
from proxy.fleet.breaker import BreakerState
from proxy.settings import load_settings
from proxy.sharing.redis_store import RedisStore
from proxy.sharing.store import StoreError
from proxy.sharing.wire import Message
from tests.proxy.conftest import Running, StartProxy, serving
from tests.proxy.sharing.conftest import StartReplicas, knows
from tests.proxy.sharing.store_server import StoreServer, needs_store
from tests.proxy.stub_engine import StubEngine

pytestmark = needs_store

PROMPT = list(range(3_200))
BODY = {"model": "stub", "prompt": PROMPT, "max_tokens": 4}


async def ask(replica: Running, session: str | None = None, **more: Any) -> httpx.Response:
    headers = {} if session is None else {"x-session-id": session}
    return await replica.client.post("/v1/completions", json=BODY | more, headers=headers)


def remote_requests(replica: Running) -> int:
    return sum(account.requests for account in replica.core.router.state.ledger.remote.values())


def condition(replica: Running, answer: httpx.Response) -> dict[str, Any]:
    (found,) = [each for each in answer.json()["conditions"] if each["name"] == "shared_state"]
    return found


async def shared_state(replica: Running) -> dict[str, Any]:
    return condition(replica, await replica.client.get("/ready?verbose"))


async def until_reported(replica: Running, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait for a state of the condition: a slow machine may lose the link for a moment."""
    for _ in range(1500):
        found = await shared_state(replica)
        if holds(found):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(found)


async def until_linked(replica: Running, linked: bool) -> None:
    sharing = replica.core.sharing
    assert sharing is not None
    await replica.until(lambda: sharing.linked is linked)


# Load


async def test_each_replica_counts_what_the_others_have_in_flight(start_replicas: StartReplicas) -> None:
    engines = [StubEngine(mode="hang")]
    one, two = await start_replicas(2, engines)
    waiting = [asyncio.create_task(ask(one)) for _ in range(3)]
    await two.until(lambda: remote_requests(two) == 3)
    row = (await two.client.get("/replicas")).json()
    assert [(each["replica"], each["requests"]) for each in row["others"]] == [("replica-0", 3)]
    fleet = (await two.client.post("/explain", json=BODY)).json()["fleet"]
    assert (fleet[0]["requests"], fleet[0]["prefilling"], fleet[0]["pending_prefill_tokens"]) == (3, 3, 3_200 + 2 * 16)
    assert (await two.client.get("/stats")).json()["ledger"]["requests"] == 0
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await two.until(lambda: remote_requests(two) == 0)


async def test_the_cap_of_an_instance_holds_over_all_replicas(start_replicas: StartReplicas) -> None:
    engine = StubEngine(mode="hang")
    one, two = await start_replicas(2, [engine], limits={"max_in_flight_per_instance": 1})
    first = asyncio.create_task(ask(one))
    await two.until(lambda: remote_requests(two) == 1)
    second = asyncio.create_task(ask(two))
    await two.until(lambda: two.core.admission.waiting == 1)
    engine.mode = "ok"
    first.cancel()
    assert (await second).status_code == 200, "it is woken by the news that the other replica's request has ended"


async def test_a_replica_that_shuts_down_is_forgotten_at_once(store: StoreServer, start_proxy: StartProxy) -> None:
    sharing = {"url": store.url, "ttl_s": 60.0}
    one = await start_proxy(sharing=sharing | {"replica": "one"})
    shared = [{"name": f"inst-{i}", "url": engine.url} for i, engine in enumerate(one.engines)]
    settings = load_settings(None, port=0, instances=shared, sharing=sharing | {"replica": "two"})
    async with serving(settings):
        await one.until(lambda: knows(one) == 1)
    await one.until(lambda: knows(one) == 0)


# Held requests

ONE_SESSION = {"name": "session_cap", "params": {"sessions": 1, "keep_s": 0.0}}


def lengths_sent(engine: StubEngine) -> list[int]:
    return [len(body["prompt"]) for body in engine.seen]


async def test_held_requests_of_all_replicas_are_sent_in_one_order(
    start_replicas: StartReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "YIELD_S", 60.0)  # so that a slow machine changes nothing
    engine = StubEngine(mode="hang")
    one, two = await start_replicas(2, [engine], admission=ONE_SESSION)
    first = asyncio.create_task(ask(one, "first"))
    await two.until(lambda: remote_requests(two) == 1)
    asked = []
    for replica, units in ((one, 2_400), (two, 800), (one, 1_600), (two, 3_200)):
        asked.append(asyncio.create_task(ask(replica, str(units), prompt=PROMPT[:units])))
        await one.until(lambda: len(one.core.holding) + len(two.core.holding) == len(asked))
    await one.until(lambda: len(one.core.router.routing.gate.elsewhere) == 2)
    await two.until(lambda: len(two.core.router.routing.gate.elsewhere) == 2)
    engine.mode = "ok"
    first.cancel()
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 4
    assert lengths_sent(engine)[1:] == [800, 1_600, 2_400, 3_200]
    await asyncio.gather(first, return_exceptions=True)


async def test_held_requests_of_a_replica_that_is_gone_hold_nobody_up(
    start_replicas: StartReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "YIELD_S", 60.0)
    engine = StubEngine(mode="hang")
    one, two = await start_replicas(2, [engine], admission=ONE_SESSION)
    first = asyncio.create_task(ask(one, "first"))
    await two.until(lambda: remote_requests(two) == 1)
    shorter = asyncio.create_task(ask(two, "shorter", prompt=PROMPT[:1_000]))
    await one.until(lambda: len(one.core.router.routing.gate.elsewhere) == 1)
    longer = asyncio.create_task(ask(one, "longer"))
    await one.until(lambda: len(one.core.holding) == 1)
    sharing = two.core.sharing
    assert sharing is not None
    monkeypatch.setattr(sharing._own, "message", lambda *_, **__: None)  # it falls silent, and sends nobody
    two.core.holding.close()
    engine.mode = "ok"
    first.cancel()
    assert (await longer).status_code == 200
    await asyncio.gather(first, shorter, return_exceptions=True)


# Parts of the fleet


async def test_replicas_of_a_large_fleet_divide_it_until_one_is_alone(
    start_replicas: StartReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await start_replicas(2, 16)
    first, second = one.core.router.routing, two.core.router.routing
    await one.until(lambda: len(first.part) == 8)
    await two.until(lambda: len(second.part) == 8)
    assert not first.part & second.part
    assert (await one.client.get("/replicas")).json()["part"] == 8
    placed = {
        (await ask(one)).headers["x-warmroute-instance"],
        (await ask(one, prompt=[7] * 320)).headers["x-warmroute-instance"],
    }
    assert placed <= first.part
    sharing = two.core.sharing
    assert sharing is not None
    monkeypatch.setattr(sharing._own, "message", lambda *_, **__: None)  # it falls silent
    await one.until(lambda: not first.part)


async def test_parts_can_be_switched_off_and_small_fleets_have_none(start_replicas: StartReplicas) -> None:
    one, two = await start_replicas(2, 16, sharing={"parts": False})
    assert one.core.sharing is not None
    one.core.sharing._divide()
    assert not one.core.router.routing.part
    assert (await two.client.get("/replicas")).json()["part"] is None


# Sessions


async def test_a_session_s_next_turn_finds_its_context_through_another_replica(start_replicas: StartReplicas) -> None:
    one, two = await start_replicas(2)
    first = await ask(one, "s")
    state = two.core.router.state
    await two.until(lambda: state.shared is not None and len(state.shared) == 1 and not remote_requests(two))
    longer = BODY | {"prompt": [*PROMPT, *range(5_000, 5_320)]}
    explained = (await two.client.post("/explain", json=longer, headers={"x-session-id": "s"})).json()
    where = first.headers["x-warmroute-instance"]
    assert explained["request"]["pinned_instance"] == where
    assert {view["instance"]: view["cached_tokens"] for view in explained["fleet"]}[where] == 3_200
    again = await ask(two, "s", prompt=longer["prompt"])
    assert again.headers["x-warmroute-instance"] == where


async def test_a_replica_that_starts_later_knows_the_sessions_before_it_is_ready(
    start_replicas: StartReplicas, start_proxy: StartProxy, store: StoreServer
) -> None:
    (one,) = await start_replicas(1)
    sharing = one.core.sharing
    assert sharing is not None
    where = (await ask(one, "s")).headers["x-warmroute-instance"]
    sent = sharing.sent
    await one.until(lambda: sharing.sent > sent + 1)
    late = await start_proxy(engines=one.engines, sharing={"url": store.url, "replica": "late"})
    explained = (await late.client.post("/explain", json=BODY, headers={"x-session-id": "s"})).json()
    assert explained["request"]["pinned_instance"] == where
    assert knows(late) == 1


# Limits of keys


def with_key(**limits: Any) -> dict[str, Any]:
    return {"keys": {"client": [{"name": "team", "sha256": digest_of("secret"), **limits}]}}


async def ask_with_key(replica: Running, session: str | None = None) -> httpx.Response:
    headers = {"authorization": "Bearer secret"} | ({} if session is None else {"x-session-id": session})
    return await replica.client.post("/v1/completions", json=BODY | {"prompt": [1] * 32}, headers=headers)


async def test_requests_in_flight_of_a_key_count_over_replicas(start_replicas: StartReplicas) -> None:
    one, two = await start_replicas(2, [StubEngine(mode="hang")], **with_key(max_concurrent=1))
    first = asyncio.create_task(ask_with_key(one))
    await two.until(lambda: next(iter(two.core.keys.quotas().values())).elsewhere.in_flight == 1)
    refused = await ask_with_key(two)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_sessions_of_a_key_count_once_over_replicas(start_replicas: StartReplicas) -> None:
    one, two = await start_replicas(2, **with_key(max_sessions=2))
    assert (await ask_with_key(one, "a")).status_code == 200
    assert (await ask_with_key(two, "b")).status_code == 200
    quotas = [next(iter(each.core.keys.quotas().values())) for each in (one, two)]
    await one.until(lambda: all(len(quota.elsewhere.sessions) == 1 for quota in quotas))
    assert (await ask_with_key(one, "c")).status_code == 429
    assert (await ask_with_key(one, "b")).status_code == 200, "it is counted already, on the other replica"


async def test_requests_per_minute_of_a_key_count_over_replicas(start_replicas: StartReplicas) -> None:
    one, two = await start_replicas(2, **with_key(max_requests_per_min=4))
    for _ in range(4):
        assert (await ask_with_key(one)).status_code == 200
    (quota,) = two.core.keys.quotas().values()
    await two.until(lambda: quota.use(asyncio.get_running_loop().time()).requests_left < 1)
    assert (await ask_with_key(two)).status_code == 429


# Drain marks and breakers


async def test_draining_an_instance_on_one_replica_drains_it_on_all_and_on_later_ones(
    start_replicas: StartReplicas, start_proxy: StartProxy, store: StoreServer
) -> None:
    one, two = await start_replicas(2)
    one.operations.fleet.drain("inst-0")
    await two.until(lambda: two.core.instances["inst-0"].draining)
    late = await start_proxy(engines=one.engines, sharing={"url": store.url, "replica": "late"})
    assert late.core.instances["inst-0"].draining
    two.operations.fleet.undrain("inst-0")
    await one.until(lambda: not one.core.instances["inst-0"].draining)
    await late.until(lambda: not late.core.instances["inst-0"].draining)


async def test_an_instance_added_again_under_a_drained_and_removed_name_is_not_drained(
    start_replicas: StartReplicas, start_proxy: StartProxy, store: StoreServer
) -> None:
    one, two = await start_replicas(2)
    settings = one.core.instances["inst-0"].settings
    one.operations.fleet.drain("inst-0")
    await two.until(lambda: two.core.instances["inst-0"].draining)
    await one.operations.fleet.remove("inst-0", 0.0)
    one.operations.fleet.drain("inst-1")
    await two.until(lambda: two.core.instances["inst-1"].draining)
    assert two.core.instances["inst-0"].draining, "it is still there, and drained by an operator"
    (again,) = await one.operations.fleet.add(settings)
    assert not again.draining
    late = await start_proxy(engines=one.engines, sharing={"url": store.url, "replica": "late"})
    assert [late.core.instances[f"inst-{number}"].draining for number in range(2)] == [False, True]
    two.operations.fleet.drain("inst-0")
    await one.until(lambda: again.draining)


async def test_another_engine_behind_a_drained_name_is_drained_with_every_replica(
    start_replicas: StartReplicas, start_proxy: StartProxy, store: StoreServer
) -> None:
    one, two = await start_replicas(2)
    one.operations.fleet.drain("inst-0")
    await two.until(lambda: two.core.instances["inst-0"].draining)
    more = await StubEngine().start()
    settings = one.core.instances["inst-0"].settings.model_copy(update={"url": more.url})
    new = await two.operations.fleet.replace("inst-0", settings, 0.0)
    assert new.draining
    one.operations.fleet.undrain("inst-0")
    await two.until(lambda: not new.draining)
    await more.stop()


async def test_an_instance_whose_removal_is_cancelled_is_not_drained_with_any_replica(
    start_replicas: StartReplicas, start_proxy: StartProxy, store: StoreServer
) -> None:
    engines = [StubEngine(mode="hang"), StubEngine()]
    one, two = await start_replicas(2, engines, policy={"name": "round_robin"})
    waiting = [asyncio.create_task(ask(one)) for _ in range(2)]
    await one.until(lambda: engines[0].running == 1)
    leaving = one.core.instances["inst-0"]
    one.operations.fleet.drain("inst-0")
    one.operations.fleet.depart(leaving, 60.0)
    await two.until(lambda: two.core.instances["inst-0"].draining)
    back = one.operations.fleet.swap(leaving, leaving.settings, 60.0, leaving.source)
    assert not back.draining
    await two.until(lambda: not two.core.instances["inst-0"].draining)
    late = await start_proxy(engines=engines, sharing={"url": store.url, "replica": "late"})
    assert not late.core.instances["inst-0"].draining
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_open_breaker_elsewhere_is_a_hint_to_probe_not_a_state_to_copy(start_replicas: StartReplicas) -> None:
    one, two = await start_replicas(2, health={"interval_s": 30.0, "timeout_s": 2.0})
    probes = one.engines[0].probes
    for _ in range(3):
        one.core.instances.failed("inst-0", "it broke")
    assert one.core.instances["inst-0"].breaker.state is BreakerState.OPEN
    await two.until(lambda: one.engines[0].probes > probes)
    assert two.core.instances["inst-0"].healthy
    two.core.instances.failed("inst-0", "it broke here too")
    assert two.core.instances["inst-0"].breaker.state is BreakerState.OPEN


# The store's faults


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_a_store_that_is_lost_costs_nobody_a_request_and_all_is_shared_again_after_it(
    start_replicas: StartReplicas, store: StoreServer, fault: str
) -> None:
    engines = [StubEngine()]
    one, two = await start_replicas(2, engines, sharing={"timeout_s": 0.3})
    one.operations.fleet.drain("inst-0")
    await two.until(lambda: two.core.instances["inst-0"].draining)
    one.operations.fleet.undrain("inst-0")
    await two.until(lambda: not two.core.instances["inst-0"].draining)
    if fault == "killed":
        store.kill()
    else:
        store.send(signal.SIGSTOP)
    try:
        for each in (one, two):
            await until_linked(each, False)
            assert (await ask(each, "s")).status_code == 200
            assert (await shared_state(each))["ok"] is False
            assert (await each.client.get("/ready")).status_code == 200
        await one.until(lambda: knows(one) == 0)
        text = (await one.client.get("/metrics")).text
        assert "warmroute_shared_state_linked 0.0" in text
        assert 'warmroute_condition{condition="shared_state"} 0.0' in text
    finally:
        if fault == "stopped":
            store.send(signal.SIGCONT)
    if fault == "killed":
        store.start()
    engines[0].mode = "hang"
    hanging = asyncio.create_task(ask(one))
    for each in (one, two):
        await until_linked(each, True)
        await each.until(lambda each=each: knows(each) == 1)  # type: ignore[misc]
    await two.until(lambda: remote_requests(two) == 1)
    await until_reported(two, lambda found: found["ok"])
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_a_lost_subscription_is_made_again(start_replicas: StartReplicas, store: StoreServer) -> None:
    one, two = await start_replicas(2, [StubEngine(mode="hang")])
    sharing = two.core.sharing
    assert sharing is not None
    async with Redis.from_url(store.url) as client:
        await client.client_kill_filter(_type="pubsub")
    await two.until(lambda: sharing.links == 2)
    hanging = asyncio.create_task(ask(one))
    await two.until(lambda: remote_requests(two) == 1)
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_a_store_that_fails_while_the_proxy_stops_does_not_hold_it_up(
    start_replicas: StartReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = await start_replicas(2)
    await until_linked(one, True)
    sharing = one.core.sharing
    assert sharing is not None

    async def fail_when_cancelled(_store: RedisStore, _timeout_s: float) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise StoreError("the connection broke while it was closed") from error

    monkeypatch.setattr(RedisStore, "received", fail_when_cancelled)
    links = sharing.links
    running = asyncio.create_task(sharing.run())
    await one.until(lambda: sharing.links > links)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=60)
    assert done
    assert running.cancelled()


async def test_a_proxy_starts_and_serves_without_its_store(
    start_proxy: StartProxy, store: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    store.kill()
    alone = await start_proxy(sharing={"url": store.url, "start_s": 0.2})
    assert (await ask(alone)).status_code == 200
    assert "the shared state was not read within 0.2 s" in caplog.text
    store.start()
    await until_linked(alone, True)


async def test_a_store_that_takes_nothing_is_not_linked_and_logged_once(
    start_proxy: StartProxy, store: StoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries, publish = [], RedisStore.publish

    async def tried(self: RedisStore, message: Message) -> None:
        tries.append(message)
        await publish(self, message)

    monkeypatch.setattr(RedisStore, "publish", tried)
    async with Redis.from_url(store.url) as client:
        await client.config_set("maxmemory", 1)
        replica = await start_proxy(sharing={"url": store.url, "start_s": 0.2})
        await replica.until(lambda: len(tries) >= 3)
        sharing = replica.core.sharing
        assert sharing is not None
        assert (sharing.linked, sharing.links) == (False, 0)
        (line,) = [each.getMessage() for each in caplog.records if "state is not shared" in each.getMessage()]
        assert line.endswith("connecting again: OutOfMemoryError: command not allowed when used memory > 'maxmemory'.")
        await client.config_set("maxmemory", 0)
    await until_linked(replica, True)


async def test_two_replicas_of_one_name_are_reported(start_proxy: StartProxy, store: StoreServer) -> None:
    sharing = {"url": store.url, "replica": "same", "ttl_s": 1.0}
    one = await start_proxy(sharing=sharing)
    await start_proxy(engines=one.engines, sharing=sharing)
    assert one.core.sharing is not None
    sharing_of_one = one.core.sharing
    await one.until(lambda: sharing_of_one.twin)
    await until_reported(one, lambda found: "replica's name" in found["detail"])


async def test_without_sharing_there_is_no_condition_and_the_list_of_replicas_is_empty(start_proxy: StartProxy) -> None:
    alone = await start_proxy()
    answer = (await alone.client.get("/ready?verbose")).json()
    assert "shared_state" not in {each["name"] for each in answer["conditions"]}
    assert (await alone.client.get("/replicas")).json() == {"replica": None, "linked": False, "others": []}
    assert alone.core.router.state.shared is None
