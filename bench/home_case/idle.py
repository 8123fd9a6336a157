"""Wait for a fleet to become idle after a run, and what it still holds then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from bench.home_case.fleet import HomeCaseError
from bench.home_case.pages import ProxyPages
from bench.routers.engines import samples
from launch.run.state import ProcessState

IDLE_S = 30.0
"""Longest wait."""
_POLL_S = 0.5
_STEP_AFTER_S = 4.0
"""An idle engine updates its gauges at its next step only: after so long one request of one token makes it step."""
_TIMEOUT_S = 5.0
_STEP_TOKEN = 500
_ENGINE_GAUGES = {
    "vllm:num_requests_running": "running requests",
    "vllm:num_requests_waiting": "waiting requests",
    # Blocks that are only cached are free for vLLM and not part of it.
    "vllm:kv_cache_usage_perc": "share of KV blocks in use",
}


class Idleness(NamedTuple):
    """End of the wait."""

    after_s: float | None
    """Wall seconds until nothing was left; None: something was at the end of the wait."""
    leaks: list[str]
    """Sentences on what was left."""


async def until_idle(
    proxy: ProxyPages, engines: Sequence[ProcessState], model: str, http: httpx.AsyncClient, limit_s: float = IDLE_S
) -> Idleness:
    """Wait until the proxy and every engine hold nothing of a request, for at most ``limit_s`` wall seconds."""
    began_s = stepped_s = time.monotonic()
    while True:
        left, busy = await _left_over(proxy, engines, http)
        now_s = time.monotonic()
        if not left:
            return Idleness(round(now_s - began_s, 2), [])
        if now_s - began_s >= limit_s:
            return Idleness(None, left)
        if busy and now_s - stepped_s >= _STEP_AFTER_S:
            stepped_s = now_s
            await asyncio.gather(*(_step(engine.url, model, http) for engine in busy))
        await asyncio.sleep(_POLL_S)


async def _left_over(
    proxy: ProxyPages, engines: Sequence[ProcessState], http: httpx.AsyncClient
) -> tuple[list[str], list[ProcessState]]:
    """Sentences on what is left, and the engines among them."""
    try:
        left = await proxy.left_over()
    except HomeCaseError as error:
        left = [f"proxy: {error}"]
    busy = []
    for engine in engines:
        found = await _engine_left(engine, http)
        if found:
            busy.append(engine)
        left += found
    return left, busy


async def _engine_left(engine: ProcessState, http: httpx.AsyncClient) -> list[str]:
    try:
        answer = await http.get(f"{engine.url}/metrics", timeout=_TIMEOUT_S)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        return [f"{engine.name}: its metrics cannot be read ({error or type(error).__name__})"]
    sums: dict[str, float] = {}
    for name, _, value in samples(answer.text):
        if name in _ENGINE_GAUGES:
            sums[name] = sums.get(name, 0.0) + value
    return [f"{engine.name}: {_ENGINE_GAUGES[name]} is {value:g}" for name, value in sums.items() if value]


async def _step(url: str, model: str, http: httpx.AsyncClient) -> None:
    body = {"model": model, "prompt": [_STEP_TOKEN], "max_tokens": 1, "temperature": 0}
    try:
        await http.post(f"{url}/v1/completions", json=body, timeout=_TIMEOUT_S)
    except httpx.HTTPError:
        return  # its gauges show what is wrong
