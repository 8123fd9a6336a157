"""Runs the application under uvicorn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn

from proxy import memory
from proxy.app import ProxyApp
from proxy.clients.bounds import raise_descriptor_limit
from proxy.clients.protocol import ProxyProtocol
from proxy.gather.place import Place
from proxy.operations.shutdown import ProxyServer
from proxy.settings import Settings
from proxy.start.begin import begin


def run(settings: Settings, load: Callable[[], Settings]) -> None:
    """Serve until SIGINT or SIGTERM; running streams get ``grace_s`` seconds. SIGHUP applies what ``load`` reads.

    Raises:
        ListenError: an address is in use, or not of this machine.
        SettingsError: a file that the settings name cannot be used.
        TokenizerError: the tokenizer cannot be loaded.
    """
    raise_descriptor_limit()
    begin(settings)
    config = server_config(settings)
    app = cast(ProxyApp, config.app)
    app.operations.reloader.load = load
    memory.tune()
    ProxyServer(config, app.core, app.operations.reloader.on_hangup).run()


def server_config(settings: Settings, place: Place | None = None) -> uvicorn.Config:
    """uvicorn's configuration for a proxy; ``place``: among several workers, None: the only one."""
    app = ProxyApp(settings, place)
    tls = app.core.certificate.context
    return uvicorn.Config(
        app,
        http=cast(Any, partial(ProxyProtocol, app.generation)),
        ws="none",
        host=settings.host,
        port=settings.port,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(settings.grace_s)),
        backlog=4096,
    )
