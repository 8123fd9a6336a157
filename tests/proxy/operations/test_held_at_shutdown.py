"""Shutdown of a proxy process while requests are held: they count as running ones, as those in the queue do."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.serve_process import ServeProcess, serve_process, until
from tests.proxy.stub_engine import StubEngine

FLAGS = ("--admission", "session_cap", "--admission-param", "sessions=1", "--admission-param", "keep_s=0")


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    started = await StubEngine(mode="hang").start()
    yield started
    await started.stop()


async def ask(served: ServeProcess, session: str) -> httpx.Response:
    body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4, "user": session}
    return await served.client.post("/v1/completions", json=body)


async def one_runs_and_one_waits(served: ServeProcess) -> list[asyncio.Task[httpx.Response]]:
    tasks = []
    for number, (section, key) in enumerate((("ledger", "requests"), ("holding", "held"))):
        tasks.append(asyncio.create_task(ask(served, f"s{number}")))

        async def there(section: str = section, key: str = key) -> bool:
            return bool((await served.client.get("/stats")).json()[section][key] == 1)

        await until(there)
    return tasks


def settings(engine: StubEngine, rows: Path, grace_s: float) -> dict[str, Any]:
    return {
        "instances": [{"name": "e", "url": engine.url}],
        "breakdown": {"jsonl_path": str(rows)},
        "grace_s": grace_s,
    }


async def test_what_is_held_at_the_end_of_the_grace_gets_an_error(engine: StubEngine, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    async with serve_process(tmp_path / "proxy.yaml", settings(engine, rows, 0.3), *FLAGS) as served:
        tasks = await one_runs_and_one_waits(served)
        served.send(signal.SIGTERM)
        answers = await asyncio.gather(*tasks)
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(503, "draining")}
        assert ["x-warmroute-held-s" in answer.headers for answer in answers] == [False, True]
        assert await served.ended() == 0
    written = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert [row["outcome"] for row in written] == ["shutdown"] * 2
    assert sorted(bool(row["held_s"]) for row in written) == [False, True]
    assert engine.aborted <= 1
    assert len(engine.seen) == 1


async def test_what_is_held_is_served_if_room_appears_within_the_grace(engine: StubEngine, tmp_path: Path) -> None:
    async with serve_process(tmp_path / "proxy.yaml", settings(engine, tmp_path / "rows", 20), *FLAGS) as served:
        first, held = await one_runs_and_one_waits(served)
        served.send(signal.SIGTERM)
        await served.logged("shutting down: 2 request")
        engine.mode = "ok"
        first.cancel()
        assert (await held).status_code == 200
        assert await served.ended() == 0
