"""Bounds on every request, also on those that no engine will see: trailers, small chunks, bodies of admin requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.chaos.conftest import BODY, Chaos, StartChaos
from tests.chaos.rig import faults
from tests.chaos.rig.client import RawClient, head, post
from tests.chaos.rig.engine import ChaosEngine, Talk, good
from tests.chaos.rig.faults import Moment, at
from tests.chaos.rig.wire import EVENTS, good_body

PLAIN = json.dumps(BODY).encode()
STREAM = json.dumps({**BODY, "stream": True}).encode()
CHUNKED = "transfer-encoding: chunked"
GENERATION = head(CHUNKED)
READY = head(CHUNKED, path="/ready", method="GET")
EXPLAIN = head(CHUNKED, path="/explain")
MANY = b"ab:cd\r\n" * 1000

REQUESTS = pytest.mark.parametrize("request_head", [GENERATION, READY, EXPLAIN], ids=["generation", "GET", "admin"])


async def until_answered(client: RawClient, data: bytes, most_bytes: int) -> int:
    """Send ``data`` repeatedly until an answer arrives; returns the bytes sent, at most ``most_bytes``."""
    sent = 0
    while sent < most_bytes and not client.reader._buffer and not client.reader.at_eof():  # type: ignore[attr-defined]
        await client.send(data)
        sent += len(data)
        await asyncio.sleep(0)
    return sent


def released(proxy: Chaos) -> bool:
    return proxy.core.clients.held_bytes == 0


@REQUESTS
@pytest.mark.parametrize(
    "endless", [MANY, b"a" * 7000, b"ab: " + b"c" * 7000], ids=["trailers", "a trailer's name", "a trailer"]
)
async def test_endless_trailers_are_431_and_the_end(
    start_chaos: StartChaos, request_head: bytes, endless: bytes
) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(request_head + b"2\r\n{}\r\n0\r\n")
        # The kernel's buffers take some megabytes before the client notices.
        assert await until_answered(client, endless, 40_000_000) < 40_000_000
        got = await client.answer()
        assert (got.status, got.error["code"]) == (431, "trailers_too_large")
        assert "limits.header_bytes" in got.error["message"]
    await proxy.until(lambda: proxy.core.clients.open <= 1)
    assert released(proxy)
    assert proxy.engines[0].posts == []


@REQUESTS
async def test_an_endless_chunk_extension_is_431_and_the_end(start_chaos: StartChaos, request_head: bytes) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(request_head + b"2;")
        await until_answered(client, b"a" * 7000, 40_000_000)
        assert (await client.answer()).status == 431
    assert proxy.engines[0].posts == []


async def test_trailers_are_neither_kept_nor_taken_for_headers(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), keys={"client": [{"name": "a", "sha256": "0" * 64}]})
    async with RawClient(proxy.port) as client:
        await client.send(READY + b"0\r\nexpect: 100-continue\r\nx-a: b\r\n\r\n")
        got = await client.answer(method="GET")
        assert (got.status, got.interim) == (200, [])
        await client.send(GENERATION + b"0\r\nauthorization: Bearer x\r\n\r\n")
        assert (await client.answer()).status == 401


@pytest.mark.parametrize(
    "pieces",
    [[READY], [READY, b"0\r\n"], [READY, b"0\r\n", *[b"a:b\r\n"] * 200], [EXPLAIN, *[b"1\r\n \r\n"] * 200]],
    ids=["no body", "no trailers", "a trailer now and then", "a byte now and then"],
)
async def test_a_body_that_is_not_for_generation_has_the_same_time(
    start_chaos: StartChaos, pieces: list[bytes]
) -> None:
    proxy = await start_chaos(ChaosEngine(), timeouts={"body_s": 0.5})
    async with RawClient(proxy.port) as client:
        answering = asyncio.create_task(client.answer())
        for piece in pieces:
            if not answering.done():
                await client.send(piece)
                await asyncio.sleep(0.02)
        got = await answering
        assert (got.status, got.error["code"]) == (408, "body_timeout")
        assert await client.at_end()
    await proxy.until(lambda: released(proxy))


@pytest.mark.parametrize("more", [[], ["authorization: Bearer nobody"]], ids=["without a key", "with a wrong key"])
@pytest.mark.parametrize("path", ["/explain", "/ready", "/instances", "/nowhere"])
async def test_a_large_body_that_is_not_for_generation_is_413(
    start_chaos: StartChaos, path: str, more: list[str]
) -> None:
    proxy = await start_chaos(ChaosEngine(), limits={"admin_body_bytes": 4096})
    async with RawClient(proxy.port) as client:
        await client.send(post(b" " * 4096, *more, path=path))
        assert (await client.answer()).status != 413
        await client.send(head("content-length: 100000", *more, path=path) + b" " * 50_000)
        got = await client.answer()
        assert (got.status, got.error["code"]) == (413, "body_too_large")
        assert "limits.admin_body_bytes" in got.error["message"]
        assert await client.at_end()
    await proxy.until(lambda: released(proxy))


async def test_the_admin_listener_has_the_same_bounds(start_chaos: StartChaos) -> None:
    bounds: dict[str, Any] = {"admin": {"port": 0}, "limits": {"admin_body_bytes": 4096}}
    patient = await start_chaos(ChaosEngine(), **bounds)
    # Only for what is never sent: on a busy machine half a second is too short for the rest.
    hasty = await start_chaos(ChaosEngine(), **bounds, timeouts={"body_s": 0.5, "header_s": 0.5})
    late = {b"POST /explain HTT": 408, EXPLAIN: 408}
    sent = {
        READY + b"2\r\n{}\r\n0\r\n" + MANY * 60: 431,
        head("x-long: " + "a" * 40_000, path="/stats", method="GET"): 431,
        head("content-length: 100000", path="/explain") + b" " * 50_000: 413,
        post(b"{}"): 404,
    }
    for proxy, statuses in ((hasty, late), (patient, sent)):
        assert proxy.core.admin_port is not None
        for data, status in statuses.items():
            async with RawClient(proxy.core.admin_port) as client:
                await client.send(data)
                assert (await client.answer()).status == status, data[:80]
        assert proxy.engines[0].posts == []
    assert hasty.core.admin_port is not None
    async with RawClient(hasty.core.admin_port) as silent:
        assert await silent.at_end(within_s=20)


async def slow(talk: Talk) -> None:
    answer = talk.answer()
    for part in (answer.head, *answer.parts, answer.end):
        await talk.send(part)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "later",
    [
        EXPLAIN + b"2000\r\n" + b" " * 0x2000 + b"\r\n0\r\n\r\n",
        EXPLAIN,
        READY + b"0\r\n" + MANY * 60,
        post(b" " * 8000),
        head("content-length: 2", "expect: 100-continue"),
        head("content-length: 2", "expect: 100-continue", path="/explain"),
    ],
    ids=["too large", "never complete", "trailers", "a whole body too large", "Expect", "Expect of an admin request"],
)
async def test_a_refused_later_request_leaves_the_answer_before_it_whole(start_chaos: StartChaos, later: bytes) -> None:
    limits = {"admin_body_bytes": 4096, "body_bytes": 4096}
    proxy = await start_chaos(ChaosEngine(slow), limits=limits, timeouts={"body_s": 0.2})
    async with RawClient(proxy.port) as client:
        await client.send(post(STREAM))
        await client.reader.readuntil(b"w0")
        await client.send(later)
        rest = await asyncio.wait_for(client.reader.read(-1), 20)
        assert EVENTS[-1] in rest
        assert rest.endswith(b"\r\n0\r\n\r\n")
        assert b"HTTP/1.1" not in rest
    await proxy.nothing_left()
    assert released(proxy)


async def test_pipelined_bodies_of_admin_requests_arrive_in_order_and_whole(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(slow))
    question = json.dumps({"model": BODY["model"], "prompt": list(range(3000))}).encode()
    async with RawClient(proxy.port) as client:
        await client.send(post(STREAM))
        await client.reader.readuntil(b"w0")
        await client.send(post(question, path="/explain") * 3 + post(STREAM))
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        for _ in range(3):
            got = await client.answer()
            assert (got.status, json.loads(got.body)["request"]["prompt_tokens"]) == (200, 3000)
        assert (await client.answer()).body == b"".join(EVENTS)
    await proxy.nothing_left()
    await proxy.until(lambda: released(proxy))


# Bodies in memory


async def test_bodies_of_all_connections_have_one_bound(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), limits={"buffered_bytes": 100_000})
    unfinished = head("content-length: 40000") + b" " * 30_000
    async with RawClient(proxy.port) as one, RawClient(proxy.port) as two, RawClient(proxy.port) as three:
        for client in (one, two):
            await client.send(unfinished)
        await proxy.until(lambda: proxy.core.clients.held_bytes == 60_000)
        await three.send(head("content-length: 60000") + b" " * 50_000)
        got = await three.answer()
        assert (got.status, got.error["code"], got.headers["retry-after"]) == (503, "buffers_full", "1")
        assert "limits.buffered_bytes" in got.error["message"]
        assert proxy.core.clients.held_bytes == 60_000
        async with RawClient(proxy.port) as admin:
            await admin.send(head("content-length: 60000", path="/explain") + b" " * 50_000)
            assert (await admin.answer()).error["code"] == "buffers_full"
        metrics = (await proxy.client.get("/metrics")).text
        assert 'warmroute_clients_refused_total{limit="buffered_bytes"} 2.0' in metrics
        assert "warmroute_request_body_bytes 60000.0" in metrics
        # What is there is served, and so is every body for which there is room.
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
        await one.send(b" " * 10_000)
        assert (await one.answer()).status == 400
        await proxy.until(lambda: proxy.core.clients.held_bytes == 30_000)
    await proxy.until(lambda: released(proxy))
    await proxy.nothing_left()


async def test_large_bodies_leave_room_for_small_ones(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), limits={"buffered_bytes": 4_000_000})
    async with RawClient(proxy.port) as large:
        await large.send(head("content-length: 9000000") + b" " * 3_100_000)
        got = await large.answer()
        assert (got.status, got.error["code"]) == (503, "buffers_full")
    async with RawClient(proxy.port) as large:
        await large.send(head("content-length: 9000000") + b" " * 2_900_000)
        await proxy.until(lambda: proxy.core.clients.held_bytes == 2_900_000)
        small = json.dumps({**BODY, "user": "x" * 500_000})
        assert (await proxy.client.post("/v1/completions", content=small)).status_code == 200
    await proxy.until(lambda: released(proxy))


@pytest.mark.parametrize("end", ["answered", "broken", "left", "left early", "refused", "late", "invalid", "shutdown"])
async def test_the_account_of_bodies_is_zero_after(start_chaos: StartChaos, end: str) -> None:
    breaks = {"broken": faults.close, "left": faults.hang, "shutdown": faults.hang}
    engine = ChaosEngine(at(Moment.MID_STREAM, breaks[end]) if end in breaks else good)
    proxy = await start_chaos(engine, timeouts={"body_s": 0.3}, limits={"body_bytes": 20_000})
    sent = {
        "left early": post(STREAM)[:-5],
        "late": post(STREAM)[:-5],
        "refused": head(CHUNKED) + b"8000\r\n" + b" " * 30_000,
        "invalid": head(CHUNKED) + b"5\r\n12345\r\nzz\r\n",
    }
    async with RawClient(proxy.port) as client:
        await client.send(sent.get(end, post(STREAM)))
        if end == "left":
            await proxy.until(lambda: proxy.core.clients.held_bytes == len(STREAM))
            await proxy.until(lambda: proxy.engines[0].busy == 1)
        elif end == "shutdown":
            await proxy.until(lambda: proxy.engines[0].busy == 1)
            for task in asyncio.all_tasks():
                if task.get_coro().__qualname__ == "Generation.serve":  # type: ignore[union-attr]
                    task.cancel()
            await client.answer()
        elif end != "left early":
            await client.answer()
    await proxy.nothing_left()
    assert released(proxy)


@pytest.mark.parametrize("size", [1, 2, 100, 5000])
async def test_small_chunks_cost_no_more_than_their_size(start_chaos: StartChaos, size: int) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        text = json.dumps({**BODY, "user": "x" * 20_000}).encode()
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        await client.send(GENERATION + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces))
        await proxy.until(lambda: proxy.core.clients.held_bytes == len(text))
        [inbound] = _inbounds(proxy)
        assert len(inbound._parts) <= 2 + len(text) // 4096
        await client.send(b"0\r\n\r\n")
        assert (await client.answer()).body == good_body()
    assert [each.body for each in proxy.engines[0].posts] == [text]


def _inbounds(proxy: Chaos) -> list[Any]:
    import gc

    from proxy.clients.inbound import Inbound

    inbounds = (each for each in gc.get_objects() if isinstance(each, Inbound))
    return [each for each in inbounds if each._bounds is proxy.core.clients and each._size]


# Offers to upgrade

OFFERS = {
    "h2c": ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA"),
    "websocket": ("connection: upgrade", "upgrade: websocket", "sec-websocket-key: x", "sec-websocket-version: 13"),
    "close": ("connection: upgrade, close", "upgrade: x"),
    "Expect": ("connection: upgrade", "upgrade: h2c", "expect: 100-continue"),
}


@pytest.mark.parametrize(
    ("name", "chunked", "cut"),
    [
        *[(name, chunked, 0) for name in OFFERS for chunked in (False, True)],
        *[("h2c", False, 1), ("h2c", True, 40), ("Expect", True, 1)],
    ],
)
async def test_an_offer_to_upgrade_is_ignored_and_the_body_kept(
    start_chaos: StartChaos, name: str, chunked: bool, cut: int
) -> None:
    proxy = await start_chaos(ChaosEngine())
    framed = head(CHUNKED, *OFFERS[name]) + b"%x\r\n%b\r\n0\r\na: b\r\n\r\n" % (len(PLAIN), PLAIN)
    offered = framed if chunked else post(PLAIN, *OFFERS[name])
    whole = offered * 2 + post(PLAIN) + head(*OFFERS[name], path="/health", method="GET") + offered + post(STREAM)
    async with RawClient(proxy.port) as client:
        for start in range(0, len(whole), cut or len(whole)):
            await client.send(whole[start : start + (cut or len(whole))])
            await asyncio.sleep(0)
        if name == "close":
            got = await client.answer()
            assert (got.status, got.body, got.headers["connection"]) == (200, good_body(), "close")
            assert await client.at_end()
            return
        for _ in range(3):
            assert (await client.answer()).body == good_body()
        assert json.loads((await client.answer(method="GET")).body) == {"status": "ok"}
        assert (await client.answer()).body == good_body()
        assert (await client.answer()).body == b"".join(EVENTS)
    assert [each.body for each in proxy.engines[0].posts[:4]] == [PLAIN] * 4
    await proxy.nothing_left()


async def test_offers_to_upgrade_by_the_thousand_are_served(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    offered = head(*OFFERS["h2c"], path="/health", method="GET")
    async with RawClient(proxy.port) as client:
        reading = asyncio.create_task(client.reader.readexactly(300_000))
        await client.send(offered * 3000)
        answers = await asyncio.wait_for(reading, 60)
        assert answers.count(b"HTTP/1.1 200 OK") > 1000
    assert (await proxy.client.get("/health")).status_code == 200


async def test_connect_is_refused(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n" + post(PLAIN))
        got = await client.answer()
        assert got.status == 405
        assert await client.at_end()
    assert proxy.engines[0].posts == []
