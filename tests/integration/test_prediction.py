"""The index's predictions compared with the engines' reports."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.integration.conftest import Cluster, StartCluster

pytestmark = pytest.mark.fleet


def conversation(seed: int, turns: int, system: list[int]) -> list[list[int]]:
    """Token-id prompts of one session: each turn repeats the history and extends it."""
    draw = random.Random(seed)
    prompt = list(system)
    prompts = []
    for _ in range(turns):
        prompt = prompt + [draw.randrange(1000, 30_000) for _ in range(draw.randrange(50, 900))]
        prompts.append(prompt)
    return prompts


async def run_sessions(cluster: Cluster, sessions: int, turns: int, kind: int = 0) -> list[dict[str, Any]]:
    """Rows of these sessions, turn by turn: between two turns of one come those of all others, on any machine.

    Sessions of another ``kind`` share no block with them.
    """
    system = list(range(100_000 * kind, 100_000 * kind + 700))

    async def send(number: int, prompt: list[int]) -> None:
        answer = await cluster.client.post(
            "/v1/completions",
            json={"model": "warm-sim", "prompt": prompt, "max_tokens": 5, "stream": number % 2 == 0},
            headers={"x-session-id": f"s{kind}-{number}"},
        )
        assert answer.status_code == 200

    conversations = [conversation(number, turns, system) for number in range(sessions)]
    for prompts in zip(*conversations, strict=True):
        await asyncio.gather(*(send(number, prompt) for number, prompt in enumerate(prompts)))
    rows = (await cluster.client.get("/breakdown", params={"limit": 10_000})).json()["rows"]
    return [row for row in rows if (row["session_id"] or "").startswith(f"s{kind}-")]


async def test_predictions_are_exact_for_token_ids_while_nothing_is_evicted(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(3, "--engine-speed", "100")
    for kind, policy in enumerate(("linear", "session_sticky", "round_robin")):
        (await cluster.client.put("/policy", json={"name": policy})).raise_for_status()
        rows = await run_sessions(cluster, sessions=12, turns=5, kind=kind)
        assert len(rows) == 60
        assert {row["policy"] for row in rows} == {policy}
        exact = sum(row["predicted_cached_tokens"] == row["actual_cached_tokens"] for row in rows)
        # Requests that begin at the same moment may find less of their common prefix than predicted.
        assert exact >= len(rows) - 1, policy
        assert sum(row["actual_cached_tokens"] for row in rows) > 0


async def ideal_hits(start_cluster: StartCluster) -> int:
    """Cached tokens of the same sessions on engines that never evict."""
    roomy = await start_cluster(2, "--engine-speed", "100", policy={"name": "round_robin"})
    return sum(row["actual_cached_tokens"] for row in await run_sessions(roomy, sessions=10, turns=5))


async def test_prediction_error_is_reported_when_something_was_evicted(start_cluster: StartCluster) -> None:
    # A pool of 6,400 tokens is far less than 10 growing sessions need: engines must evict blocks that the index
    # expects.
    cluster = await start_cluster(
        2, "--engine-speed", "100", "--kv-capacity-tokens", "6400", policy={"name": "round_robin"}
    )
    rows = await run_sessions(cluster, sessions=10, turns=5)
    # Hits of both caches without a bound; fewer hits show that they evicted.
    ideal = await ideal_hits(start_cluster)
    assert sum(row["actual_cached_tokens"] for row in rows) < 0.9 * ideal
    off = sum(abs(row["predicted_cached_tokens"] - row["actual_cached_tokens"]) for row in rows)
    metrics = (await cluster.client.get("/metrics")).text
    counted = sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("warmroute_cache_prediction_error_tokens_total{")
    )
    assert counted == off > 0
    index_blocks = [row["index_blocks"] for row in (await cluster.client.get("/instances")).json()["instances"]]
    assert all(blocks <= 100 for blocks in index_blocks)


async def test_chats_that_an_engine_has_evicted_are_not_expected_there(start_cluster: StartCluster) -> None:
    """Their blocks are 1 KiB of text each, some 256 tokens: 8,192 tokens hold eight of these chats of 1,000."""
    cluster = await start_cluster(1, "--engine-speed", "100", "--kv-capacity-tokens", "8192")

    async def sent(number: int) -> dict[str, Any]:
        text = " ".join(random.Random(number).choices(["alpha", "beta", "gamma", "delta"], k=730))
        body = {"model": "warm-sim", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        (await cluster.client.post("/v1/chat/completions", json=body)).raise_for_status()
        rows = (await cluster.client.get("/breakdown", params={"limit": 1})).json()["rows"]
        assert rows[0]["prompt_tokens"] > 900
        found: dict[str, Any] = rows[0]
        return found

    for number in range(30):
        await sent(number)
    latest, oldest = await sent(29), await sent(0)
    assert latest["predicted_cached_tokens"] > 700 < latest["actual_cached_tokens"]
    assert oldest["predicted_cached_tokens"] == oldest["actual_cached_tokens"] == 0
    (row,) = (await cluster.client.get("/instances")).json()["instances"]
    assert 100 < row["index_blocks"] <= row["index_capacity_blocks"] == 128
