"""Kinds of hostile clients. Each sends one thing over one connection; sizes and moments are drawn."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable

import msgspec

from bench.soak.plan import MODEL
from bench.soak.wire import PATIENCE_S, Wire, head, post, wrong_key

Attack = Callable[[Wire, random.Random], Awaitable[bool | None]]
"""True if the client has left on purpose; else the answer is awaited."""

_TRAILERS_MB = 8
_CHUNKED = "transfer-encoding: chunked"


async def trailers(wire: Wire, draw: random.Random) -> None:
    """Trailers without end, of requests with and without generation."""
    method, path = draw.choice((("GET", "/ready"), ("POST", "/v1/completions"), ("POST", "/v1/models")))
    await wire.send(head(method, path, _CHUNKED) + b"0\r\n")
    for _ in range(_TRAILERS_MB):
        await wire.send(b"ab:cd\r\n" * (2**20 // 7))


async def big_body(wire: Wire, draw: random.Random) -> None:
    """A body up to the limit or a little over it: one text, many prompts, or not JSON at its end."""
    size = _size(draw, wire.body_bytes * 1.02)
    piece = draw.choice((b'"a",', b"[1],", b"1,", b"cache ", b"[" * 4))
    inner = piece * (size // len(piece))
    prompt = b'"' + inner + b'"' if piece == b"cache " else b"[" + inner[:-1] + b"]"
    body = b'{"model":"' + MODEL.encode() + b'","max_tokens":1,"prompt":' + prompt + draw.choice((b"}", b""))
    if draw.random() < 0.3:
        await wire.send(head("POST", "/v1/completions", _CHUNKED) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    else:
        await wire.send(post(body))


async def unfinished_body(wire: Wire, draw: random.Random) -> None:
    """A body of which a part never comes, whole or in chunks of two bytes."""
    size = _size(draw, wire.body_bytes)
    if draw.random() < 0.5:
        await wire.send(head("POST", "/v1/completions", _CHUNKED) + b"2\r\n[[\r\n" * min(size // 7, 100_000))
    else:
        await wire.send(head("POST", "/v1/completions", f"content-length: {size}") + b"[" * (size // 2))


async def bad_key(wire: Wire, draw: random.Random) -> None:
    """A missing, wrong or very long key, sometimes with a large body."""
    body = _request(prompt="cache " * draw.choice((1, 1, 100_000)))
    await wire.send(post(body, key=wrong_key(draw)))


async def long_names(wire: Wire, draw: random.Random) -> None:
    """A model name, session id or cache key of up to a quarter of the largest body."""
    name = "n" * _size(draw, wire.body_bytes / 4)
    where = draw.choice(("model", "prompt_cache_key", "user", "header"))
    if where == "header":
        await wire.send(post(_request(), f"x-session-id: {name[:24_000]}", f"x-request-id: {name[:4_000]}"))
    else:
        await wire.send(post(_request(**{where: name})))


async def long_headers(wire: Wire, draw: random.Random) -> None:
    """Headers beyond the limit: one long one, or many."""
    lines = ["x: " + "v" * draw.randint(20_000, 200_000)] if draw.random() < 0.5 else ["a: b"] * 10_000
    await wire.send(post(_request(), *lines))


async def disconnect(wire: Wire, draw: random.Random) -> bool:
    """A request that ends at a random byte, or an answer that is left at one."""
    request = post(_request(stream=draw.random() < 0.7))
    if draw.random() < 0.5:
        await wire.send(request[: draw.randrange(len(request))])
        await asyncio.sleep(draw.uniform(0, 0.2))
    else:
        await wire.send(request)
        await wire.receive(draw.randint(1, 3_000))
    wire.leave(draw)
    return True


async def slow_head(wire: Wire, draw: random.Random) -> None:
    """Request line and headers, byte by byte."""
    await wire.trickle(post(_request()), draw.uniform(0.05, 0.5))


async def half_closed(wire: Wire, draw: random.Random) -> None:
    """A request, whole or in part, whose sender sends no more but reads."""
    request = post(_request())
    await wire.send(request[: draw.choice((len(request), draw.randrange(1, len(request))))])
    wire.half_close()


async def upgrade(wire: Wire, draw: random.Random) -> None:
    """A request that asks for another protocol."""
    protocol = draw.choice(("h2c", "websocket", "TLS/1.2"))
    await wire.send(
        post(_request(), "connection: Upgrade, HTTP2-Settings", f"upgrade: {protocol}", "http2-settings: A")
    )


async def garbage(wire: Wire, draw: random.Random) -> None:
    """Anything but HTTP/1.1."""
    start = draw.choice((b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /ready\r\n", b""))
    await wire.send(start + draw.randbytes(draw.randint(1, 4_000)) + b"\r\n\r\n")


KINDS: dict[Attack, int] = {
    trailers: 2,
    big_body: 3,
    unfinished_body: 1,
    bad_key: 5,
    long_names: 4,
    long_headers: 3,
    disconnect: 6,
    slow_head: 1,
    half_closed: 3,
    upgrade: 3,
    garbage: 3,
}
"""Weights of their shares. Those that wait for a time limit of the proxy are rare: they occupy a worker meanwhile."""


LONGER_PATIENCE_S: dict[Attack, float] = dict.fromkeys(
    (big_body, long_names, long_headers, disconnect, half_closed, upgrade), 4 * PATIENCE_S
)
"""Kinds that may be valid requests: the proxy waits for an engine then, and for another if that one is killed."""


def _size(draw: random.Random, most: float) -> int:
    """Bytes from 1 kB to ``most``, uniform in the logarithm."""
    return int(math.exp(draw.uniform(math.log(1e3), math.log(most))))


def _request(**fields: object) -> bytes:
    return msgspec.json.encode({"model": MODEL, "prompt": "cache token", "max_tokens": 8, **fields})
