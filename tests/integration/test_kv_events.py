"""The exact index compared with engines' reports over real ZMQ streams: correct where the shadow index is wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from proxy.settings import load_settings
from tests.integration.conftest import Cluster, StartListening
from tests.integration.published import nothing_from
from tests.integration.test_prediction import run_sessions
from tests.proxy.conftest import serving


async def send(cluster: Cluster, prompt: list[int], **more: Any) -> dict[str, Any]:
    answer = await cluster.client.post(
        "/v1/completions", json={"model": "warm-sim", "prompt": prompt, "max_tokens": 3, **more}
    )
    assert answer.status_code == 200, answer.text
    rows = (await cluster.client.get("/breakdown", params={"limit": 1})).json()["rows"]
    return rows[0]


async def events_of(cluster: Cluster, number: int = 0) -> dict[str, Any]:
    return (await cluster.client.get("/instances")).json()["instances"][number]["kv_events"]


async def until(cluster: Cluster, holds: Callable[[dict[str, Any]], bool], number: int = 0) -> dict[str, Any]:
    for _ in range(1500):
        seen = await events_of(cluster, number)
        if holds(seen):
            return seen
        await asyncio.sleep(0.02)
    raise AssertionError(f"did not come true in 30 s: {seen}")


async def until_known(cluster: Cluster) -> None:
    """Wait until the proxy has all events of all engines: only then it knows what they have evicted."""
    for number, instance in enumerate(cluster.core.settings.instances):
        assert instance.events_replay_url is not None
        for _ in range(1500):
            expected = (await events_of(cluster, number))["next_sequence"]
            if expected >= 0 and await nothing_from(instance.events_replay_url, expected):
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError(f"events from {expected} on are not known in 30 s")


@pytest.mark.fleet
async def test_the_exact_index_is_right_under_eviction_where_the_shadow_errs(start_listening: StartListening) -> None:
    # 6,400 tokens per engine are far less than 24 growing sessions need.
    cluster = await start_listening(
        2, "--engine-speed", "100", "--kv-capacity-tokens", "6400", policy={"name": "round_robin"}
    )
    await send(cluster, list(range(64)))
    await send(cluster, list(range(64)))
    before = [await until(cluster, lambda seen: seen["trusted"], number) for number in range(2)]
    system = list(range(700))
    draw = random.Random(5)
    for _ in range(96):
        # Generated tokens fill the engines' caches too, which the shadow index does not see.
        session, turn = draw.randrange(8), draw.randrange(1, 4)
        prompt = [*system, *[(session + 1) * 100_000 + token for token in range(turn * 300)]]
        await send(cluster, prompt, max_tokens=draw.randrange(1, 400))
        await until_known(cluster)
    errors = (await cluster.client.get("/stats")).json()["prediction_error"]["side_by_side"]
    assert errors["exact"]["requests"] == errors["shadow"]["requests"] >= 96
    assert errors["exact"]["actual_cached_tokens"] > 0
    assert errors["exact"]["absolute_error_tokens"] == 0, errors
    assert errors["shadow"]["absolute_error_tokens"] > 0, errors
    seen = [await events_of(cluster, number) for number in range(2)]
    assert all(each["removed"] > 50 for each in seen)
    assert all(each["unknown_parent"] == each["unknown_removed"] == 0 for each in seen)
    assert [each["gaps"] for each in seen] == [each["gaps"] for each in before]


@pytest.mark.fleet
async def test_siblings_at_the_same_moment_are_predicted_too(start_listening: StartListening) -> None:
    cluster = await start_listening(3, "--engine-speed", "100", policy={"name": "linear"})
    await asyncio.gather(*(send(cluster, [number] * 64) for number in range(6)))
    for number in range(3):
        await until(cluster, lambda seen: seen["trusted"], number)
    rows = await run_sessions(cluster, sessions=24, turns=6)
    used = [row for row in rows if row["index_source"] == "exact"]
    assert len(used) > 100
    right = sum(row["predicted_by_exact_tokens"] == row["actual_cached_tokens"] for row in used)
    assert right / len(used) >= 0.99
    stats = (await cluster.client.get("/stats")).json()
    assert stats["ledger"]["requests"] == 0


@pytest.mark.fleet
async def test_a_proxy_that_comes_late_learns_by_replay_and_only_then(start_listening: StartListening) -> None:
    first = await start_listening(1, "--engine-speed", "100")
    prompt = list(range(1_000))
    await send(first, prompt)
    instance = first.core.settings.instances[0]
    replay_url = f"tcp://127.0.0.1:{first.engines[0].flags[-1]}"
    for knows, url in ((True, replay_url), (False, None)):
        late = instance.model_copy(update={"events_replay_url": url}).model_dump()
        settings = load_settings(
            None, port=0, instances=[late], events={"join_interval_s": 0.1}, health={"interval_s": 0.25}
        )
        async with (
            serving(settings) as (app, url_of_late),
            httpx.AsyncClient(base_url=url_of_late, timeout=60, trust_env=False) as client,
        ):
            cluster = Cluster(app.core, url_of_late, first.engines, client)
            if knows:
                await until(cluster, lambda seen: seen["trusted"])
                row = await send(cluster, [*prompt, *range(5_000, 5_100)])
                assert row["index_source"] == "exact"
                assert row["predicted_by_exact_tokens"] == row["actual_cached_tokens"] == 960
                assert row["predicted_by_shadow_tokens"] == 0
                continue
            for number in range(200):  # the first few may pass before the subscription is active
                row = await send(cluster, [number] * 200)
                assert (row["index_source"], row["predicted_by_exact_tokens"]) == ("shadow", None)
                if (await events_of(cluster))["not_trusted_because"] == "joined_late":
                    break
            seen = await events_of(cluster)
            assert (seen["not_trusted_because"], seen["trusted"], seen["blocks"]) == ("joined_late", False, 0)


@pytest.mark.fleet
async def test_an_engine_that_restarts_is_followed(start_listening: StartListening) -> None:
    cluster = await start_listening(1, "--engine-speed", "100")
    prompt = list(range(1_000))
    for expected in (0, 960):
        row = await send(cluster, prompt)
        assert row["actual_cached_tokens"] == expected
    await until(cluster, lambda seen: seen["trusted"] and seen["blocks"] >= 15)
    engine = cluster.engines[0]
    engine.kill()
    engine.start()
    async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
        await engine.healthy(client)
    for _ in range(200):
        row_of = (await cluster.client.get("/instances")).json()["instances"][0]
        if row_of["restarts"] == 1 and row_of["healthy"]:
            break
        await asyncio.sleep(0.05)
    assert row_of["kv_events"]["blocks"] == 0
    for expected in (0, 960):
        row = await send(cluster, prompt)
        assert row["predicted_cached_tokens"] == row["actual_cached_tokens"] == expected
    await until(cluster, lambda seen: seen["trusted"] and seen["blocks"] >= 15)
    row = await send(cluster, prompt)
    assert (row["index_source"], row["predicted_by_exact_tokens"], row["actual_cached_tokens"]) == ("exact", 960, 960)


async def test_a_cleared_cache_is_known_with_the_next_step(start_listening: StartListening) -> None:
    cluster = await start_listening(1, "--engine-speed", "100")
    prompt = list(range(1_000))
    await send(cluster, prompt)
    await until(cluster, lambda seen: seen["trusted"])
    assert (await cluster.client.post(f"{cluster.engines[0].url}/reset_prefix_cache")).status_code == 200
    await send(cluster, list(range(9_000, 9_200)))
    seen = await until(cluster, lambda seen: seen["cleared"] == 1)
    assert seen["blocks"] <= 4
    await asyncio.sleep(1.1)  # until the finished request's prompt is no longer matched
    row = await send(cluster, prompt)
    assert (row["predicted_by_exact_tokens"], row["actual_cached_tokens"]) == (0, 0)
    assert row["predicted_by_shadow_tokens"] == 960


async def test_both_ends_of_a_hand_off_are_known(start_listening: StartListening) -> None:
    cluster = await start_listening(
        2,
        "--engine-speed",
        "100",
        classes={"medium_tokens": 500, "heavy_tokens": 1_500},
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
    )
    await asyncio.gather(*(send(cluster, [number] * 64) for number in range(4)))
    prompt = list(range(10_000, 14_000))
    row = await send(cluster, prompt)
    assert row["prefill_instance"] is not None
    assert row["offload_reason"] == "chosen"
    names = {"inst-0": 0, "inst-1": 1}
    for name in (row["instance"], row["prefill_instance"]):
        await until(cluster, lambda seen: seen["trusted"] and seen["blocks"] >= 62, names[name])
    again = await send(cluster, [*prompt, *range(64)])
    assert again["predicted_by_exact_tokens"] == again["actual_cached_tokens"] == 3_968


@pytest.mark.fleet
async def test_promises_do_not_pile_up(start_listening: StartListening) -> None:
    cluster = await start_listening(2, "--engine-speed", "100")
    await run_sessions(cluster, sessions=10, turns=3)
    for number in range(3):
        await send(cluster, [number] * 100)
        await asyncio.sleep(1.1)
    promises = cluster.core.router.state.predictor.promises
    assert len(promises) <= 2
