"""The admin listener: the admin endpoints on their own address, in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

_BACKLOG = 128
_GRACE_S = 2
"""Seconds that running admin requests have after the proxy begins to shut down; most end at once, some never."""


@contextlib.asynccontextmanager
async def admin_listener(app: Any, host: str, port: int, tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    """Serve ``app`` on ``host``:``port`` (0: a free port) in the context; yields the port.

    Raises:
        OSError: the address cannot be bound.
    """
    bound = _bind(host, port)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
    )
    server = uvicorn.Server(config)
    # Signals are handled by the main listener; this server stops with it.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[bound]), name="admin-listener")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise OSError(f"the admin listener on {host} did not start")
            await asyncio.sleep(0.01)
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        try:
            await task
        finally:
            bound.close()


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
        )
    except OSError as error:
        raise OSError(error.errno, f"admin.host {host}, admin.port {port}: {error.strerror or error}") from error
