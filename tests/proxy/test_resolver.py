"""Names of engines: looked up without blocking anything else, and connected to over HTTP and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import trustme

from proxy import resolver
from proxy.engines.client import EngineClient
from proxy.engines.control import Control
from proxy.engines.upstream import NotAcceptedError, NotConnectedError
from proxy.resolver import Resolver

LookUp = Callable[[str], tuple[str, ...]]


class NameServer:
    """Replaces ``look_up``. Names in ``hanging`` are answered after ``release`` only."""

    def __init__(self, **known: tuple[str, ...]) -> None:
        self.known = known
        self.hanging: set[str] = set()
        self.failure: OSError | None = None
        self.asked: list[str] = []
        self._released = threading.Event()

    def look_up(self, host: str) -> tuple[str, ...]:
        self.asked.append(host)
        if host in self.hanging:
            self._released.wait(60.0)
        if self.failure is not None:
            raise self.failure
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.known[host]

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer(here=("127.0.0.1",), both=("127.0.0.2", "127.0.0.1"), away=("127.0.0.2",))
    monkeypatch.setattr(resolver, "look_up", server.look_up)
    monkeypatch.setattr(resolver, "_PATIENCE_S", 0.01)
    yield server
    server.release()


@contextlib.asynccontextmanager
async def http_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[bytes]]]:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1], heads
    finally:
        server.close()


def test_look_up_resolves_names_of_this_machine() -> None:
    assert "127.0.0.1" in resolver.look_up("localhost")


async def test_addresses_are_not_looked_up(name_server: NameServer) -> None:
    for address in ("127.0.0.1", "::1"):
        assert await Resolver().addresses(address) == (address,)
    assert not name_server.asked


async def test_a_name_is_looked_up_once_for_all_that_wait_and_again_when_it_is_no_longer_fresh(
    name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Resolver()
    found = await asyncio.gather(*(names.addresses("here") for _ in range(50)))
    assert set(found) == {("127.0.0.1",)}
    assert name_server.asked == ["here"]
    monkeypatch.setattr(resolver, "_FRESH_S", 0.0)
    name_server.known["here"] = ("127.0.0.9",)
    monkeypatch.setattr(resolver, "_PATIENCE_S", 30.0)
    assert await names.addresses("here") == ("127.0.0.9",)
    assert name_server.asked == ["here", "here"]


async def test_a_known_address_is_used_while_the_name_server_is_slow_or_fails(
    name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Resolver()
    assert await names.addresses("here") == ("127.0.0.1",)
    monkeypatch.setattr(resolver, "_FRESH_S", 0.0)
    name_server.hanging.add("here")
    before = threading.active_count()
    for _ in range(20):
        assert await names.addresses("here") == ("127.0.0.1",)
    assert threading.active_count() <= before + 1, "one lookup at a time"
    assert len(name_server.asked) == 2
    name_server.failure = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    name_server.release()
    monkeypatch.setattr(resolver, "_PATIENCE_S", 30.0)
    assert await names.addresses("here") == ("127.0.0.1",)
    name_server.failure = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(socket.gaierror):
        await names.addresses("here")


async def test_a_caller_that_gives_up_does_not_end_the_lookup_of_the_others(name_server: NameServer) -> None:
    names = Resolver()
    name_server.hanging.add("here")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await names.addresses("here")
    waiting = asyncio.create_task(names.addresses("here"))
    await asyncio.sleep(0)
    name_server.release()
    assert await waiting == ("127.0.0.1",)
    assert name_server.asked == ["here"]


async def test_the_next_address_is_tried_when_one_refuses(name_server: NameServer) -> None:
    async with http_server() as (port, heads):
        client, control = EngineClient(5.0), Control(5.0)
        answer = await client.post(f"http://both:{port}/x", b"{}", {})
        assert (answer.status, await answer.read()) == (200, b"hi")
        assert (await control.get(f"http://both:{port}/health")).content == b"hi"
        assert [f"host: both:{port}".encode() in head.lower() for head in heads] == [True, True]
        with pytest.raises(NotConnectedError):
            await client.post(f"http://away:{port}/x", b"{}", {})
        with pytest.raises(httpx.ConnectError):
            await control.get(f"http://away:{port}/health")
        await client.close()
        await control.aclose()


async def test_a_name_that_does_not_exist_is_a_refused_connection(name_server: NameServer) -> None:
    client, control = EngineClient(5.0), Control(5.0)
    with pytest.raises(NotConnectedError, match="Name or service not known"):
        await client.post("http://nobody/x", b"{}", {})
    with pytest.raises(httpx.ConnectError, match="Name or service not known"):
        await control.get("http://nobody/health")
    await client.close()
    await control.aclose()


async def test_a_name_that_is_not_answered_is_a_connection_that_is_late(name_server: NameServer) -> None:
    name_server.hanging.add("here")
    client, control = EngineClient(0.05), Control(0.05)
    with pytest.raises(NotAcceptedError):
        await client.post("http://here/x", b"{}", {})
    with pytest.raises(httpx.TimeoutException):
        await control.get("http://here/health")
    await client.close()
    await control.aclose()


async def test_certificates_are_checked_against_the_name_and_not_the_address(
    name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, theirs = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("engine.test").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)
    monkeypatch.setattr(ssl, "create_default_context", lambda *_: ours)
    name_server.known["engine.test"] = name_server.known["other.test"] = ("127.0.0.1",)
    async with http_server(theirs) as (port, _):
        client, control = EngineClient(5.0), Control(5.0)
        answer = await client.post(f"https://engine.test:{port}/x", b"{}", {})
        assert await answer.read() == b"hi"
        for _ in range(2):
            assert (await control.get(f"https://engine.test:{port}/health")).content == b"hi"
        # An open connection to the same address proves nothing about another name.
        with pytest.raises(httpx.ConnectError):
            await control.get(f"https://other.test:{port}/health")
        with pytest.raises(NotConnectedError):
            await client.post(f"https://other.test:{port}/x", b"{}", {})
        await client.close()
        await control.aclose()
