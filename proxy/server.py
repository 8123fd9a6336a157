"""Runs the application under uvicorn."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, cast

import uvicorn

from proxy.app import ProxyApp
from proxy.http_server import ProxyProtocol
from proxy.settings import Settings


def run(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; running streams get ``grace_s`` to finish."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.Server(server_config(settings)).run()


def server_config(settings: Settings) -> uvicorn.Config:
    """uvicorn's configuration for a proxy."""
    app = ProxyApp(settings)
    return uvicorn.Config(
        app,
        http=cast(Any, partial(ProxyProtocol, app.generation)),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(settings.grace_s)),
        backlog=4096,
    )
