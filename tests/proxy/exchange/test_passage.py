"""The short way of whole chunks: the client receives what it would receive by the parser and the filter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.clients.inbound import Inbound
from proxy.engines.connection import EngineConnection
from proxy.exchange import relay as relaying
from proxy.exchange.passage import RelayedSoFar, passage
from proxy.exchange.relay import StreamRelay
from proxy.request.usage import UsageFilter

PLAIN = b'data: {"choices":[{"text":" a"}]}\n\n'
NULL = b'data: {"choices":[{"text":" b"}],"usage":null}\n\n'
EVENTS = (
    PLAIN,
    NULL,
    b'data: {"usage": null, "choices":[{"text":" c"}]}\n\n',
    b'data: {"choices":[{"text":"\\"usage\\": data: "}],"usage":null}\n\n',
    b'data: {"choices":[{"text":"data: "}]}\n\n',
    b'data: {"choices":[{"text":"long %b"}],"usage":null}\n\n' % (b"x" * 5_000),
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n',
    b'data: {"choices":[{"text":" d"}]}\r\n\r\n',
    b"event: ping\ndata: {}\n\n",
    b": comment\n\n",
)
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class _Link:
    """The client's connection: keeps what is written."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.written: list[bytes] = []

    def writer(self) -> Callable[[bytes], None]:
        return self.written.append

    def default_headers(self, request: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


class _Handler:
    bounds = None

    def opened(self, inbound: Inbound) -> None:
        return None


class _Socket(asyncio.Transport):
    """The engine's connection, of which nothing is read or written."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return object() if name == "ssl_object" else default

    def write(self, data: Any) -> None:
        """Do nothing."""

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Do nothing."""


def framed(body: bytes, form: str = "%x") -> bytes:
    return (form % len(body)).encode() + b"\r\n" + body + b"\r\n"


def unframed(body: bytes) -> bytes:
    """The body of a chunked answer that has not ended; every chunk must be whole."""
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        found, end, body = found + body[:length], body[length : length + 2], body[length + 2 :]
        assert end == b"\r\n"
    return found


async def relayed(first: bytes, reads: list[bytes], *, drop: bool, short: bool) -> tuple[bytes, UsageFilter, int]:
    """The client's body after these reads, the filter, and the number of reads that took the short way."""
    link, keep, taken = _Link(), UsageFilter(drop=drop), 0
    inbound = Inbound(link, _Handler(), "/", {}, http_10=False, keep_alive=True, before=None)  # type: ignore[arg-type]
    inbound.body_ended()
    connection = EngineConnection(lambda _: None, lambda _: None)
    connection.connection_made(_Socket())
    answer = connection.send(b"", b"")
    connection.data_received(HEAD + framed(first))
    inbound.start(200, [], None)

    def counted(*arguments: Any) -> Callable[[bytes], bool] | None:
        way = passage(*arguments)
        assert way is not None

        def passed(read: bytes) -> bool:
            nonlocal taken
            took = way(read)
            taken += took
            return took

        return passed if short else None

    with patch.object(relaying, "passage", counted):
        relay = StreamRelay(answer, inbound, keep, 60.0, 60.0, 600.0)
        running = asyncio.create_task(relay.run(await answer.chunk()))
        await asyncio.sleep(0)
    for read in reads:
        connection.data_received(read)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return unframed(b"".join(link.written).partition(b"\r\n\r\n")[2]), keep, taken


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Reads of a stream: events in chunks of one, of several or of parts, cut between the chunks or anywhere."""
    bodies: list[bytes] = []
    for event in draw(st.lists(st.sampled_from(EVENTS), max_size=12)):
        kind = draw(st.sampled_from(("own", "own", "own", "with the last", "split")))
        if kind == "with the last" and bodies:
            bodies[-1] += event
        elif kind == "split":
            at = draw(st.integers(1, len(event) - 1))
            bodies += [event[:at], event[at:]]
        else:
            bodies.append(event)
    if draw(st.booleans()):
        bodies.append(DONE)
    form = draw(st.sampled_from(("%x", "%x", "%X", "%04x")))
    chunks = [framed(body, form) for body in bodies]
    reads: list[bytes] = []
    for chunk in chunks:
        joined, cut = draw(
            st.sampled_from(((False, False), (False, False), (True, False), (False, True), (True, True)))
        )
        at = draw(st.integers(1, len(chunk) - 1)) if cut else len(chunk)
        if joined and reads:
            reads[-1] += chunk[:at]
        else:
            reads.append(chunk[:at])
        if cut:
            reads.append(chunk[at:])
    return reads


@given(reads=streams(), drop=st.booleans())
def test_the_client_gets_the_same_bytes_and_the_proxy_learns_the_same(reads: list[bytes], drop: bool) -> None:
    async def both() -> None:
        body, keep, _ = await relayed(PLAIN, reads, drop=drop, short=True)
        parsed, filtered, _ = await relayed(PLAIN, reads, drop=drop, short=False)
        assert body == parsed
        assert (keep.events, keep.usage, keep.held) == (filtered.events, filtered.usage, filtered.held)

    asyncio.run(both())


@pytest.mark.parametrize(
    ("event", "drop", "taken"),
    [
        (PLAIN, True, 3),
        (PLAIN, False, 3),
        (NULL, True, 3),
        (NULL, False, 3),
        (EVENTS[2], True, 0),
        (EVENTS[5], True, 0),
        (EVENTS[6], True, 0),
        (DONE, True, 0),
    ],
)
async def test_chunks_of_one_event_take_the_short_way(event: bytes, drop: bool, taken: int) -> None:
    assert (await relayed(PLAIN, [framed(event)] * 3, drop=drop, short=True))[2] == taken


async def test_a_chunk_within_a_chunk_is_not_taken_for_one() -> None:
    inner = framed(PLAIN)
    outer = framed(inner + inner)
    head = outer[: outer.index(b"\n") + 1]
    reads = [framed(PLAIN), head, inner, inner, b"\r\n", framed(PLAIN)]
    body, _, taken = await relayed(PLAIN, reads, drop=False, short=True)
    parsed, _, _ = await relayed(PLAIN, reads, drop=False, short=False)
    assert body == parsed
    assert taken == 1  # the first; before the last one, the end of a chunk is not certain


async def test_no_chunk_is_written_to_a_client_that_has_left() -> None:
    link, keep = _Link(), UsageFilter()
    inbound = Inbound(link, _Handler(), "/", {}, http_10=False, keep_alive=True, before=None)  # type: ignore[arg-type]
    inbound.start(200, [], None)
    inbound.write(PLAIN)
    way = passage(keep, inbound, RelayedSoFar(0.0), lambda: 1.0)
    assert way is not None
    assert way(framed(PLAIN))
    inbound.gone = True
    assert not way(framed(PLAIN))
    assert (len(link.written), keep.events) == (2, 1)


async def test_a_client_without_chunks_has_no_short_way() -> None:
    inbound = Inbound(_Link(), _Handler(), "/", {}, http_10=True, keep_alive=False, before=None)  # type: ignore[arg-type]
    inbound.start(200, [], None)
    inbound.write(PLAIN)
    assert passage(UsageFilter(), inbound, RelayedSoFar(0.0), lambda: 1.0) is None
