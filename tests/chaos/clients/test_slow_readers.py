"""Clients that stop reading: memory stays bounded, the engine is throttled, and the client is eventually cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.chaos.conftest import BODY, StartChaos
from tests.chaos.rig.client import RawClient, post
from tests.chaos.rig.engine import ChaosEngine, Talk
from tests.chaos.rig.wire import DONE, LAST_CHUNK, chunk, head, sse
from tests.integration.fleet import free_port

MEGABYTES = 64
EVENT = sse({"choices": [{"index": 0, "text": "x" * 60_000, "finish_reason": None}]})
STREAM = json.dumps({**BODY, "stream": True}).encode()


class Fountain:
    """An answer of ``MEGABYTES``; counts the bytes the engine could send."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def __call__(self, talk: Talk) -> None:
        await talk.send(head("200 OK", "content-type: text/event-stream", "transfer-encoding: chunked"))
        for _ in range(MEGABYTES * 2**20 // len(EVENT)):
            await talk.send(chunk(EVENT))
            self.sent_bytes += len(EVENT)
        await talk.send(chunk(DONE) + LAST_CHUNK)


@asynccontextmanager
async def proxy_process(engine: ChaosEngine, folder: Path, **timeouts: float) -> AsyncIterator[tuple[int, Any]]:
    """``warmroute serve`` in front of the engine: its port and its process."""
    port = free_port()
    settings = {
        "port": port,
        "instances": [{"name": "inst-0", "url": engine.url}],
        "timeouts": timeouts,
        "grace_s": 1.0,
        "log_level": "warning",
    }
    path = folder / "proxy.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [sys.executable, "-m", "warmroute", "serve", "--config", str(path)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client:
            for _ in range(600):
                assert process.returncode is None
                try:
                    if (await client.get("/ready")).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
            yield port, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def stats(port: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client:
        return (await client.get("/stats")).json()


@asynccontextmanager
async def deaf(port: int) -> AsyncIterator[RawClient]:
    """A client that sends its request and reads nothing of the answer, with a small window."""
    async with RawClient(port, limit=1024) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post(STREAM))
        yield client


async def test_64_mb_to_clients_that_do_not_read_stay_with_the_engine(tmp_path: Path) -> None:
    """Bytes that a client does not read are not read from the engine either, except for the sockets' buffers."""
    fountain = Fountain()
    engine = await ChaosEngine(fountain).start()
    readers = 4
    try:
        async with proxy_process(engine, tmp_path, client_stall_s=60.0, idle_s=60.0) as (port, process):
            memory = psutil.Process(process.pid).memory_info
            before = memory().rss
            async with deaf(port), deaf(port), deaf(port), deaf(port):
                sent = -1
                while sent != fountain.sent_bytes or engine.busy < readers:
                    sent = fountain.sent_bytes
                    await asyncio.sleep(0.5)
                assert memory().rss - before < 32 * 2**20
                # Four sockets' send and receive buffers on either side of the proxy, grown by the kernel.
                assert fountain.sent_bytes < readers * 16 * 2**20 < readers * MEGABYTES * 2**20
                health = await stats(port)
                assert health["requests"]["in_flight"] == readers
    finally:
        await engine.stop()


async def test_a_client_that_stops_reading_is_cut_and_the_engine_not_blamed(start_chaos: StartChaos) -> None:
    engine = ChaosEngine(Fountain())
    proxy = await start_chaos(engine, timeouts={"client_stall_s": 0.5})
    async with deaf(proxy.port):
        await proxy.until(lambda: proxy.core.breakdown.finished == 1)
        await proxy.nothing_left()
    [row] = await proxy.rows()
    assert row["outcome"] == "client_gone"
    assert "0.5 s" in row["error"]
    assert engine.cut == 1
    assert (proxy.instance().healthy, proxy.instance().failures_in_a_row) == (True, 0)


async def test_a_slow_reader_that_reads_on_gets_every_byte(start_chaos: StartChaos) -> None:
    """Slow but not stopped: each pause is shorter than the bound, the total is longer."""
    fountain = Fountain()
    proxy = await start_chaos(ChaosEngine(fountain), timeouts={"client_stall_s": 3.0, "idle_s": 3.0})
    got = bytearray()
    async with RawClient(proxy.port, limit=2**20) as client:
        await client.send(post(STREAM))
        for _ in range(8):
            await asyncio.sleep(0.5)
            got += await client.reader.read(2**22)
        while DONE not in got[-200:]:
            piece = await client.reader.read(2**22)
            assert piece
            got += piece
    assert got.count(b"data: ") == MEGABYTES * 2**20 // len(EVENT) + 1
    await proxy.nothing_left()
    assert proxy.core.breakdown.outcomes == {"ok": 1}


async def test_an_engine_that_pauses_while_the_client_does_not_read_is_not_taken_for_silent(
    start_chaos: StartChaos,
) -> None:
    """The bound on silence is suspended while the proxy does not read."""
    proxy = await start_chaos(ChaosEngine(Fountain()), timeouts={"client_stall_s": 20.0, "idle_s": 0.8})
    async with RawClient(proxy.port, limit=2**20) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post(STREAM))
        await asyncio.sleep(2.0)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        got = b""
        while DONE not in got[-200:]:
            piece = await client.reader.read(2**22)
            assert piece
            got = got[-200:] + piece
    await proxy.nothing_left()
    assert proxy.core.breakdown.outcomes == {"ok": 1}


@pytest.mark.parametrize("size", [1, 64 * 2**10, 2**20, 20 * 2**20])
async def test_a_whole_answer_of_any_size_arrives_whole(start_chaos: StartChaos, size: int) -> None:
    body = json.dumps({"choices": [{"index": 0, "text": "x" * size}], "usage": {"prompt_tokens": 1}}).encode()

    async def large(talk: Talk) -> None:
        await talk.send(head("200 OK", "content-type: application/json", f"content-length: {len(body)}"))
        for at in range(0, len(body), 2**16):
            await talk.send(body[at : at + 2**16])

    proxy = await start_chaos(ChaosEngine(large))
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert answer.content == body
    await proxy.nothing_left()


async def test_a_deaf_client_of_a_whole_answer_is_cut_too(start_chaos: StartChaos) -> None:
    body = json.dumps({"choices": [{"index": 0, "text": "x" * 32 * 2**20}]}).encode()

    async def large(talk: Talk) -> None:
        await talk.send(head("200 OK", "content-type: application/json", f"content-length: {len(body)}") + body)

    proxy = await start_chaos(ChaosEngine(large), timeouts={"client_stall_s": 0.5})
    async with RawClient(proxy.port, limit=1024) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post(json.dumps(BODY).encode()))
        await proxy.until(lambda: proxy.core.breakdown.finished == 1)
        await asyncio.sleep(2.0)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        got = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := await asyncio.wait_for(client.reader.read(2**20), 10):
                got += len(piece)
        assert got < len(body)
    await proxy.nothing_left()
