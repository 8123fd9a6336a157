"""The HTTP client for engines, against servers that implement (or break) the protocol byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from proxy.engines import client as engine_client
from proxy.engines.client import EngineClient
from proxy.engines.upstream import NotConnectedError, UpstreamError

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/x\r\ncontent-length: 2\r\n\r\nhi"
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"
)


class Server:
    """Runs ``script`` for every connection; records the requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self.script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.ended.set()
            writer.close()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        self.requests.append(head + body)
        self.asked.set()
        return body


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    # A slow machine may need more than the real times between two steps of a test.
    monkeypatch.setattr(engine_client, "_STALE_S", 60.0)
    monkeypatch.setattr(engine_client, "_KEEPALIVE_S", 60.0)
    client = EngineClient(20.0)
    yield client
    await client.close()
    assert len(client) == 0


@contextlib.asynccontextmanager
async def serving(answer: bytes | Script, *, once: bool = False) -> AsyncIterator[tuple[Server, str]]:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not isinstance(answer, bytes):
            await answer(reader, writer)
            return
        while True:
            await server.request(reader)
            writer.write(answer)
            await writer.drain()
            if once:
                return

    server = Server(script)
    url = await server.start()
    try:
        yield server, url
    finally:
        server.server.close()


async def test_request_and_answer_and_one_connection_for_many(client: EngineClient) -> None:
    async with serving(OK) as (server, url):
        for number in range(5):
            answer = await client.post(f"{url}/v1/x", b"body%d" % number, {"x-a": "1"})
            assert (answer.status, answer.headers.content_type, await answer.read()) == (200, "text/x", b"hi")
            answer.close()
        assert server.connections == 1
        host = url.removeprefix("http://").encode()
        head = b"POST /v1/x HTTP/1.1\r\nhost: " + host + b"\r\naccept-encoding: identity\r\n"
        expected = head + b"x-a: 1\r\ncontent-length: 5\r\n\r\nbody3"
        assert server.requests[3] == expected


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
async def test_an_answer_may_come_in_pieces_of_any_size(client: EngineClient, step: int) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await server.request(reader)
            for start in range(0, len(STREAM), step):
                writer.write(STREAM[start : start + step])
                await writer.drain()
                await asyncio.sleep(0)

    async with serving(script) as (server, url):
        for way in ("read", "chunk", "pump"):
            answer = await client.post(f"{url}/", b"", {})
            got: list[bytes] = []
            if way == "read":
                got.append(await answer.read())
            elif way == "chunk":
                while piece := await answer.chunk():
                    got.append(piece)
            else:
                done: asyncio.Future[UpstreamError | None] = asyncio.get_running_loop().create_future()
                answer.pump(got.append, done.set_result)
                assert await done is None
            assert b"".join(got) == b"hello, world"
        assert server.connections == 1


async def test_a_connection_the_engine_closes_after_its_answer_costs_no_request(client: EngineClient) -> None:
    """The keep-alive race: the engine closes an idle socket while the request is written to it."""
    async with serving(OK, once=True) as (server, url):
        for _ in range(20):
            answer = await client.post(f"{url}/", b"x", {})
            assert await answer.read() == b"hi"
        assert server.connections == 20
        assert len(server.requests) == 20


async def test_a_stale_connection_is_replaced_even_when_the_close_is_not_seen_before_the_write(
    client: EngineClient,
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(OK)
        if server.connections == 1:
            await reader.read(1)  # the next request has begun to arrive: close without an answer
            return
        await reader.read()

    async with serving(script) as (server, url):
        for _ in range(2):
            answer = await client.post(f"{url}/", b"x", {})
            assert await answer.read() == b"hi"
        assert server.connections == 2


async def test_a_fresh_connection_that_is_closed_without_an_answer_is_an_error(client: EngineClient) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)

    async with serving(script) as (server, url):
        with pytest.raises(UpstreamError, match="without an answer"):
            await client.post(f"{url}/", b"x", {})
        assert server.connections == 1


