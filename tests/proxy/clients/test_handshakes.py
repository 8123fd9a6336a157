"""The listener over TLS where descriptors are short."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from typing import Any

import pytest
import trustme

from proxy.clients.handshakes import Refusal, TlsListener


class Greeting(asyncio.Protocol):
    """Greets and leaves."""

    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


async def test_connections_wait_until_there_are_descriptors_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("proxy.clients.handshakes._PAUSE_S", 0.01)
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    refused: list[Refusal] = []
    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    failures = 0
    accept = socket.socket.accept

    def short(listening: socket.socket) -> tuple[socket.socket, object]:
        nonlocal failures
        if failures < 3:
            failures += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", short)
    listener = TlsListener([bound], Greeting, {"ssl": tls}, lambda reason, *_: refused.append(reason))
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        assert await reader.read() == b"hello"
        writer.close()
    finally:
        listener.close()
        await listener.end(5.0)
    assert (failures, refused) == (3, [])
    assert [each.getMessage() for each in caplog.records] == ["connections wait: Too many open files"]
