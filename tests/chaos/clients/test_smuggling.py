"""Requests that two servers could parse differently: rejected with 400, connection closed, nothing forwarded."""

from __future__ import annotations

import json

import pytest

from tests.chaos.conftest import BODY, StartChaos
from tests.chaos.rig.client import RawClient
from tests.chaos.rig.engine import ChaosEngine

PLAIN = json.dumps(BODY).encode()
SIZE = len(PLAIN)
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (SIZE, PLAIN)
SMUGGLED = b"GET /stats HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def request(*lines: bytes, body: bytes = PLAIN, target: bytes = b"/v1/completions", end: bytes = b"\r\n") -> bytes:
    return end.join([b"POST " + target + b" HTTP/1.1", *lines, b"", b""]) + body


HOST = b"host: 127.0.0.1"
LENGTH = b"content-length: %d" % SIZE
TRANSFER = b"transfer-encoding: chunked"

SHAPES = {
    "both lengths, length first": request(HOST, LENGTH, TRANSFER, body=CHUNKED),
    "both lengths, chunked first": request(HOST, TRANSFER, LENGTH, body=CHUNKED),
    "two lengths that differ": request(HOST, LENGTH, b"content-length: 3"),
    "two lengths that agree": request(HOST, LENGTH, LENGTH),
    "two lengths in one field": request(HOST, b"content-length: %d, %d" % (SIZE, SIZE)),
    "length with a sign": request(HOST, b"content-length: +%d" % SIZE),
    "length below zero": request(HOST, b"content-length: -1"),
    "length in hexadecimal": request(HOST, b"content-length: 0x10"),
    "length with an underscore": request(HOST, b"content-length: 1_0"),
    "length that is empty": request(HOST, b"content-length:"),
    "length past 64 bits": request(HOST, b"content-length: 99999999999999999999999"),
    "folded header": request(HOST, LENGTH, b"x-a: b\r\n c"),
    "folded transfer-encoding": request(HOST, b"transfer-encoding:\r\n chunked", body=CHUNKED),
    "bare LF after a header": request(HOST, LENGTH + b"\nx-a: b"),
    "bare LF throughout": request(HOST, LENGTH, end=b"\n"),
    "bare CR in a header": request(HOST, LENGTH, b"x-a: b\rc: d"),
    "space before the colon": request(HOST, b"content-length : %d" % SIZE),
    "space in a header's name": request(HOST, LENGTH, b"x a: b"),
    "header without a name": request(HOST, LENGTH, b": b"),
    "header without a colon": request(HOST, LENGTH, b"nonsense"),
    "NUL in a header": request(HOST, LENGTH, b"x-a: b\0c"),
    "unknown transfer-encoding": request(HOST, b"transfer-encoding: xchunked", body=CHUNKED),
    "chunked not last": request(HOST, b"transfer-encoding: chunked, identity", body=CHUNKED),
    "two transfer-encodings": request(HOST, TRANSFER, b"transfer-encoding: identity", body=CHUNKED),
    "vertical tab in transfer-encoding": request(HOST, b"transfer-encoding: \x0bchunked", body=CHUNKED),
    "transfer-encoding in HTTP/1.0": request(HOST, TRANSFER, LENGTH, body=CHUNKED).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "chunk size in hexadecimal with 0x": request(HOST, TRANSFER, body=b"0x" + CHUNKED),
    "chunk size with a sign": request(HOST, TRANSFER, body=b"+" + CHUNKED),
    "chunk size past 64 bits": request(HOST, TRANSFER, body=b"fffffffffffffffff" + CHUNKED),
    "chunk size that is empty": request(HOST, TRANSFER, body=b"\r\n" + CHUNKED),
    "chunk size that is no number": request(HOST, TRANSFER, body=b"zz\r\n"),
    "chunk longer than its size": request(HOST, TRANSFER, body=b"2\r\n" + PLAIN + b"\r\n0\r\n\r\n"),
    "chunk ended by bare LF": request(HOST, TRANSFER, body=CHUNKED.replace(b"\r\n", b"\n", 1)),
    "chunk data ended by bare LF": request(HOST, TRANSFER, body=b"%x\r\n%b\n0\r\n\r\n" % (SIZE, PLAIN)),
    "no Host": request(LENGTH),
    "two Hosts": request(HOST, HOST, LENGTH),
    "no version": b"POST /v1/completions\r\n\r\n" + PLAIN,
    "unknown version": request(HOST, LENGTH).replace(b"HTTP/1.1", b"HTTP/3.7", 1),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40,
    "space in the target": request(HOST, LENGTH, target=b"/v1/completions /x"),
    "control byte in the method": b"PO\x01T" + request(HOST, LENGTH)[4:],
    "lower-case method": b"post" + request(HOST, LENGTH)[4:],
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_ambiguous_request_is_refused_and_never_forwarded(start_chaos: StartChaos, shape: str) -> None:
    proxy = await start_chaos(ChaosEngine())
    for path in (b"/v1/completions", b"/explain"):  # one for generation, one of the control endpoints
        async with RawClient(proxy.port) as client:
            await client.send(SHAPES[shape].replace(b"/v1/completions", path) + SMUGGLED)
            got = await client.answer()
            assert got.status == 400, path
            assert got.headers.get("connection") == "close", path
            assert await client.at_end(), f"{path!r}: an answer too many: the smuggled request was served"
        assert proxy.engines[0].posts == [], path
        await proxy.nothing_left()
    # Other connections are unaffected.
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_request_cut_at_any_byte_is_never_forwarded(start_chaos: StartChaos) -> None:
    proxy, whole = await start_chaos(ChaosEngine()), request(HOST, LENGTH)
    for number in range(0, len(whole) - 1, 5):
        async with RawClient(proxy.port) as client:
            await client.send(whole[:number])
            client.writer.close()
            await proxy.nothing_left()
        assert proxy.engines[0].posts == [], f"cut at byte {number}"


async def test_what_follows_a_body_is_a_request_of_its_own(start_chaos: StartChaos) -> None:
    """A body that looks like a request is data; bytes after the body are not part of it."""
    body = json.dumps({**BODY, "prompt": SMUGGLED.decode() * 3}).encode()
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(request(HOST, b"content-length: %d" % len(body), body=body) + SMUGGLED)
        assert (await client.answer()).status == 200
        assert "ledger" in json.loads((await client.answer(method="GET")).body)
    assert [post.body for post in proxy.engines[0].posts] == [body]


@pytest.mark.parametrize(
    "name",
    ["x-request-id", "x-session-id", "authorization", "traceparent"],
)
async def test_header_values_cannot_carry_lines_to_an_engine(start_chaos: StartChaos, name: str) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(request(HOST, LENGTH, name.encode() + b": a\r\n b: c"))
        assert (await client.answer()).status == 400
    assert proxy.engines[0].posts == []


async def test_hop_by_hop_and_forged_headers_do_not_reach_an_engine(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    forged = {"te": "trailers", "x-forwarded-for": "1.2.3.4", "cookie": "a=b", "upgrade": "h2c", "keep-alive": "9"}
    answer = await proxy.client.post("/v1/completions", json=BODY, headers=forged)
    assert answer.status_code == 200
    [sent] = proxy.engines[0].posts
    assert not set(forged) & set(sent.headers)


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
async def test_an_upgrade_that_is_offered_is_declined(start_chaos: StartChaos, protocol: str) -> None:
    """Served as HTTP/1.1; following bytes are a separate request."""
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        offer = (b"connection: upgrade", f"upgrade: {protocol}".encode(), b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA")
        await client.send(request(HOST, LENGTH, *offer) + SMUGGLED)
        assert (await client.answer()).status == 200
        assert "ledger" in json.loads((await client.answer(method="GET")).body)
    await proxy.nothing_left()
