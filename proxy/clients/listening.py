"""uvicorn's server with a bound on TLS handshakes."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from functools import partial
from typing import Any, cast

import uvicorn

log = logging.getLogger("uvicorn.error")

_STARTUP_FAILURE = 3
"""Exit status, as of uvicorn."""
_CLOSE_S = 5.0
"""Bound in seconds on a client's reply to the end of TLS."""


class BoundedServer(uvicorn.Server):
    """Listens on one address or on given sockets.

    A connection whose handshake is not complete belongs to no protocol yet, so only the transport can end it; uvicorn
    leaves the transport's default of 60 s.

    Args:
        config: uvicorn's.
        handshake_s: bound on a TLS handshake, in seconds.
        shared_port: other processes listen on the address too, and the kernel spreads the connections.
    """

    def __init__(self, config: uvicorn.Config, handshake_s: float, *, shared_port: bool = False) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s
        self._shared_port = shared_port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen; ends the process if either fails, like uvicorn."""
        config = self.config
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(_STARTUP_FAILURE)
        protocol: Any = partial(
            cast(Any, config.http_protocol_class),
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"backlog": config.backlog}
        if config.ssl is not None:
            options |= {
                "ssl": config.ssl,
                "ssl_handshake_timeout": self._handshake_s,
                "ssl_shutdown_timeout": _CLOSE_S,
            }
        try:
            if sockets is None:
                if self._shared_port:
                    options["reuse_port"] = True
                self.servers = [await loop.create_server(protocol, config.host, config.port, **options)]
            else:
                self.servers = [await self._listen(protocol, each, options) for each in sockets]
        except OSError as error:
            log.error(error)
            await self.lifespan.shutdown()
            sys.exit(_STARTUP_FAILURE)
        if sockets is None:
            self._log_started_message(self.servers[0].sockets)
        self.started = True

    async def _listen(self, protocol: Any, bound: socket.socket, options: dict[str, Any]) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        if bound.family == socket.AF_UNIX:
            return await loop.create_unix_server(protocol, sock=bound, **options)
        return await loop.create_server(protocol, sock=bound, **options)
