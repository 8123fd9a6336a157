"""Connections that the kernel has accepted when the listener closes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
from typing import Any

import pytest
import trustme
import uvicorn

from proxy.clients.listening import BoundedServer


async def app(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def listening(**options: Any) -> tuple[BoundedServer, Any]:
    """A server that listens, and its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="error", **options)
    config.load()
    server = BoundedServer(config, 60.0, lambda *_: None)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    return server, server.servers[0].sockets[0].getsockname()


async def test_a_request_sent_before_the_listener_closed_is_answered_and_later_ones_are_refused() -> None:
    server, address = await listening()
    # Without a turn of the loop, which would accept it.
    client = socket.create_connection(address)
    client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    await server.stop_listening()
    reader, writer = await asyncio.open_connection(sock=client)
    assert (await reader.read()).startswith(b"HTTP/1.1 204 ")
    writer.close()
    with socket.socket() as later:
        assert later.connect_ex(address) != 0


async def test_without_descriptors_the_listener_closes_and_open_connections_are_served() -> None:
    server, address = await listening()
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(1_000):
        if server.server_state.connections:
            break
        await asyncio.sleep(0.02)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        await server.stop_listening()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 204 ")
    writer.close()
    with socket.socket() as later:
        assert later.connect_ex(address) != 0


async def test_no_more_connections_are_served_than_can_wait_however_many_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, _ = await listening(backlog=4)
    clients: list[socket.socket] = []

    def accept(_: socket.socket) -> tuple[socket.socket, None]:
        """A listener that always has one more."""
        assert len(clients) < 100
        ours, theirs = socket.socketpair()
        clients.append(theirs)
        return ours, None

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", accept)
        await server.stop_listening()
    assert len(clients) == 5
    for connection in list(server.server_state.connections):
        connection.shutdown()
    for client in clients:
        client.close()


async def test_handshakes_that_are_not_complete_have_ended_when_it_returns() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    server, address = await listening(ssl_context_factory=lambda _config, _default: context)
    before = asyncio.all_tasks()
    with socket.create_connection(address) as client:  # it never begins
        await server.stop_listening()
        assert asyncio.all_tasks() <= before
        client.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=client)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
