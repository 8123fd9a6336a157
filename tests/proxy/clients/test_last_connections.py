"""Connections that the kernel has accepted when the listener closes."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from proxy.clients.listening import BoundedServer


async def app(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_a_request_sent_before_the_listener_closed_is_answered_and_later_ones_are_refused() -> None:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="error")
    config.load()
    server = BoundedServer(config, handshake_s=10.0)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    address = server.servers[0].sockets[0].getsockname()
    # Without a turn of the loop, which would accept it.
    client = socket.create_connection(address)
    client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    await server.stop_listening()
    reader, writer = await asyncio.open_connection(sock=client)
    assert (await reader.read()).startswith(b"HTTP/1.1 204 ")
    writer.close()
    with socket.socket() as later:
        assert later.connect_ex(address) != 0