async def test_a_late_loss_of_a_reused_connection_is_not_repeated(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_STALE_S", -1.0)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(OK)
        await server.request(reader)

    async with serving(script) as (server, url):
        await (await client.post(f"{url}/", b"x", {})).read()
        with pytest.raises(UpstreamError, match="without an answer"):
            await client.post(f"{url}/", b"x", {})
        assert server.connections == 1


async def test_an_answer_that_ends_with_its_connection(client: EngineClient) -> None:
    async with serving(b"HTTP/1.0 200 OK\r\n\r\nall of it", once=True) as (_, url):
        answer = await client.post(f"{url}/", b"x", {})
        assert await answer.read() == b"all of it"


async def test_connection_close_is_heeded(client: EngineClient) -> None:
    async with serving(OK.replace(b"content-type", b"connection: close\r\ncontent-type")) as (server, url):
        for _ in range(3):
            await (await client.post(f"{url}/", b"x", {})).read()
        assert server.connections == 3


async def test_interim_answers_are_passed_over(client: EngineClient) -> None:
    async with serving(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK) as (
        server,
        url,
    ):
        for _ in range(2):
            answer = await client.post(f"{url}/", b"x", {})
            assert (answer.status, await answer.read()) == (200, b"hi")
        assert server.connections == 1


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body(client: EngineClient, status: int) -> None:
    async with serving(b"HTTP/1.1 %d X\r\n\r\n" % status) as (server, url):
        for _ in range(2):
            answer = await client.post(f"{url}/", b"x", {})
            assert (answer.status, await answer.read()) == (status, b"")
        assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP"),
        (OK[:-1], "middle of its answer"),
        (STREAM[:-5], "middle of its answer"),
        (OK + b" and more", "not HTTP"),
        (STREAM.replace(b"7\r\n", b"zz\r\n"), "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x-a: " + b"a" * 300_000 + b"\r\n", "bytes of headers|middle of its answer"),
    ],
)
async def test_a_broken_answer_is_an_error_and_its_connection_is_not_used_again(
    client: EngineClient, answer: bytes, why: str
) -> None:
    async with serving(answer, once=True) as (_, url):
        with pytest.raises(UpstreamError, match=why):
            await (await client.post(f"{url}/", b"x", {})).read()
        for _ in range(2000):
            if not len(client):
                break
            await asyncio.sleep(0.01)
        assert len(client) == 0


async def test_what_comes_unasked_on_an_idle_connection_meets_no_request(client: EngineClient) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(OK)
        await writer.drain()
        if server.connections == 1:
            await asyncio.sleep(0.02)
            writer.write(OK.replace(b"hi", b"no"))
        await reader.read()

    async with serving(script) as (server, url):
        assert await (await client.post(f"{url}/", b"x", {})).read() == b"hi"
        await asyncio.wait_for(server.ended.wait(), 20)
        assert await (await client.post(f"{url}/", b"x", {})).read() == b"hi"
        assert server.connections == 2


async def test_cancelling_cuts_the_request_upstream(client: EngineClient) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        await reader.read()

    async with serving(script) as (server, url):
        posting = asyncio.create_task(client.post(f"{url}/", b"x", {}))
        await asyncio.wait_for(server.asked.wait(), 5)
        posting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posting
        await asyncio.wait_for(server.ended.wait(), 5)
        assert len(client) == 0


async def test_closing_a_half_read_answer_cuts_it(client: EngineClient) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(STREAM[:-5])
        await reader.read()

    async with serving(script) as (server, url):
        answer = await client.post(f"{url}/", b"x", {})
        assert await answer.chunk()
        answer.close()
        answer.close()
        await asyncio.wait_for(server.ended.wait(), 5)


async def test_a_refused_connection_is_not_connected(client: EngineClient) -> None:
    async with serving(OK) as (_, url):
        pass
    with pytest.raises(NotConnectedError, match=url.removeprefix("http://")):
        await client.post(f"{url}/", b"x", {})


async def test_an_unread_stream_is_throttled_at_its_engine(client: EngineClient) -> None:
    size = 64 * 1024 * 1024
    sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await server.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        piece = b"x" * 65_536
        while sent < size:
            writer.write(piece)
            sent += len(piece)
            await writer.drain()

    async with serving(script) as (server, url):
        answer = await client.post(f"{url}/", b"x", {})
        await answer.chunk()
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < size / 2, "without a reader the engine's stream goes into our memory"
        got = 0
        done: asyncio.Future[UpstreamError | None] = asyncio.get_running_loop().create_future()

        def sink(piece: bytes) -> None:
            nonlocal got
            got += len(piece)

        answer.pump(sink, done.set_result)
        assert await asyncio.wait_for(done, 20) is None
        assert got > size / 2


async def test_forgetting_an_engine_closes_its_idle_connections(client: EngineClient) -> None:
    async with serving(OK) as (server, url):
        await (await client.post(f"{url}/", b"x", {})).read()
        client.forget(url)
        await asyncio.wait_for(server.ended.wait(), 5)
        await (await client.post(f"{url}/", b"x", {})).read()
        assert server.connections == 2


async def test_idle_connections_are_closed_before_the_engine_would(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_KEEPALIVE_S", 0.5)
    async with serving(OK) as (server, url):
        await (await client.post(f"{url}/", b"x", {})).read()
        assert len(client) == 1
        await asyncio.wait_for(server.ended.wait(), 5)
        assert server.connections == 1


async def test_a_header_with_a_line_break_is_never_sent(client: EngineClient) -> None:
    async with serving(OK) as (server, url):
        for value in ("a\r\nx-b: 1", "a\nb", "a\rb"):
            with pytest.raises(ValueError, match="line break"):
                await client.post(f"{url}/", b"x", {"x-a": value})
        assert server.connections == 0
