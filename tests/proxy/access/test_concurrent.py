"""Requests of a key in flight (``max_concurrent``): counted while they are served, and released however they end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from proxy.access.keys import KeyName
from proxy.access.quotas import Quota
from tests.proxy.access.test_keys import ADMIN, KEY, OK, bearer, entry
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero

FAILING: list[tuple[str, dict[str, Any], int]] = [
    *((mode, {}, 502) for mode in ("error", "reset", "empty", "cut_json")),
    *((mode, {"stream": True}, 502) for mode in ("error", "reset", "empty_stream")),
    ("refuse_input", {}, 400),
    ("hang", {"stream": True}, 504),
    ("ok", {"model": "other"}, 404),
    ("ok", {"prompt": {"no": "prompt"}}, 400),
]
"""Mode of the engine, fields of the request, and the status of its answer."""


async def limited(start_proxy: StartProxy, at_once: int, **settings: Any) -> Running:
    """A proxy in front of one engine, with one key for so many requests at a time."""
    keys = {"client": [entry("one", KEY, max_concurrent=at_once)], "admin": [entry("root", ADMIN)]}
    proxy = await start_proxy(1, keys=keys, **settings)
    proxy.client.headers.update(bearer(ADMIN))
    return proxy


def quota_of(proxy: Running) -> Quota:
    return proxy.core.keys.quota(KeyName("one"))


async def ask(proxy: Running, **fields: Any) -> int:
    return (await proxy.client.post("/v1/completions", json={**OK, **fields}, headers=bearer(KEY))).status_code


async def connection(proxy: Running, body: dict[str, Any], missing: int = 0) -> asyncio.StreamWriter:
    """A connection on which a request has been sent, without ``missing`` bytes at its end; its answer is not read."""
    host, port = proxy.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content[: len(content) - missing])
    return writer


async def check_released(proxy: Running) -> None:
    """The next request is served, and nothing of those before is left."""
    await proxy.until(lambda: quota_of(proxy).in_flight == 0)
    proxy.engines[0].mode = "ok"
    assert await ask(proxy) == 200
    stats = await proxy.settled()
    assert ledger_is_zero(stats)
    assert stats["tenants"]["one"]["key"]["requests"] == quota_of(proxy).in_flight == 0


async def test_a_request_that_fails_before_its_first_byte_is_released(start_proxy: StartProxy) -> None:
    health = {"unhealthy_after": 1000, "failure_ratio": 1.0, "window_min_requests": 1000}
    proxy = await limited(start_proxy, 1, timeouts={"first_byte_s": 0.3}, health=health)
    for mode, fields, status in FAILING:
        proxy.engines[0].mode = mode
        assert await ask(proxy, **fields) == status, (mode, fields)
        await proxy.until(lambda: quota_of(proxy).in_flight == 0)
    await check_released(proxy)


async def test_a_request_whose_connection_ends_is_released(start_proxy: StartProxy) -> None:
    proxy = await limited(start_proxy, 1)
    engine = proxy.engines[0]
    for mode, aborts in (("hang", False), ("hang", True), ("stall_stream", False), ("stall_stream", True)):
        engine.mode = mode
        seen, aborted = len(engine.seen), engine.aborted
        writer = await connection(proxy, {**OK, "stream": True})
        await proxy.until(lambda: len(engine.seen) > seen)  # noqa: B023
        assert await ask(proxy) == 429
        if aborts:
            writer.transport.abort()
        else:
            writer.close()
        await proxy.until(lambda: quota_of(proxy).in_flight == 0 and engine.aborted > aborted)  # noqa: B023
    await check_released(proxy)


async def test_a_client_that_leaves_before_its_body_is_complete_is_not_counted(start_proxy: StartProxy) -> None:
    proxy = await limited(start_proxy, 1)
    unfinished = await connection(proxy, OK, missing=1)
    await proxy.until(lambda: proxy.core.breakdown.started > proxy.core.breakdown.finished)
    assert await ask(proxy) == 200
    unfinished.close()
    await check_released(proxy)


async def test_a_request_that_leaves_the_queue_is_released(start_proxy: StartProxy) -> None:
    proxy = await limited(start_proxy, 2, limits={"max_in_flight": 1, "queue_timeout_s": 60})
    proxy.engines[0].mode = "hang"
    served = await connection(proxy, OK)
    await proxy.until(lambda: len(proxy.engines[0].seen) == 1)
    queued = await connection(proxy, OK)
    await proxy.until(lambda: bool(proxy.core.admission.queued_models()))
    assert quota_of(proxy).in_flight == 2
    queued.close()
    await proxy.until(lambda: quota_of(proxy).in_flight == 1)
    served.close()
    await check_released(proxy)
