"""`warmroute serve` killed with SIGKILL and started again: the first turn of every session goes where its cache is."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.restart.snapshot_file import read_snapshot
from tests.integration.fleet import SimEngine, free_port
from tests.proxy.serve_process import ServeProcess, serve_process, until

pytestmark = pytest.mark.fleet

PROMPTS = {f"session-{number}": [number * 10_000 + token for token in range(800)] for number in range(6)}


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[SimEngine]]:
    """Two engines, each with KV events on ports of its own."""
    engines = []
    for number in range(2):
        ports = ("--kv-events-port", str(free_port()), "--kv-events-replay-port", str(free_port()))
        engines.append(SimEngine(tmp_path / f"engine-{number}.log", ("--engine-speed", "100", *ports)))
        engines[-1].start()
    try:
        async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
            await asyncio.gather(*(engine.healthy(client) for engine in engines))
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def settings_of(engines: list[SimEngine], *, follow: bool, **more: Any) -> dict[str, Any]:
    instances = []
    for number, engine in enumerate(engines):
        urls = {}
        if follow:
            urls = {
                name: f"tcp://127.0.0.1:{engine.flags[at]}"
                for name, at in (("events_url", 3), ("events_replay_url", 5))
            }
        instances.append({"name": f"inst-{number}", "url": engine.url, **urls})
    return {"instances": instances, "health": {"interval_s": 0.2}, **more}


async def turn(served: ServeProcess, session: str) -> dict[str, Any]:
    """Send a turn of a session; returns its row."""
    await until_ready(served)
    body = {"model": "warm-sim", "prompt": PROMPTS[session], "max_tokens": 2}
    answer = await served.client.post("/v1/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    row: dict[str, Any] = {}

    async def written() -> bool:
        """True if the request has its row: that is written shortly after its answer."""
        nonlocal row
        row = (await served.client.get("/breakdown", params={"limit": 1})).json()["rows"][0]
        return row["request_id"] == answer.headers["x-request-id"]

    await until(written)
    return row


async def until_ready(served: ServeProcess) -> None:
    async def ready() -> bool:
        answer = (await served.client.get("/ready")).json()
        return len(answer["healthy_instances"]) == 2

    await until(ready)


async def all_turns(served: ServeProcess) -> dict[str, dict[str, Any]]:
    return {session: await turn(served, session) for session in PROMPTS}


def continues(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> None:
    """Check that every session is predicted warm, on the instance that has it, and rightly so."""
    for session, row in after.items():
        assert row["instance"] == before[session]["instance"]
        assert row["predicted_cached_tokens"] == row["actual_cached_tokens"] == 768


async def test_with_kv_events_the_index_is_replayed_before_the_proxy_is_ready(
    engines: list[SimEngine], tmp_path: Path
) -> None:
    settings = settings_of(engines, follow=True, events={"replay_at_start_s": 60.0, "replay_timeout_s": 60.0})
    async with serve_process(tmp_path / "s.yaml", settings, "--policy", "round_robin") as served:
        before = await all_turns(served)
        assert {row["instance"] for row in before.values()} == {"inst-0", "inst-1"}
        served.send(signal.SIGKILL)
        assert await served.ended() == -signal.SIGKILL
    async with serve_process(tmp_path / "s.yaml", settings) as served:
        rows = (await served.client.get("/instances")).json()["instances"]
        assert [(row["kv_events"]["trusted"], row["kv_events"]["partial"]) for row in rows] == [(True, False)] * 2
        after = await all_turns(served)
    continues(before, after)
    assert {row["index_source"] for row in after.values()} == {"exact"}


async def test_without_kv_events_a_snapshot_brings_them_back(engines: list[SimEngine], tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    settings = settings_of(engines, follow=False, snapshot={"path": str(path), "interval_s": 0.1})
    async with serve_process(tmp_path / "s.yaml", settings, "--policy", "round_robin") as served:
        before = await all_turns(served)

        async def written() -> bool:
            return path.exists() and len(read_snapshot(path, 2**28).pins) == len(PROMPTS)

        await until(written)
        served.send(signal.SIGKILL)
        assert await served.ended() == -signal.SIGKILL
    async with serve_process(tmp_path / "s.yaml", settings) as served:
        await served.logged(r"snapshot restored.* 2 instance\(s\), 6 session\(s\)")
        after = await all_turns(served)
    continues(before, after)
    assert {row["index_source"] for row in after.values()} == {"shadow"}
