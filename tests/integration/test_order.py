"""Order of requests that wait: between tenants in the proxy, by priority in a simulated engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Cluster, StartCluster
from tests.proxy.access.test_keys import ADMIN, KEY, OTHER, bearer, entry

pytestmark = pytest.mark.fleet

KEYS = {"client": [entry("hog", KEY), entry("polite", OTHER)], "admin": [entry("root", ADMIN)]}
FLOOD, IN_FLIGHT = 80, 2
SLOW = {"name": "warm", "params": {"slowdown": 1_000.0}}
"""A long prompt is due minutes later, however long the test takes to send the short one."""


async def started(client: httpx.AsyncClient, body: dict[str, Any], on_first: Callable[[], object]) -> None:
    """Stream a completion to its end; ``on_first`` is called at its first token."""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = answer.aiter_lines()
        await anext(lines)
        on_first()
        async for _ in lines:
            pass


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(2_400):
        if await holds():
            return
        await asyncio.sleep(0.025)
    raise AssertionError("did not come true in a minute")


async def order_of(cluster: Cluster, requests: dict[str, list[int]]) -> list[str]:
    """Names of ``requests`` by their first tokens: sent one after the other while the engine's only place is taken."""
    (engine,) = cluster.engines

    async def waiting(count: int) -> bool:
        metrics = (await cluster.client.get(f"{engine.url}/metrics")).text
        line = next(line for line in metrics.splitlines() if line.startswith("vllm:num_requests_waiting{"))
        return float(line.rpartition(" ")[2]) == count

    begun = asyncio.Event()
    blocker = {"model": "warm-sim", "prompt": [7] * 64, "max_tokens": 100_000, "ignore_eos": True}
    first: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        blocking = tasks.create_task(started(cluster.client, blocker, begun.set))
        await begun.wait()
        for number, (name, prompt) in enumerate(requests.items(), 1):
            body = {"model": "warm-sim", "prompt": prompt, "max_tokens": 3}
            tasks.create_task(started(cluster.client, body, lambda name=name: first.append(name)))  # type: ignore[misc]
            await until(lambda number=number: waiting(number))  # type: ignore[misc]
        assert not first
        # The last one counts as waiting while it is in the engine's front end, which takes 30 ms of the engine's time.
        await asyncio.sleep(0.25)
        blocking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await blocking
    return first


@pytest.mark.parametrize(("engine", "marked"), [("priority", True), ("fcfs", False), ("fcfs", True)])
async def test_a_short_prompt_that_arrives_last_is_answered_first(
    start_cluster: StartCluster, engine: str, marked: bool
) -> None:
    flags = ("--max-num-seqs", "1", "--scheduling-policy", engine)
    meters = {"interval_s": 0.05, "raise_s": 0.1, "min_requests": 2}
    cluster = await start_cluster(1, *flags, every={"priority_scheduling": marked}, policy=SLOW, meters=meters)
    requests = {f"long-{number}": [number] * 10_000 for number in range(3)} | {"short": [9] * 100}
    arrived, ordered = list(requests), engine == "priority"
    assert await order_of(cluster, requests) == (["short", *arrived[:-1]] if ordered else arrived)
    pairs = cluster.core.router.state.ledger.account("inst-0").pairs
    # The first long prompt might have been computed before the short one came.
    assert (pairs.kept, pairs.broken) == ((3, 0) if ordered else (0, 2 if marked else 0))

    async def condition() -> bool:
        listed = (await cluster.client.get("/ready?verbose")).json()["conditions"]
        [found] = [each for each in listed if each["name"] == "priority_scheduling"]
        return found["ok"] is (ordered or not marked)

    await until(condition)


async def test_a_flood_of_long_prompts_delays_a_polite_tenant_by_its_share_only(start_cluster: StartCluster) -> None:
    draw = random.Random(1)
    cluster = await start_cluster(
        1, keys=KEYS, limits={"max_in_flight": IN_FLIGHT, "queue_timeout_s": 600}, policy={"name": "least_loaded"}
    )
    admission = cluster.core.admission

    async def ask(key: str, tokens: int) -> httpx.Response:
        prompt = [draw.randrange(30_000) for _ in range(tokens)]
        body = {"model": "warm-sim", "prompt": prompt, "max_tokens": 2}
        return await cluster.client.post("/v1/completions", json=body, headers=bearer(key), timeout=120)

    flood = [asyncio.create_task(ask(KEY, 4_000)) for _ in range(FLOOD)]
    try:
        for _ in range(1_000):
            if admission.waiting > FLOOD - 20:
                break
            await asyncio.sleep(0.02)
        for _ in range(5):
            assert (await ask(OTHER, 500)).status_code == 200
        still_waiting = admission.shares.waiting["hog"]
    finally:
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    assert still_waiting > FLOOD / 2  # the line was long all the time
    answer = await cluster.client.get("/breakdown", params={"limit": 1_000}, headers=bearer(ADMIN))
    rows = answer.json()["rows"]
    ends = [row["arrived_unix_s"] + row["stages_ms"]["total"] / 1e3 for row in rows]
    for place, row in enumerate(rows):
        if row["tenant"] == "polite":
            before = sum(
                1
                for each, end_s in zip(rows[:place], ends, strict=False)
                if each["tenant"] == "hog" and each["outcome"] == "ok" and end_s > row["arrived_unix_s"]
            )
            # Those in flight, and those that take the other place until it ends; in order of arrival: all.
            assert before <= 5 * IN_FLIGHT, before
