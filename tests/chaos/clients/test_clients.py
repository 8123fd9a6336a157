"""Clients that leave, are slow, or use valid but rare HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.chaos.conftest import BODY, StartChaos
from tests.chaos.rig import faults
from tests.chaos.rig.client import RawClient, head, post
from tests.chaos.rig.engine import ChaosEngine, Talk, good
from tests.chaos.rig.faults import Moment, at
from tests.chaos.rig.wire import EVENTS, good_body

PLAIN = json.dumps(BODY).encode()
STREAM = json.dumps({**BODY, "stream": True}).encode()

Leave = Callable[[RawClient], None]


def fin(client: RawClient) -> None:
    client.writer.close()


def rst(client: RawClient) -> None:
    client.reset()


def half_close(client: RawClient) -> None:
    """Close the sending side. A client that has finished its request is treated as one that left."""
    client.writer.write_eof()


@pytest.mark.parametrize("leave", [fin, rst])
@pytest.mark.parametrize(
    "sent",
    [
        head("content-length: 1000") + b"{",
        head("content-length: 1000"),
        head("transfer-encoding: chunked") + b"5\r\n{",
        head("transfer-encoding: chunked") + b"1\r\n{\r\n",
    ],
    ids=["a byte of the body", "none of the body", "inside a chunk", "between chunks"],
)
async def test_leaving_during_the_upload(start_chaos: StartChaos, sent: bytes, leave: Leave) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(sent)
        await asyncio.sleep(0.05)
        leave(client)
        await proxy.nothing_left()
    assert proxy.engines[0].posts == []
    assert set(proxy.core.breakdown.outcomes) <= {"client_gone"}


@pytest.mark.parametrize("leave", [fin, rst, half_close])
@pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("moment", [Moment.BEFORE_HEADERS, Moment.BEFORE_FIRST_BYTE, Moment.MID_STREAM])
async def test_leaving_while_the_engine_works_cuts_the_engine(
    start_chaos: StartChaos, moment: Moment, body: bytes, leave: Leave
) -> None:
    engine = ChaosEngine(at(moment, faults.hang))
    proxy = await start_chaos(engine)
    async with RawClient(proxy.port) as client:
        await client.send(post(body))
        await proxy.until(lambda: engine.busy == 1)
        await asyncio.sleep(0.05)
        leave(client)
        await proxy.until(lambda: engine.cut == 1)
        await proxy.nothing_left()
    assert proxy.core.breakdown.outcomes == {"client_gone": 1}
    assert proxy.instance().failures_in_a_row == 0


@pytest.mark.parametrize("leave", [fin, rst])
async def test_leaving_right_at_the_end_is_one_row_and_no_harm(start_chaos: StartChaos, leave: Leave) -> None:
    proxy = await start_chaos(ChaosEngine())
    for _ in range(20):
        async with RawClient(proxy.port) as client:
            await client.send(post(STREAM))
            await client.reader.readuntil(b"[DONE]")
            leave(client)
    await proxy.nothing_left()
    assert sum(proxy.core.breakdown.outcomes.values()) == 20
    assert set(proxy.core.breakdown.outcomes) <= {"ok", "client_gone"}
    assert proxy.instance().failures_in_a_row == 0


async def test_leaving_at_random_moments_by_the_hundred_leaves_nothing(start_chaos: StartChaos) -> None:
    async def slow(talk: Talk) -> None:
        answer = talk.answer()
        for part in (answer.head, *answer.parts, answer.end):
            await talk.send(part)
            await asyncio.sleep(0.005)

    engines = [ChaosEngine(slow), ChaosEngine(slow)]
    proxy = await start_chaos(*engines)

    async def visit(number: int) -> None:
        async with RawClient(proxy.port) as client:
            whole = post(STREAM if number % 2 else PLAIN, f"x-request-id: r{number}")
            await client.send(whole[: len(whole) - number % 7])
            await asyncio.sleep((number % 25) * 0.003)
            (fin, rst)[number % 2](client)

    await asyncio.gather(*(visit(number) for number in range(200)))
    await proxy.nothing_left()
    ids = [row["request_id"] for row in await proxy.rows()]
    assert len(ids) == len(set(ids))
    assert set(proxy.core.breakdown.outcomes) <= {"ok", "client_gone"}
    assert all(proxy.instance(number).failures_in_a_row == 0 for number in (0, 1))


@pytest.mark.parametrize(
    "pieces",
    [
        [head("content-length: 1000") + b"{"],
        [head("transfer-encoding: chunked") + b"5\r\n{"],
        [head("content-length: 1000"), *[b" "] * 40],
    ],
    ids=["stops", "stops inside a chunk", "a byte now and then"],
)
async def test_a_body_that_does_not_arrive_in_time_is_408_and_the_end(
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
        assert got.headers.get("connection") == "close"
        assert await client.at_end()
    await proxy.nothing_left()
    assert proxy.core.breakdown.outcomes == {"rejected": 1}


@pytest.mark.parametrize("drip", [False, True], ids=["stops", "a byte now and then"])
async def test_headers_that_do_not_arrive_in_time_end_the_connection(start_chaos: StartChaos, drip: bool) -> None:
    proxy = await start_chaos(ChaosEngine(), timeouts={"header_s": 0.5})
    async with RawClient(proxy.port) as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        answering = asyncio.create_task(client.answer())
        for _ in range(60 if drip else 0):
            if answering.done():
                break
            await client.send(b"x")
            await asyncio.sleep(0.02)
        got = await answering
        assert got.status == 408
        assert await client.at_end()
    assert proxy.engines[0].posts == []


async def test_a_connection_that_says_nothing_is_ended_without_an_answer(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), timeouts={"header_s": 0.3})
    async with RawClient(proxy.port) as client:
        assert await client.at_end(within_s=20)


async def test_a_kept_connection_may_take_its_time_before_the_next_request(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), timeouts={"header_s": 0.3})
    async with RawClient(proxy.port) as client:
        for _ in range(3):
            await client.send(post(PLAIN))
            assert (await client.answer()).body == good_body()
            await asyncio.sleep(0.7)


@pytest.mark.parametrize(
    "request_head",
    [
        head("x-long: " + "a" * 40_000, "content-length: 2"),
        head(*(f"x-{number}: {'a' * 100}" for number in range(400)), "content-length: 2"),
        head("content-length: 2", path="/v1/completions?" + "a" * 40_000),
        b"POST /v1/completions HTTP/1.1\r\n" + b"x-endless: " + b"a" * 60_000,
    ],
    ids=["one long header", "many headers", "a long target", "a header without end"],
)
async def test_headers_too_large_are_431_and_the_end(start_chaos: StartChaos, request_head: bytes) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(request_head)
        got = await client.answer()
        assert got.status == 431
        assert "limits.header_bytes" in got.error["message"]
        assert await client.at_end()
    assert proxy.engines[0].posts == []
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("expect", [False, True], ids=["", "with Expect"])
@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "chunked"])
async def test_a_body_too_large_is_413_and_the_end(start_chaos: StartChaos, chunked: bool, expect: bool) -> None:
    proxy = await start_chaos(ChaosEngine(), limits={"body_bytes": 2048})
    more = ["expect: 100-continue"] if expect else []
    async with RawClient(proxy.port) as client:
        if chunked:
            await client.send(head("transfer-encoding: chunked", *more) + b"1000\r\n" + b" " * 0x1000 + b"\r\n")
        else:
            await client.send(head("content-length: 4000000", *more))
        got = await client.answer()
        assert (got.status, got.error["code"]) == (413, "body_too_large")
        if not chunked:
            assert got.interim == []
        assert await client.at_end()
    assert proxy.engines[0].posts == []
    await proxy.nothing_left()
    assert proxy.core.breakdown.outcomes == {"rejected": 1}


async def test_a_client_still_sending_a_rejected_body_reads_the_error(start_chaos: StartChaos) -> None:
    """A close with unread data in the socket would be a reset, and the 413 lost."""
    proxy = await start_chaos(ChaosEngine(), limits={"body_bytes": 2048})
    for _ in range(5):
        answer = await proxy.client.post("/v1/completions", content=b" " * 3_000_000)
        assert answer.status_code == 413


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (post(b"{nope"), 400),
        (post(b'{"model":"nobody","prompt":"x"}'), 404),
        (post(b"{}", path="/v1/nope"), 404),
        (head("content-length: 0", method="DELETE"), 404),
    ],
)
async def test_a_connection_is_good_for_more_after_an_error(start_chaos: StartChaos, bad: bytes, status: int) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        for _ in range(2):
            await client.send(bad)
            assert (await client.answer()).status in {status, 405}
            await client.send(post(PLAIN))
            assert (await client.answer()).body == good_body()


async def test_a_connection_is_good_for_more_after_a_failed_or_broken_answer(start_chaos: StartChaos) -> None:
    engine = ChaosEngine(at(Moment.MID_STREAM, faults.close))
    proxy = await start_chaos(engine, health={"interval_s": 60.0, "unhealthy_after": 50})
    async with RawClient(proxy.port) as client:
        for _ in range(2):
            await client.send(post(PLAIN))
            assert (await client.answer()).status == 502
            await client.send(post(STREAM))
            assert b"stream_broken" in (await client.answer()).body
        engine.fault = good
        await client.send(post(STREAM))
        assert (await client.answer()).body == b"".join(EVENTS)


@pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["whole", "stream"])
async def test_http_1_0_gets_an_answer_it_can_read(start_chaos: StartChaos, body: bytes) -> None:
    """No chunks, which HTTP/1.0 does not have (nginx uses it towards its upstreams by default)."""
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(post(body, version="1.0"))
        answer = await asyncio.wait_for(client.reader.read(-1), 10)
        first, _, content = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in first.lower()
        assert content == (good_body() if body is PLAIN else b"".join(EVENTS))
    await proxy.nothing_left()


async def test_connection_close_is_honoured(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(post(PLAIN, "connection: close"))
        got = await client.answer()
        assert (got.status, got.headers["connection"]) == (200, "close")
        assert await client.at_end()


async def test_expect_100_continue_is_answered(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(head(f"content-length: {len(PLAIN)}", "expect: 100-continue"))
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        await client.send(PLAIN)
        assert (await client.answer()).body == good_body()


@pytest.mark.parametrize(
    "framed",
    [
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(PLAIN), PLAIN),
        b"".join(b"1\r\n%c\r\n" % byte for byte in PLAIN) + b"0\r\n\r\n",
        b"%X;name=value\r\n%b\r\n0\r\n\r\n" % (len(PLAIN), PLAIN),
        b"%x\r\n%b\r\n0\r\nx-trailer: y\r\n\r\n" % (len(PLAIN), PLAIN),
        b"000%x\r\n%b\r\n000\r\n\r\n" % (len(PLAIN), PLAIN),
    ],
    ids=["one chunk", "a byte a chunk", "an extension", "a trailer", "leading zeros"],
)
async def test_a_chunked_upload_reaches_the_engine_whole(start_chaos: StartChaos, framed: bytes) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        for _ in range(2):
            await client.send(head("transfer-encoding: chunked") + framed)
            assert (await client.answer()).body == good_body()
    assert [request.body for request in proxy.engines[0].posts] == [PLAIN, PLAIN]


async def test_an_upload_in_the_smallest_pieces_reaches_the_engine_whole(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        for byte in post(STREAM):
            await client.send(bytes((byte,)))
            await asyncio.sleep(0)
        assert (await client.answer()).body == b"".join(EVENTS)
