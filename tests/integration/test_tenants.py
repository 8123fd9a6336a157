"""Two tenants before a simulated engine: a flood of long prompts of one against a few short ones of the other."""

from __future__ import annotations

import asyncio
import random

import httpx

from tests.integration.conftest import StartCluster
from tests.proxy.access.test_keys import ADMIN, KEY, OTHER, bearer, entry

KEYS = {"client": [entry("hog", KEY), entry("polite", OTHER)], "admin": [entry("root", ADMIN)]}
FLOOD, IN_FLIGHT = 80, 2


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
