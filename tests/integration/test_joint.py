"""``joint`` through the real proxy: a long prompt is prefilled on a specialist, and its row explains it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from policies.types import Role, Transport
from tests.integration.conftest import Cluster, StartCluster

pytestmark = pytest.mark.fleet

ENGINES = 4
STREAMS = 12


def completion(first: int, tokens: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "sim", "prompt": list(range(first, first + tokens)), "max_tokens": max_tokens, **fields}


def with_nvlink(cluster: Cluster) -> None:
    """Instances of one host that can hand KV over."""
    for number in range(ENGINES):
        cluster.core.router.state.add_instance(f"inst-{number}", Role.KV_BOTH, "host", Transport.NVLINK)


async def specialist_of(cluster: Cluster) -> str:
    """The specialist, after minutes of long prefills of sessions that did not return."""
    state, now_s = cluster.core.router.state, time.monotonic()
    state.specialists.began(now_s - 600.0)
    state.specialists.contexts.sent("ended", "inst-0", 20_000, now_s - 600.0, 1)
    state.specialists.prefilled("inst-1", 1e4, now_s)
    first = await cluster.client.post("/v1/completions", json=completion(0, 24_000, 2))
    assert first.status_code == 200
    instances = (await cluster.client.get("/instances")).json()["instances"]
    [specialist] = [row["name"] for row in instances if row["specialist"]]
    assert isinstance(specialist, str)
    return specialist


@asynccontextmanager
async def decoding(cluster: Cluster) -> AsyncIterator[None]:
    """Streams that decode, on the instances that are no specialist."""

    async def stream(number: int) -> None:
        body = completion(1_000_000 * (number + 1), 100, 20_000, stream=True)
        async with cluster.client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass

    streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    try:
        ledger = cluster.core.router.state.ledger
        for _ in range(1_000):
            loads = [ledger.load(f"inst-{number}", time.monotonic()) for number in range(ENGINES)]
            if sum(load.requests - load.prefilling for load in loads) == STREAMS:
                break
            await asyncio.sleep(0.02)
        yield
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_a_heavy_request_is_handed_off_by_a_specialist_and_its_row_says_why(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(ENGINES, "--model", "sim", policy={"name": "joint"})
    client = cluster.client
    with_nvlink(cluster)
    specialist = await specialist_of(cluster)
    assert "warmroute_prefill_specialists 1.0" in (await client.get("/metrics")).text
    async with decoding(cluster):
        heavy = completion(50_000_000, 30_000, 4)
        explained = (await client.post("/explain", json=heavy)).json()
        assert explained["request"]["specialists"] == [specialist]
        assert explained["decisions"]["joint"]["offload"]["prefill_instance"] == specialist
        assert explained["decisions"]["warm"]["offload"]["reason"] == "planner_never"
        answer = await client.post("/v1/completions", json=heavy)
        assert answer.status_code == 200
        assert answer.headers["x-warmroute-prefill-instance"] == specialist
    rows = (await client.get("/breakdown", params={"limit": 1000})).json()["rows"]
    [row] = [row for row in rows if row["prefill_instance"]]
    assert (row["policy"], row["planner"], row["offload_reason"]) == ("joint", "joint", "chosen")
    assert row["instance"] != specialist
    figures = row["offload_inputs"]
    assert figures["handed_off_s"] < figures["colocated_s"]
    assert figures["first_s"] <= 2 * figures["colocated_first_s"]
    scores = {score["instance"]: score for score in row["scores"]}
    assert scores[specialist]["inputs"]["specialist_s"] == 1.0
    assert scores[row["instance"]]["score"] == min(score["score"] for score in row["scores"])
    assert "prefill" in row["legs"]


async def test_without_hand_offs_a_long_message_is_answered_by_the_specialist(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(ENGINES, "--model", "sim", policy={"name": "joint"})
    client = cluster.client
    specialist = await specialist_of(cluster)
    async with decoding(cluster):
        words = " ".join(f"word-{number}" for number in range(15_000))
        message = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": words}]}
        answer = await client.post("/v1/messages", json=message)
        assert answer.status_code == 200
    rows = (await client.get("/breakdown", params={"limit": 1000})).json()["rows"]
    [row] = [row for row in rows if row["endpoint"] == "/v1/messages"]
    assert (row["instance"], row["prefill_instance"], row["offload_reason"]) == (specialist, None, "request_shape")
    streams = [row["instance"] for row in rows if row["prompt_tokens"] == 100]
    assert len(streams) == STREAMS
    assert specialist not in streams
