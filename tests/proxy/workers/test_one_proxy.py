"""Several workers look like one proxy: requests, sessions, metrics, rows and changes."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.proxy.serve_process import until
from tests.proxy.typed_engine import TypedEngine
from tests.proxy.workers.conftest import AUTHORIZED, StartWorkers, Workers

pytestmark = [pytest.mark.fleet, pytest.mark.first]

CONNECTIONS = 8
"""The kernel spreads them over two workers."""


@pytest.mark.asyncio(loop_scope="module")
async def test_connections_reach_all_workers_and_metrics_count_every_request(two_workers: Workers) -> None:
    workers = two_workers

    async def counts() -> list[float]:
        """Finished requests, as three places count them."""
        return [
            await workers.metric("warmroute_requests_total", outcome="ok"),
            await workers.metric("warmroute_request_seconds_count"),
            (await workers.get("/stats"))["requests"]["finished"],
        ]

    started, counted = [row["started"] for row in await workers.stats()], await counts()
    await workers.completed(40)
    new = [row["started"] - before for row, before in zip(await workers.stats(), started, strict=True)]
    assert sum(new) == 40
    assert all(new), "the kernel spreads connections over the workers"
    assert [now - before for now, before in zip(await counts(), counted, strict=True)] == [40] * 3
    assert await workers.metric("warmroute_instance_healthy", instance="inst-0") == 1


async def test_a_session_stays_on_its_engine_whichever_worker_it_reaches(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, policy={"name": "session_sticky"})
    body = {"model": "stub", "prompt": list(range(400)), "max_tokens": 2}
    for session in range(3):
        headers = {"x-session-id": f"session-{session}"}

        async def known(headers: dict[str, str] = headers) -> bool:
            """True if the workers of these connections, all with near certainty, have an engine for the session."""
            for _ in range(CONNECTIONS):
                async with workers.new_client() as client:
                    shown = (await client.post("/explain", json=body, headers=headers)).json()
                if shown["request"]["pinned_instance"] is None:
                    return False
            return True

        placed = []
        for _ in range(8):
            async with workers.new_client() as client:
                answer = await client.post("/v1/completions", json=body, headers=headers)
                placed.append(answer.headers["x-warmroute-instance"])
            if len(placed) == 1:
                await until(known)
        assert len(set(placed)) == 1, placed
    assert all(row["started"] for row in await workers.stats())


@pytest.mark.asyncio(loop_scope="module")
async def test_an_instance_drained_through_one_worker_is_drained_with_all(two_workers: Workers) -> None:
    workers = two_workers
    answer = await workers.served.client.post("/instances/inst-0/drain", headers=AUTHORIZED)
    assert answer.json()["draining"] is True
    assert set(await workers.completed(20)) == {"inst-1"}
    await workers.served.client.post("/instances/inst-0/undrain", headers=AUTHORIZED)
    assert (await workers.get("/instances/inst-0"))["draining"] is False
    assert set(await workers.completed(30)) == {"inst-0", "inst-1"}


async def test_an_instance_added_again_under_a_drained_name_is_drained_with_no_worker(
    start_workers: StartWorkers,
) -> None:
    workers = await start_workers(2, engines=2)
    client = workers.served.client
    url = (await workers.get("/instances/inst-1"))["url"]
    for drained in (False, True):
        assert (await client.post("/instances/inst-1/drain", headers=AUTHORIZED)).json()["draining"] is True
        assert (await client.delete("/instances/inst-1?grace_s=0", headers=AUTHORIZED)).status_code == 200
        body = {"name": "inst-1", "url": url}
        added = await client.post("/instances", headers=AUTHORIZED, json=body)
        assert (added.status_code, added.json()["draining"]) == (201, False)
        if drained:
            assert (await client.post("/instances/inst-1/drain", headers=AUTHORIZED)).json()["draining"] is True
        await workers.kill((await workers.stats())[0]["pid"])
        restarts = 2 if drained else 1

        async def again(restarts: int = restarts) -> bool:
            return await workers.ready() and (await workers.stats())[0]["restarts"] == restarts

        await until(again)
        assert set(await workers.completed(20)) == ({"inst-0"} if drained else {"inst-0", "inst-1"})
        assert (await workers.get("/instances/inst-1"))["draining"] is drained


async def test_switches_and_added_instances_reach_all_workers(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, engines=2)
    client = workers.served.client
    switched = await client.put("/policy", headers=AUTHORIZED, json={"name": "round_robin"})
    assert switched.json()["name"] == "round_robin"
    held = await client.put("/admission", headers=AUTHORIZED, json={"max_hold_s": 7})
    assert held.json()["max_hold_s"] == 7
    assert (await client.put("/policy", headers=AUTHORIZED, json={"name": "unknown"})).status_code == 400
    assert (await client.delete("/instances/inst-1", headers=AUTHORIZED)).json()["removed"] is True
    for _ in range(10):
        async with workers.new_client() as each:
            assert (await each.get("/policy")).json()["name"] == "round_robin"
            assert (await each.get("/admission")).json()["max_hold_s"] == 7
            assert [row["name"] for row in (await each.get("/instances")).json()["instances"]] == ["inst-0"]


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_all_workers_are_paged_in_one_order(two_workers: Workers) -> None:
    workers = two_workers
    before = [row["row"] for row in (await workers.get("/breakdown?limit=1000"))["rows"]]
    await workers.completed(25)
    shown = [row["row"] for row in (await workers.get("/breakdown?limit=1000"))["rows"]]
    numbers = shown[-25:]
    assert shown[:-25] == before
    assert len(numbers) == 25
    assert numbers == sorted(numbers)
    assert len({number % 64 for number in numbers}) == 2

    newest = await workers.get("/breakdown?limit=10")
    older = await workers.get(f"/breakdown?limit=1000&before={newest['next']['before']}")
    assert [row["row"] for row in older["rows"] + newest["rows"]] == shown

    first = await workers.get(f"/breakdown?limit=10&after={numbers[4]}")
    assert [row["row"] for row in first["rows"]] == numbers[5:15]
    rest = await workers.get(f"/breakdown?limit=100&after={first['next']['after']}")
    assert [row["row"] for row in rest["rows"]] == numbers[15:]
    assert (await workers.get(f"/breakdown?after={rest['next']['after']}"))["rows"] == []


@pytest.mark.asyncio(loop_scope="module")
async def test_unknown_query_parameters_and_head_are_answered_by_all_workers_as_by_one(two_workers: Workers) -> None:
    client = two_workers.served.client
    for method, target in (
        ("GET", "/stats?bogus=1"),
        ("GET", "/breakdown?bogus=1"),
        ("GET", "/breakdown?follow=true&bogus=1"),
        ("GET", "/policy?bogus=1"),
        ("PUT", "/policy?bogus=1"),
        ("POST", "/reload?bogus=1"),
        ("DELETE", "/instances/inst-1?bogus=1"),
    ):
        answer = await client.request(method, target, json={}, headers=AUTHORIZED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_parameter"), target
    assert (await client.get("/metrics?bogus=1", headers=AUTHORIZED)).status_code == 200
    assert (await client.get("/ready?bogus=1")).status_code == 200
    of_all = await client.head("/ready")
    assert (of_all.status_code, of_all.content) == (200, b"")
    assert "x-warmroute-worker" not in of_all.headers
    assert len((await two_workers.get("/instances"))["instances"]) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_all_workers_are_followed_in_one_stream(two_workers: Workers) -> None:
    workers = two_workers
    before = (await workers.get("/breakdown?limit=1"))["next"]["after"]
    seen: list[int] = []
    async with (
        workers.new_client() as client,
        client.stream("GET", f"/breakdown?follow=true&after={before}") as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        reading = asyncio.create_task(workers.completed(20))
        async for line in stream.aiter_lines():
            if line.startswith("data:"):
                seen.append(json.loads(line[5:])["row"])
            if len(seen) == 20:
                break
        await reading
    assert len({number % 64 for number in seen}) == 2
    assert sorted(seen) == [row["row"] for row in (await workers.get(f"/breakdown?after={before}"))["rows"]]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_load_of_all_workers_is_shown_while_it_is_there_and_gone_after(two_workers: Workers) -> None:
    workers = two_workers
    usual = [(engine.tokens, engine.token_delay_s) for engine in workers.engines]
    for engine in workers.engines:
        engine.tokens, engine.token_delay_s = 200, 0.05
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(workers.completed(1, stream=True)) for _ in range(12)]

        async def loaded() -> bool:
            rows = (await workers.get("/instances"))["instances"]
            return sum(row["requests"] for row in rows) == 12 and (await workers.get("/load"))["server_load"] == 12

        await until(loaded)
        assert await workers.metric("warmroute_in_flight") == 12
        assert await workers.metric("warmroute_instance_requests") == 12
        for task in tasks:
            task.cancel()
    for engine, (tokens, delay_s) in zip(workers.engines, usual, strict=True):
        engine.tokens, engine.token_delay_s = tokens, delay_s

    async def idle() -> bool:
        return not any((await workers.get("/stats"))["ledger"].values())

    await until(idle)


async def test_a_stored_response_is_continued_on_its_engine_by_every_worker(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, engines=[TypedEngine() for _ in range(3)], policy={"name": "round_robin"})
    body = {"model": "stub", "input": "hello " * 300, "max_output_tokens": 8}
    created = await workers.served.client.post("/v1/responses", json=body)
    instance = created.headers["x-warmroute-instance"]

    async def known() -> bool:
        """True if the workers of these connections, all with near certainty, find the response."""
        for _ in range(CONNECTIONS):
            async with workers.new_client() as client:
                if (await client.get(f"/v1/responses/{created.json()['id']}")).status_code != 200:
                    return False
        return True

    await until(known)
    for _ in range(24):
        async with workers.new_client() as client:
            answer = await client.post("/v1/responses", json={**body, "previous_response_id": created.json()["id"]})
            assert (answer.status_code, answer.headers["x-warmroute-instance"]) == (200, instance)
    assert all(row["started"] for row in await workers.stats())
