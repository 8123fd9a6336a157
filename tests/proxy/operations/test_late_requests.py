"""Shutdown while connections are open whose requests have not arrived: a balancer does not repeat what it has sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest

from proxy.operations import shutdown
from proxy.settings import load_settings
from tests.proxy.conftest import serving
from tests.proxy.stub_engine import StubEngine

BODY = json.dumps({"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
EARLIER = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    started = await StubEngine().start()
    yield started
    await started.stop()


@pytest.mark.parametrize(("earlier", "begun"), [(b"", b""), (b"", HEAD[:20]), (EARLIER, HEAD[:20])])
async def test_a_request_that_arrives_after_the_listener_closed_is_answered_on_its_connection(
    engine: StubEngine, monkeypatch: pytest.MonkeyPatch, earlier: bytes, begun: bytes
) -> None:
    monkeypatch.setattr(shutdown, "_SETTLE_S", 0.0)
    monkeypatch.setattr(shutdown, "_FIRST_REQUEST_S", 60.0)
    settings = load_settings(None, port=0, instances=[{"name": "e", "url": engine.url}])
    async with contextlib.AsyncExitStack() as stack:
        _, url = await stack.enter_async_context(serving(settings))
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if earlier:
            writer.write(earlier)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(begun)
        await writer.drain()
        ended = asyncio.create_task(stack.aclose())
        await refused(port)
        await asyncio.sleep(0.1)  # in which idle connections are closed
        assert not ended.done()
        writer.write((HEAD + BODY)[len(begun) :])
        answer = await reader.read()
        assert b"HTTP/1.1 200 " in answer
        assert b"connection: close" in answer
        writer.close()
        await ended


async def refused(port: int) -> None:
    """Wait until the listener has closed."""
    for _ in range(3_000):
        with socket.socket() as later:
            if later.connect_ex(("127.0.0.1", port)) != 0:
                return
        await asyncio.sleep(0.02)
    raise AssertionError("the listener did not close")
