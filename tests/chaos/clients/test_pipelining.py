"""Pipelined requests: the result of a later one never affects an earlier answer."""

from __future__ import annotations

import asyncio
import json

import h11
import pytest

from tests.chaos.conftest import BODY, StartChaos
from tests.chaos.rig.client import RawClient, head, post
from tests.chaos.rig.engine import ChaosEngine, Talk, good
from tests.chaos.rig.wire import EVENTS, good_body

PLAIN = json.dumps(BODY).encode()
STREAM = json.dumps({**BODY, "stream": True}).encode()


async def slow(talk: Talk) -> None:
    """A good stream of almost a second, so that data after the request arrives in its middle."""
    answer = talk.answer()
    for part in (answer.head, *answer.parts, answer.end):
        await talk.send(part)
        await asyncio.sleep(0.1)


async def test_answers_come_in_order(start_chaos: StartChaos) -> None:
    async def later_is_faster(talk: Talk) -> None:
        await asyncio.sleep(0.2 if len(talk.engine.posts) == 1 else 0)
        await good(talk)

    proxy = await start_chaos(ChaosEngine(later_is_faster))
    async with RawClient(proxy.port) as client:
        requests = [post(PLAIN, "x-request-id: a"), post(STREAM, "x-request-id: b"), post(PLAIN, "x-request-id: c")]
        await client.send(b"".join(requests) + head(path="/health", method="GET"))
        got = [await client.answer() for _ in range(3)]
        assert [answer.headers["x-request-id"] for answer in got] == ["a", "b", "c"]
        assert [answer.body for answer in got] == [good_body(), b"".join(EVENTS), good_body()]
        assert json.loads((await client.answer(method="GET")).body) == {"status": "ok"}
    await proxy.nothing_left()


@pytest.mark.parametrize("rst", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize(
    "later",
    [
        pytest.param(post(PLAIN), id="a request"),
        pytest.param(post(PLAIN) * 5, id="five requests"),
        pytest.param(post(b"{nope"), id="a bad request"),
        pytest.param(post(PLAIN)[:-5], id="most of a request"),
        pytest.param(head("content-length: 9"), id="a head"),
        pytest.param(b"POST /v1", id="part of a head"),
    ],
)
async def test_a_client_that_leaves_with_requests_waiting_leaves_nothing(
    start_chaos: StartChaos, later: bytes, rst: bool
) -> None:
    proxy = await start_chaos(ChaosEngine(slow))
    async with RawClient(proxy.port) as client:
        await client.send(post(STREAM) + later)
        await client.reader.readuntil(b"w0")
        if rst:
            client.reset()
        else:
            client.writer.close()
        await proxy.nothing_left()
    assert set(proxy.core.breakdown.outcomes) <= {"client_gone", "rejected"}
    assert len(proxy.engines[0].posts) == 1


LATER_AND_REFUSED = {
    "announced too large": (head("content-length: 4000000"), 413),
    "too large in chunks": (head("transfer-encoding: chunked") + b"1000\r\n" + b" " * 0x1000 + b"\r\n", 413),
    "body never comes": (head("content-length: 9"), 408),
    "head never comes": (b"POST /v1/completions HTTP/1.1\r\n", 408),
    "not HTTP": (b"\0\0\0\0\r\n\r\n", 400),
    "bad chunk": (head("transfer-encoding: chunked") + b"zz\r\n", 400),
    "no Host": (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 0\r\n\r\n", 400),
    "head too large": (head("x-long: " + "a" * 40_000, "content-length: 0"), 431),
    "bad JSON": (post(b"{nope"), 400),
    "no such path": (post(b"{}", path="/v1/nope"), 404),
}


@pytest.mark.parametrize("name", LATER_AND_REFUSED)
async def test_a_later_request_that_is_refused_does_not_touch_the_answer_before_it(
    start_chaos: StartChaos, name: str
) -> None:
    """The error follows the earlier answer, or the connection ends; it is never in its middle."""
    later, status = LATER_AND_REFUSED[name]
    proxy = await start_chaos(ChaosEngine(slow), limits={"body_bytes": 2048}, timeouts={"body_s": 0.3, "header_s": 0.3})
    async with RawClient(proxy.port) as client:
        await client.send(post(STREAM))
        await client.reader.readuntil(b"\r\n\r\n")
        await client.send(later)
        chunks = b""
        while not chunks.endswith(b"\r\n0\r\n\r\n"):
            piece = await asyncio.wait_for(client.reader.read(1), 20)
            if not piece:
                break
            chunks += piece
        sent = chunks.split(b"\r\n")
        assert all(
            part in b"\n".join(EVENTS).split(b"\n") or _is_framing(part) for part in b"\n".join(sent).split(b"\n")
        )
        if not chunks.endswith(b"\r\n0\r\n\r\n"):
            # Cut in the middle: allowed only if the connection itself has become unreadable.
            assert name in {"not HTTP", "bad chunk", "no Host", "head too large", "head never comes"}
            return
        try:
            got = await client.answer()
        except (ConnectionResetError, h11.RemoteProtocolError):
            pass
        else:
            assert got.status == status
    await proxy.nothing_left()
    assert len(proxy.engines[0].posts) == 1


def _is_framing(part: bytes) -> bool:
    return all(byte in b"0123456789abcdef" for byte in part)
