"""Data-parallel ranks: one engine process behind one URL, each rank an instance of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.settings import load_settings
from proxy.start.check import probed
from tests.integration.conftest import Cluster
from tests.integration.fleet import SimEngine, free_ports
from tests.integration.test_prediction import run_sessions
from tests.proxy.access.test_keys import ADMIN, bearer, entry
from tests.proxy.conftest import serving

pytestmark = pytest.mark.fleet

StartRanks = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def start_ranks(tmp_path: Path) -> AsyncIterator[StartRanks]:
    """``await start_ranks(engines, ranks, configured=None, events=False, **settings)``: ``engine-0/0`` and so on."""
    async with AsyncExitStack() as stack:

        async def start(
            count: int, ranks: int, *, configured: int | None = None, events: bool = False, **overrides: Any
        ) -> Cluster:
            engines, instances = [], []
            for number in range(count):
                flags = ["--engine-speed", "100", "--data-parallel-size", str(ranks)]
                instance: dict[str, Any] = {"role": "kv_both", "data_parallel_size": configured or ranks}
                if events:
                    first, again = free_ports(ranks), free_ports(ranks)
                    flags += ["--kv-events-port", str(first), "--kv-events-replay-port", str(again)]
                    instance["events_url"] = f"tcp://127.0.0.1:{first}"
                    instance["events_replay_url"] = f"tcp://127.0.0.1:{again}"
                engine = SimEngine(tmp_path / f"engine-{number}.log", tuple(flags))
                stack.callback(engine.kill)
                engine.start()
                engines.append(engine)
                urls = {"url": engine.url, "bootstrap_url": engine.bootstrap_url}
                instances.append({"name": f"engine-{number}", **urls, **instance})
            async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
                await asyncio.gather(*(engine.healthy(client) for engine in engines))
            given = {
                "port": 0,
                "instances": instances,
                "health": {"interval_s": 0.25},
                "events": {"join_interval_s": 0.1},
                "keys": {"admin": [entry("root", ADMIN)]},
                "log_level": "error",
            }
            app, url = await stack.enter_async_context(serving(load_settings(None, **{**given, **overrides})))
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, headers=bearer(ADMIN))
            )
            return Cluster(app.core, url, engines, client)

        yield start


async def rows_of(cluster: Cluster) -> dict[str, dict[str, Any]]:
    rows = (await cluster.client.get("/instances")).json()["instances"]
    return {row["name"]: row for row in rows}


async def until(cluster: Cluster, holds: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
    for _ in range(1_200):
        seen = await rows_of(cluster)
        if holds(seen):
            return seen
        await asyncio.sleep(0.05)
    raise AssertionError(f"did not come true in a minute: {seen}")


async def ask(cluster: Cluster, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "warm-sim", "prompt": prompt, "max_tokens": 3, **more}
    answer = await cluster.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    row: dict[str, Any] = (await cluster.client.get("/breakdown", params={"limit": 1})).json()["rows"][0]
    return row


async def test_each_rank_is_an_instance_and_sessions_stay_warm_on_theirs(start_ranks: StartRanks) -> None:
    cluster = await start_ranks(2, 2, policy={"name": "linear"})
    assert set(await rows_of(cluster)) == {"engine-0/0", "engine-0/1", "engine-1/0", "engine-1/1"}
    rows = await run_sessions(cluster, sessions=24, turns=6)
    assert {row["instance"] for row in rows} == {"engine-0/0", "engine-0/1", "engine-1/0", "engine-1/1"}
    # Without the header, the engine would choose the rank, and every other prediction would be wrong.
    right = sum(row["predicted_cached_tokens"] == row["actual_cached_tokens"] for row in rows)
    assert right / len(rows) >= 0.99
    assert sum(row["actual_cached_tokens"] for row in rows) > 0


async def test_a_client_cannot_choose_another_rank(start_ranks: StartRanks) -> None:
    cluster = await start_ranks(1, 2, policy={"name": "session_sticky"})
    prompt = list(range(1_000))
    first = await ask(cluster, prompt)
    headers = {"x-data-parallel-rank": "0" if first["instance"] == "engine-0/1" else "1", "x-session-id": "s"}
    body = {"model": "warm-sim", "prompt": prompt, "max_tokens": 3}
    for _ in range(3):
        answer = await cluster.client.post("/v1/completions", json=body, headers=headers)
        row = (await cluster.client.get("/breakdown", params={"limit": 1})).json()["rows"][0]
        assert row["predicted_cached_tokens"] == row["actual_cached_tokens"], answer.headers


async def test_metrics_and_pools_are_those_of_the_rank(start_ranks: StartRanks) -> None:
    cluster = await start_ranks(1, 2, policy={"name": "round_robin"})
    (await cluster.client.post("/instances/engine-0/0/drain")).raise_for_status()
    for number in range(4):
        row = await ask(cluster, [number] * 640)
        assert row["instance"] == "engine-0/1"
    state = (await cluster.client.get(f"{cluster.engines[0].url}/sim/state")).json()["ranks"]
    assert [each["finished"].get("length", 0) for each in state] == [0, 4]

    def seen(rows: dict[str, dict[str, Any]]) -> bool:
        return rows["engine-0/1"]["engine"]["kv_usage"] >= 0 and rows["engine-0/1"]["index_blocks"] > 0

    rows = await until(cluster, seen)
    capacities = {row["engine"]["kv_capacity_tokens"] for row in rows.values()}
    assert len(capacities) == 1
    meters = {}
    for _ in range(1_200):
        meters = (await cluster.client.get("/meters")).json()["instances"]
        if meters["engine-0/1"]["engine_counters"]["prefix_query_tokens"] == 4 * 640:
            break
        await asyncio.sleep(0.05)
    assert meters["engine-0/0"]["engine_counters"]["prefix_query_tokens"] == 0
    # The engine reports the sum of its ranks' pools.
    text = (await cluster.client.get(f"{cluster.engines[0].url}/metrics")).text
    blocks = int(text.split('num_gpu_blocks="')[1].split('"')[0])
    size = int(text.split('block_size="')[1].split('"')[0])
    assert 2 * capacities.pop() == blocks * size


async def test_kv_events_are_followed_by_rank(start_ranks: StartRanks) -> None:
    cluster = await start_ranks(1, 2, events=True, policy={"name": "round_robin"})
    await until(cluster, lambda rows: all(row["kv_events"]["trusted"] for row in rows.values()))
    prompts = [[number] * 640 for number in range(4)]
    for prompt in prompts:
        await ask(cluster, prompt)
    rows = await until(cluster, lambda rows: all(row["kv_events"]["blocks"] >= 20 for row in rows.values()))
    assert [row["kv_events"]["gaps"] for row in rows.values()] == [0, 0]
    (await cluster.client.put("/policy", json={"name": "linear"})).raise_for_status()
    used = [await ask(cluster, [*prompt, 7]) for prompt in prompts]
    assert {row["instance"] for row in used} == {"engine-0/0", "engine-0/1"}
    assert all(row["index_source"] == "exact" for row in used)
    assert all(row["predicted_by_exact_tokens"] == row["actual_cached_tokens"] == 640 for row in used)


async def test_draining_an_engine_drains_all_its_ranks(start_ranks: StartRanks) -> None:
    cluster = await start_ranks(2, 2, policy={"name": "round_robin"})
    drained = (await cluster.client.post("/instances/engine-0/drain")).json()
    assert [(row["name"], row["draining"]) for row in drained["ranks"]] == [("engine-0/0", True), ("engine-0/1", True)]
    used = {(await ask(cluster, [number] * 64))["instance"] for number in range(6)}
    assert used == {"engine-1/0", "engine-1/1"}
    (await cluster.client.post("/instances/engine-0/undrain")).raise_for_status()
    used = {(await ask(cluster, [number] * 64))["instance"] for number in range(8)}
    assert used == {"engine-0/0", "engine-0/1", "engine-1/0", "engine-1/1"}


async def test_an_engine_is_added_and_removed_with_its_ranks(start_ranks: StartRanks) -> None:
    cluster = await start_ranks(2, 2)
    removed = (await cluster.client.delete("/instances/engine-1")).json()
    assert removed == {"name": "engine-1", "removed": True, "cut_requests": 0}
    assert set(await rows_of(cluster)) == {"engine-0/0", "engine-0/1"}
    engine = {"name": "engine-1", "url": cluster.engines[1].url, "data_parallel_size": 2}
    added = await cluster.client.post("/instances", json=engine)
    assert added.status_code == 201
    assert [(row["name"], row["healthy"]) for row in added.json()["ranks"]] == [
        ("engine-1/0", True),
        ("engine-1/1", True),
    ]
    for other in ({**engine, "name": "another"}, {**engine, "url": "http://127.0.0.1:9"}):
        assert (await cluster.client.post("/instances", json=other)).status_code == 409
    refused = await cluster.client.put("/instances/engine-1", json={"url": cluster.engines[1].url})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "instance_has_ranks")


async def test_a_dead_engine_takes_all_its_ranks(start_ranks: StartRanks) -> None:
    cluster = await start_ranks(2, 2, policy={"name": "round_robin"}, health={"interval_s": 600})
    cluster.engines[0].kill()
    rows = [await ask(cluster, [number] * 64) for number in range(8)]
    assert all(row["instance"].startswith("engine-1/") for row in rows)
    seen = await rows_of(cluster)
    assert [name for name, row in seen.items() if row["healthy"]] == ["engine-1/0", "engine-1/1"]


async def test_a_restart_empties_the_index_of_all_ranks(start_ranks: StartRanks) -> None:
    cluster = await start_ranks(1, 2, policy={"name": "round_robin"})
    for number in range(4):
        await ask(cluster, [number] * 640)
    before = await until(cluster, lambda rows: all(row["engine_id"] for row in rows.values()))
    assert len({row["engine_id"] for row in before.values()}) == 2
    engine = cluster.engines[0]
    engine.kill()
    engine.start()
    async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
        await engine.healthy(client)
    rows = await until(cluster, lambda rows: all(row["restarts"] == 1 and row["healthy"] for row in rows.values()))
    assert [row["index_blocks"] for row in rows.values()] == [0, 0]


async def test_hand_offs_name_the_rank_on_both_sides(start_ranks: StartRanks) -> None:
    cluster = await start_ranks(
        1,
        2,
        events=True,
        classes={"medium_tokens": 500, "heavy_tokens": 1_500},
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
    )
    prompt = list(range(10_000, 14_000))
    row = await ask(cluster, prompt)
    # P and D are two ranks of one engine: they differ in the engine id and the header only.
    assert row["offload_reason"] == "chosen"
    assert {row["instance"], row["prefill_instance"]} == {"engine-0/0", "engine-0/1"}
    state = (await cluster.client.get(f"{cluster.engines[0].url}/sim/state")).json()["ranks"]
    assert [sum(each["finished"].values()) for each in state] == [1, 1]
    rows = await until(cluster, lambda rows: all(row["kv_events"]["blocks"] >= 62 for row in rows.values()))
    assert all(each["requests"] == 0 for each in rows.values())
    again = await ask(cluster, [*prompt, *range(64)])
    assert again["predicted_by_exact_tokens"] == again["actual_cached_tokens"] == 3_968


@pytest.mark.parametrize(("ranks", "configured", "well"), [(2, 3, 2), (3, 2, 2)])
async def test_another_number_of_ranks_is_reported(
    start_ranks: StartRanks, ranks: int, configured: int, well: int
) -> None:
    cluster = await start_ranks(
        1, ranks, configured=configured, policy={"name": "round_robin"}, meters={"raise_s": 0, "clear_s": 0}
    )
    for _ in range(6):
        await ask(cluster, list(range(64)))  # never sent to a rank that does not exist
    rows = await rows_of(cluster)
    assert [row["healthy"] for row in rows.values()] == [number < well for number in range(configured)]
    if configured > ranks:
        assert "no rank 2" in rows["engine-0/2"]["last_error"]
    found = {}
    for _ in range(1_200):
        listed = (await cluster.client.get("/ready?verbose")).json()["conditions"]
        found = {each["name"]: each for each in listed}
        if not found["data_parallel"]["ok"]:
            break
        await asyncio.sleep(0.05)
    assert f"data_parallel_size is {configured}, the engine has {ranks}" in found["data_parallel"]["detail"]
    assert "--data-parallel-size" in found["data_parallel"]["remedy"]
    checks = await probed(cluster.core.settings)
    assert all(f"the engine has {ranks} data-parallel rank" in " ".join(each.remedies) for each in checks)
