"""Shutdown of a proxy process: SIGTERM during streams, with and without enough grace."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.fleet_client import events_of, was_completed
from tests.proxy.serve_process import ServeProcess, serve_process, until
from tests.proxy.stub_engine import StubEngine

pytestmark = pytest.mark.fleet

STREAMS = 20


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    # Slow, so that streams run until a test has seen the proxy shut down; then it may let them end at once.
    started = await StubEngine(tokens=100, token_delay_s=0.2).start()
    yield started
    await started.stop()


def settings(engine: StubEngine, rows: Path, **more: Any) -> dict[str, Any]:
    return {
        "instances": [{"name": "e", "url": engine.url}],
        "breakdown": {"jsonl_path": str(rows), "rejected_to_jsonl": True},
        "grace_s": 20,
        **more,
    }


async def stream(served: ServeProcess) -> httpx.Response:
    body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 20, "stream": True}
    return await served.client.post("/v1/completions", json=body)


async def in_progress(served: ServeProcess, engine: StubEngine, count: int) -> list[asyncio.Task[httpx.Response]]:
    """``count`` streams, each past its first event."""
    tasks = [asyncio.create_task(stream(served)) for _ in range(count)]

    async def all_decode() -> bool:
        ledger = (await served.client.get("/stats")).json()["ledger"]
        return bool(ledger["requests"] == count and not ledger["prefilling"])

    await until(all_decode)
    return tasks


async def in_flight(served: ServeProcess) -> bool:
    return bool((await served.client.get("/stats")).json()["requests"]["in_flight"])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_streams_that_run_at_sigterm_are_completed(engine: StubEngine, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    async with serve_process(tmp_path / "proxy.yaml", settings(engine, rows)) as served:
        tasks = await in_progress(served, engine, STREAMS)
        served.send(signal.SIGTERM)
        await served.logged(f"shutting down: {STREAMS} request")
        engine.token_delay_s = 0.0
        answers = await asyncio.gather(*tasks)
        assert all(was_completed(answer.text, 100) for answer in answers)
        assert await served.ended() == 0
    assert [row["outcome"] for row in rows_of(rows)] == ["ok"] * STREAMS
    assert engine.aborted == 0


async def test_streams_that_outlast_the_grace_end_with_an_error_event_and_a_row(
    engine: StubEngine, tmp_path: Path
) -> None:
    engine.tokens = 100_000
    rows = tmp_path / "rows.jsonl"
    async with serve_process(tmp_path / "proxy.yaml", settings(engine, rows, grace_s=0.3)) as served:
        tasks = await in_progress(served, engine, STREAMS)
        served.send(signal.SIGTERM)
        for answer in await asyncio.gather(*tasks):
            assert not was_completed(answer.text, 100_000)
            assert json.loads(events_of(answer.text)[-1])["error"]["code"] == "draining"
        assert await served.ended() == 0
    assert [row["outcome"] for row in rows_of(rows)] == ["shutdown"] * STREAMS

    async def all_aborted() -> bool:
        return engine.aborted == STREAMS

    await until(all_aborted)


async def test_a_request_without_a_first_byte_at_the_end_of_the_grace_gets_an_error(
    engine: StubEngine, tmp_path: Path
) -> None:
    engine.mode = "hang"
    rows = tmp_path / "rows.jsonl"
    async with serve_process(tmp_path / "proxy.yaml", settings(engine, rows, grace_s=0.3)) as served:
        asking = asyncio.create_task(stream(served))
        await until(lambda: in_flight(served))
        served.send(signal.SIGTERM)
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert answer.headers["retry-after"]
        assert await served.ended() == 0
    assert [(row["outcome"], row["status"]) for row in rows_of(rows)] == [("shutdown", 503)]


async def test_between_the_signal_and_the_end_of_listening_it_is_not_ready_and_still_serves(
    engine: StubEngine, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    async with serve_process(tmp_path / "proxy.yaml", settings(engine, rows, drain_delay_s=1.5)) as served:
        (task,) = await in_progress(served, engine, 1)
        assert (await served.client.get("/ready")).status_code == 200
        served.send(signal.SIGTERM)
        await served.logged("draining: not ready, closing the listener in 1.5 s")
        ready, alive, late = (
            await served.client.get("/ready"),
            await served.client.get("/health"),
            asyncio.create_task(stream(served)),
        )
        assert (ready.status_code, alive.status_code) == (503, 200)
        await served.logged("shutting down: 2 request")
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(trust_env=False) as later:
                await later.get(f"{served.url}/ready")
        engine.token_delay_s = 0.0
        assert was_completed((await late).text, 100)
        assert (await late).headers["connection"] == "close"
        assert was_completed((await task).text, 100)
        assert await served.ended() == 0


async def test_a_second_signal_skips_the_waiting(engine: StubEngine, tmp_path: Path) -> None:
    engine.tokens = 100_000
    rows = tmp_path / "rows.jsonl"
    config = settings(engine, rows, grace_s=600, drain_delay_s=600)
    async with serve_process(tmp_path / "proxy.yaml", config) as served:
        tasks = await in_progress(served, engine, 3)
        served.send(signal.SIGINT)
        await served.logged("draining")
        served.send(signal.SIGINT)
        for answer in await asyncio.gather(*tasks):
            assert json.loads(events_of(answer.text)[-1])["error"]["code"] == "draining"
        assert await served.ended() == 0
    assert len(rows_of(rows)) == 3


async def test_a_client_that_never_sends_the_rest_of_its_body_does_not_hold_the_end_up(
    engine: StubEngine, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    async with serve_process(tmp_path / "proxy.yaml", settings(engine, rows, grace_s=0.2)) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        await until(lambda: in_flight(served))
        served.send(signal.SIGTERM)
        assert await served.ended() == 0
        writer.close()
    assert [(row["outcome"], row["error"]) for row in rows_of(rows)] == [("rejected", "the proxy is shutting down")]


async def test_a_body_that_is_still_arriving_at_the_end_of_listening_is_served(
    engine: StubEngine, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    async with serve_process(tmp_path / "proxy.yaml", settings(engine, rows)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        body = json.dumps({"model": "stub", "prompt": [1] * 64, "max_tokens": 4}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body[:10])
        await writer.drain()
        await until(lambda: in_flight(served))
        served.send(signal.SIGTERM)
        await served.logged("shutting down: 1 request")
        writer.write(body[10:])
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert await served.ended() == 0
        writer.close()
    assert [row["outcome"] for row in rows_of(rows)] == ["ok"]


async def test_a_request_on_a_kept_connection_that_meets_the_end_of_listening_is_served(
    engine: StubEngine, tmp_path: Path
) -> None:
    engine.token_delay_s = 0.0
    rows = tmp_path / "rows.jsonl"
    async with serve_process(tmp_path / "proxy.yaml", settings(engine, rows)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        body = json.dumps({"model": "stub", "prompt": [1] * 64, "max_tokens": 4}).encode()
        # Stopped meanwhile, the proxy meets the signal and the request at once.
        served.send(signal.SIGSTOP)
        served.send(signal.SIGTERM)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        served.send(signal.SIGCONT)
        assert b"HTTP/1.1 200 " in await reader.read()
        assert await served.ended() == 0
        writer.close()
    assert [row["outcome"] for row in rows_of(rows)] == ["ok"]
