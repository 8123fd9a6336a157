"""Faults of engines, events and headers in a running fleet, and the conditions that report them within 10 s."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import httpx
import pytest

from proxy.settings import load_settings
from tests.integration.conftest import Cluster, StartCluster, StartListening
from tests.integration.hop import Hop
from tests.integration.test_kv_events import send, until
from tests.proxy.conftest import serving

pytestmark = pytest.mark.fleet

METERS = {
    "window_s": 20,
    "interval_s": 0.1,
    "raise_s": 0.3,
    "clear_s": 0.5,
    "min_requests": 5,
    "events_silent_s": 1.0,
}
WITHIN_S = 10.0
_fresh = count(1)


def fresh_prompt() -> list[int]:
    """Five blocks that no engine has."""
    start = next(_fresh) * 1_000
    return list(range(start, start + 320))


async def condition(cluster: Cluster, name: str) -> dict[str, Any]:
    conditions = (await cluster.client.get("/ready?verbose")).json()["conditions"]
    (found,) = (each for each in conditions if each["name"] == name)
    return found


async def metric(cluster: Cluster, name: str) -> float:
    line = f'warmroute_condition{{condition="{name}"}} '
    text = (await cluster.client.get("/metrics")).text
    (found,) = (each for each in text.splitlines() if each.startswith(line))
    return float(found.removeprefix(line))


async def becomes(
    cluster: Cluster, name: str, ok: bool, traffic: Callable[[], Awaitable[object]] | None = None
) -> dict[str, Any]:
    """The condition once it has this state, with ``traffic`` until then; the wait allows for a loaded machine."""
    ends_s = time.monotonic() + 3 * WITHIN_S
    while time.monotonic() < ends_s:
        if traffic is not None:
            await traffic()
        found = await condition(cluster, name)
        if found["ok"] is ok:
            assert await metric(cluster, name) == float(ok)
            assert (found["remedy"] is None) is ok
            return found
    raise AssertionError(f"{found} did not become {'ok' if ok else 'not ok'}")


async def test_an_engine_whose_events_stop_is_named_until_they_come_again(start_listening: StartListening) -> None:
    cluster = await start_listening(2, "--engine-speed", "100", policy={"name": "round_robin"}, meters=METERS)

    async def traffic() -> None:
        await send(cluster, fresh_prompt())

    for number in range(2):
        await until(cluster, lambda seen: seen["trusted"], number)
    await traffic()
    await traffic()
    assert (await condition(cluster, "kv_events"))["ok"]
    mute = await cluster.client.post(f"{cluster.engines[1].url}/sim/faults", json={"mode": "no_kv_events"})
    assert mute.status_code == 200
    began_unix_s = time.time()
    found = await becomes(cluster, "kv_events", False, traffic)
    assert found["since_unix_s"] - began_unix_s <= WITHIN_S
    assert found["detail"].startswith("inst-1: no events for ")
    assert "inst-0" not in found["detail"]
    meters = (await cluster.client.get("/meters")).json()["instances"]
    assert (meters["inst-0"]["drift"], meters["inst-1"]["drift"]) == ([], ["kv_events"])
    await cluster.client.post(f"{cluster.engines[1].url}/sim/faults", json={"mode": "none"})
    await becomes(cluster, "kv_events", True, traffic)


async def restart(cluster: Cluster, number: int, *flags: str) -> None:
    engine = cluster.engines[number]
    engine.kill()
    engine.flags = (*engine.flags, *flags)
    engine.start()
    async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
        await engine.healthy(client)


async def test_a_killed_engine_and_one_that_comes_back_with_another_hash_seed(start_listening: StartListening) -> None:
    cluster = await start_listening(2, "--engine-speed", "100", policy={"name": "round_robin"}, meters=METERS)

    async def traffic() -> None:
        prompt = fresh_prompt()
        for _ in range(2):  # on both engines
            await send(cluster, prompt)

    for number in range(2):
        await until(cluster, lambda seen: seen["trusted"], number)
    await traffic()
    hashes = cluster.core.router.state.predictor.exact.engine_hashes
    for _ in range(100):
        if hashes.agreed:
            break
        await traffic()
    assert (await condition(cluster, "hash_seed"))["ok"]
    assert (await condition(cluster, "instances"))["ok"]
    cluster.engines[1].kill()
    began_unix_s = time.time()
    found = await becomes(cluster, "instances", False)
    assert found["since_unix_s"] - began_unix_s <= WITHIN_S
    await restart(cluster, 1, "--hash-seed", "7")
    began_unix_s = time.time()
    await becomes(cluster, "instances", True)
    found = await becomes(cluster, "hash_seed", False, traffic)
    assert found["since_unix_s"] - began_unix_s <= WITHIN_S
    assert found["detail"] == "inst-1: its block hashes differ from those of 1 other(s)"
    await restart(cluster, 1, "--hash-seed", "0")
    await becomes(cluster, "instances", True)
    await becomes(cluster, "hash_seed", True, traffic)


async def test_headers_stripped_before_an_engine_are_noticed_in_its_answers(start_cluster: StartCluster) -> None:
    direct = await start_cluster(1, "--engine-speed", "100", "--role", "none")
    hop = Hop(direct.engines[0].url)
    async with hop.serving() as hop_url:
        instances = [{"name": "inst-0", "url": hop_url}]
        settings = load_settings(None, port=0, instances=instances, meters=METERS, health={"interval_s": 0.25})
        async with (
            serving(settings) as (app, url),
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
        ):
            cluster = Cluster(app.core, url, direct.engines, client)

            async def traffic() -> None:
                await send(cluster, fresh_prompt())

            for _ in range(6):
                await traffic()
            assert (await condition(cluster, "engine_headers"))["ok"]
            hop.strips = True
            began_unix_s = time.time()
            found = await becomes(cluster, "engine_headers", False, traffic)
            assert found["since_unix_s"] - began_unix_s <= WITHIN_S
            hop.strips = False
            await becomes(cluster, "engine_headers", True, traffic)


async def test_hit_rates_add_up_and_lost_hits_have_their_cause(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(2, "--engine-speed", "100", policy={"name": "round_robin"}, meters=METERS)
    prompts = [fresh_prompt() for _ in range(3)]
    for prompt in prompts:
        await send(cluster, prompt)
    for _ in range(2):  # of three prompts on two engines, every other one meets the engine that lacks it
        for prompt in prompts:
            await send(cluster, prompt)
    fleet = (await cluster.client.get("/meters")).json()["fleet"]
    assert (fleet["window_requests"], fleet["prompt_tokens"]) == (9, 9 * 320)
    assert fleet["ceiling"] == fleet["reachable"] == round(6 * 256 / (9 * 320), 6)
    assert fleet["achieved"] < fleet["reachable"]
    loss = fleet["loss"]
    assert (loss["eviction"], loss["prediction"]) == (0, 0)
    assert abs(fleet["ceiling"] - fleet["achieved"] - loss["routing"]) < 1e-5
    await cluster.client.post(f"{cluster.engines[0].url}/reset_prefix_cache")
    await cluster.client.post(f"{cluster.engines[1].url}/reset_prefix_cache")
    for prompt in prompts:
        await send(cluster, prompt)
    fleet = (await cluster.client.get("/meters")).json()["fleet"]
    assert fleet["loss"]["prediction"] > 0
    rows = (await cluster.client.get("/meters")).json()["instances"].values()
    assert any(row["prediction_error"] > 0 for row in rows)
    text = (await cluster.client.get("/metrics")).text
    assert 'warmroute_hit_ratio{kind="ceiling"}' in text
    assert 'warmroute_hit_loss_tokens_total{cause="routing"}' in text
    assert 'warmroute_engine_prefix_query_tokens_total{instance="inst-0"}' in text
