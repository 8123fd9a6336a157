"""Arbitrary bytes as HTTP on both sides: engines' answers to our client, and clients' requests to our listener."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engines.connection import EngineAnswer, EngineConnection
from proxy.engines.upstream import UpstreamError
from tests.chaos.conftest import BODY
from tests.chaos.rig.profiles import EXAMPLES, fuzz
from tests.chaos.rig.served import Served
from tests.chaos.rig.wire import LAST_CHUNK, chunk, head

CUTS = st.lists(st.integers(0, 3_000), max_size=30)
FRAGMENTS = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 X\r\n\r\n"),
        *(b"content-length: 5\r\n", b"content-length: 0\r\n", b"content-length: -1\r\n", b"content-type: text/x\r\n"),
        *(b"transfer-encoding: chunked\r\n", b"connection: close\r\n", b"connection: upgrade\r\nupgrade: x\r\n"),
        *(b"\r\n", b"\n", b"\r\n\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"0\r\n", b"hello", b"ffffffffffffffffff\r\n"),
        *(b"\0", b"x: y\r\n", b": \r\n", b" folded\r\n", b"HTTP/1.1 304 X\r\n\r\n", b"HTTP/1.1 999 X\r\n"),
    ]
)
ANSWERS = st.lists(FRAGMENTS | st.binary(max_size=12), max_size=12).map(b"".join)
BODIES = st.lists(st.binary(min_size=1, max_size=200), max_size=8)


class Pipe(asyncio.Transport):
    """A transport without a peer."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.pair = socket.socketpair()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.pair[0] if name == "socket" else default

    def write(self, data: Any) -> None:
        assert not self.closed

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        assert not self.closed

    def resume_reading(self) -> None:
        assert not self.closed

    def abort(self) -> None:
        self.closed = True

    close = abort


class End:
    """Result of one answer that was fed to a connection in pieces before the connection closed."""

    def __init__(self, pieces: list[bytes], *, pumped: bool) -> None:
        asyncio.run(self._feed(pieces, pumped))

    async def _feed(self, pieces: list[bytes], pumped: bool) -> None:
        released: list[EngineConnection] = []
        gone: list[EngineConnection] = []
        pipe = Pipe()
        connection = EngineConnection(released.append, gone.append)
        try:
            connection.connection_made(pipe)
            answer: EngineAnswer = connection.send(b"POST / HTTP/1.1\r\n\r\n", b"")
            body: list[bytes] = []
            ended: list[UpstreamError | None] = []
            if pumped:
                answer.pump(body.append, ended.append)
            for piece in pieces:
                if not pipe.closed:
                    connection.data_received(piece)
            connection.connection_lost(None)
            self.status = answer.status
            self.released = len(released)
            self.complete = answer.complete
            if pumped:
                assert len(ended) == 1
                self.error = ended[0]
            else:
                self.error = None
                try:
                    body.append(await answer.read())
                except UpstreamError as error:
                    self.error = error
            self.body = b"".join(body)
        finally:
            for end in pipe.pair:
                end.close()
        assert len(gone) == 1
        assert self.released <= 1
        assert self.complete is (self.error is None)


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in cuts)})
    return [stream[a:b] for a, b in zip(edges, edges[1:])]  # noqa: B905, RUF007


@fuzz
@given(ANSWERS, CUTS, st.booleans())
def test_any_bytes_of_an_engine_end_as_an_answer_or_an_upstream_error(
    sent: bytes, cuts: list[int], pumped: bool
) -> None:
    End(cut(sent, cuts), pumped=pumped)


@fuzz
@given(BODIES, CUTS, st.sampled_from(["length", "chunked", "close"]), st.booleans(), st.booleans())
def test_a_good_answer_is_the_same_however_it_is_cut(
    body: list[bytes], cuts: list[int], framing: str, pumped: bool, interim: bool
) -> None:
    whole = b"".join(body)
    sent = {
        "length": head("200 OK", f"content-length: {len(whole)}") + whole,
        "chunked": head("200 OK", "transfer-encoding: chunked") + b"".join(map(chunk, body)) + LAST_CHUNK,
        "close": head("200 OK", "connection: close") + whole,
    }[framing]
    end = End(cut(head("100 Continue") * interim + sent, cuts), pumped=pumped)
    assert (end.status, end.body, end.error) == (200, whole, None)
    assert end.released == (framing != "close")


@fuzz
@given(BODIES.filter(bool), CUTS, st.sampled_from(["length", "chunked"]), st.booleans(), st.integers(1, 10_000))
def test_a_cut_off_answer_is_never_taken_for_a_whole_one(
    body: list[bytes], cuts: list[int], framing: str, pumped: bool, lost: int
) -> None:
    whole = b"".join(body)
    sent = {
        "length": head("200 OK", f"content-length: {len(whole)}") + whole,
        "chunked": head("200 OK", "transfer-encoding: chunked") + b"".join(map(chunk, body)) + LAST_CHUNK,
    }[framing]
    end = End(cut(sent[: len(sent) - 1 - lost % len(sent)], cuts), pumped=pumped)
    assert end.error is not None
    assert end.released == 0
    assert whole.startswith(end.body)


GOOD = json.dumps(BODY).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(GOOD), GOOD)
)
REQUESTS = st.sampled_from(
    [
        REQUEST,
        REQUEST.replace(b"/v1/completions", b"/explain"),
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    ]
)


@st.composite
def bent_requests(draw: st.DrawFn) -> bytes:
    """One or several good requests with a few bytes changed."""
    raw = bytearray(b"".join(draw(st.lists(REQUESTS, min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 4))] = draw(FRAGMENTS | st.binary(max_size=4))
    return bytes(raw)


def answers_to(url: str, sent: bytes) -> list[int]:
    """Statuses of the answers until the connection ends; every one must be valid HTTP."""
    host, _, port = url.removeprefix("http://").partition(":")
    statuses: list[int] = []
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while piece := connection.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
    while received.startswith(b"HTTP/"):
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(received)
        event: Any = None
        while not isinstance(event, h11.EndOfMessage):
            event = parser.next_event()
            if event is h11.NEED_DATA:  # the client half-closed, so the rest may have been cut
                return statuses
            if isinstance(event, h11.Response):
                statuses.append(event.status_code)
        received = parser.trailing_data[0]
    assert received == b"", received[:200]
    return statuses


@settings(fuzz, max_examples=EXAMPLES or 60)
@given(bent_requests())
def test_any_bytes_of_a_client_are_answered_validly_and_never_with_500(served: Served, sent: bytes) -> None:
    assert 500 not in answers_to(served.url, sent)


def test_the_listener_still_serves_after_all_that(served: Served) -> None:
    for _ in range(3):
        assert answers_to(served.url, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n") in ([200], [])
    assert served.errors() == []


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_random_bytes_are_refused(served: Served, size: int) -> None:
    sent = bytes((number * 37 + size) % 256 for number in range(size)) + b"\r\n\r\n"
    assert set(answers_to(served.url, sent)) <= {400, 431}
