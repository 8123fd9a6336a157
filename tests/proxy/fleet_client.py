"""Shared by the tests of a changing fleet: an admin client, requests, and the check of complete streams."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.proxy.conftest import Running, StartProxy
from tests.proxy.stub_engine import StubEngine

KEY = "wr-for-the-operators"
KEYS = {"admin": [{"name": "ops", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}
ADMIN = {"authorization": f"Bearer {KEY}"}

Start = Callable[..., Awaitable[Running]]


def admins(start_proxy: StartProxy) -> Start:
    """``start_proxy`` with an admin key, which the client sends."""

    async def started(*args: Any, **settings: Any) -> Running:
        running = await start_proxy(*args, **{"keys": KEYS, "policy": {"name": "round_robin"}, **settings})
        running.client.headers.update(ADMIN)
        return running

    return started


async def engine(**behaviour: Any) -> StubEngine:
    return await StubEngine(**behaviour).start()


async def ask(running: Running, *, prompt: list[int] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "stub", "prompt": prompt or [1, 2, 3], "max_tokens": 4, **fields}
    return await running.client.post("/v1/completions", json=body)


async def asked_of(running: Running, count: int = 6, **fields: Any) -> Counter[str]:
    """Instances that answered ``count`` consecutive requests."""
    answers = [await ask(running, **fields) for _ in range(count)]
    assert [answer.status_code for answer in answers] == [200] * count
    return Counter(answer.headers["x-warmroute-instance"] for answer in answers)


async def row_of(running: Running, name: str) -> dict[str, Any]:
    answer = await running.client.get(f"/instances/{name}")
    assert answer.status_code == 200
    row: dict[str, Any] = answer.json()
    return row


def events_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def was_completed(text: str, tokens: int) -> bool:
    """True for the whole stream, False if it ends with an error in OpenAI's shape; anything else fails."""
    *events, last = events_of(text)
    if last == "[DONE]":
        assert len(events) == tokens
        return True
    assert set(json.loads(last)["error"]) == {"message", "type", "param", "code"}
    for event in events:
        json.loads(event)
    return False


def reloads(text: str) -> dict[str, float]:
    """``warmroute_config_reloads_total`` by result."""
    found = {}
    for line in text.splitlines():
        if line.startswith("warmroute_config_reloads_total{"):
            found[line.split('"')[1]] = float(line.rpartition(" ")[2])
    return found
