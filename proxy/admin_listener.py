"""The admin listener: the admin endpoints on their own address, in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, cast

import uvicorn

from proxy.clients.bounded import BoundedProtocol
from proxy.clients.bounds import ClientBounds
from proxy.clients.listening import BoundedServer
from proxy.settings import AdminSettings

_BACKLOG = 128
_GRACE_S = 2
"""Seconds that running admin requests have after the proxy begins to shut down; most end at once, some never."""


@contextlib.asynccontextmanager
async def admin_listener(
    app: Any,
    bounds: ClientBounds,
    admin: AdminSettings,
    context: ssl.SSLContext | None,
    handshake_s: float,
    *,
    shared_port: bool = False,
) -> AsyncIterator[int]:
    """Serve ``app`` on the admin address (port 0: a free one) in the context; yields the port.

    Args:
        app: the application.
        bounds: those of its clients.
        admin: the address.
        context: TLS context; None: plain HTTP.
        handshake_s: bound on a TLS handshake.
        shared_port: other processes listen on it too.

    Raises:
        OSError: the address cannot be bound.
    """
    assert admin.port is not None
    bound = _bind(admin.host, admin.port, shared=shared_port)
    async with served(app, bounds, bound, context, handshake_s):
        yield bound.getsockname()[1]


@contextlib.asynccontextmanager
async def served(
    app: Any,
    bounds: ClientBounds,
    bound: socket.socket,
    context: ssl.SSLContext | None = None,
    handshake_s: float = 10.0,
) -> AsyncIterator[None]:
    """Serve ``app`` on a bound socket in the context, and close it.

    Raises:
        OSError: it cannot be listened on.
    """
    config = uvicorn.Config(
        app,
        http=cast(Any, partial(BoundedProtocol, bounds)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_context_factory=None if context is None else lambda _config, _default: context,
    )
    server = BoundedServer(config, handshake_s, bounds.refused_handshake)
    # Signals are handled by the main listener; this server stops with it.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[bound]), name="admin-listener")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise OSError(f"the listener on {bound.getsockname()} did not start")
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        try:
            await task
        finally:
            bound.close()


def _bind(host: str, port: int, *, shared: bool) -> socket.socket:
    try:
        return socket.create_server(
            (host, port),
            reuse_port=shared,
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
        )
    except OSError as error:
        raise OSError(error.errno, f"admin.host {host}, admin.port {port}: {error.strerror or error}") from error
