"""uvicorn's server with a bound on TLS handshakes, and an end of listening that loses no connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import uvicorn

from proxy.clients.handshakes import OnRefused, TlsListener

log = logging.getLogger("uvicorn.error")

_STARTUP_FAILURE = 3
"""Exit status, as of uvicorn."""
_CLOSE_S = 5.0
"""Bound in seconds on a client's reply to the end of TLS."""
_LAST_HANDSHAKES_S = 1.0
"""Bound in seconds on the TLS handshakes of connections that are accepted when the listener closes."""


class BoundedServer(uvicorn.Server):
    """Listens on one address or on given sockets.

    A connection whose handshake is not complete belongs to no protocol yet, so only the transport can end it; uvicorn
    leaves the transport's default of 60 s.

    Args:
        config: uvicorn's.
        handshake_s: bound on a TLS handshake, in seconds.
        on_refused: called for each TLS handshake that is refused.
        shared_port: other processes listen on the address too, and the kernel spreads the connections.
    """

    def __init__(
        self, config: uvicorn.Config, handshake_s: float, on_refused: OnRefused, *, shared_port: bool = False
    ) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s
        self._on_refused = on_refused
        self._shared_port = shared_port
        self._protocol: Any = None
        self._tls: dict[str, Any] = {}
        self._secure: list[TlsListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen; ends the process if either fails, like uvicorn."""
        config = self.config
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(_STARTUP_FAILURE)
        self._protocol = partial(
            cast(Any, config.http_protocol_class),
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        if config.ssl is not None:
            self._tls = {
                "ssl": config.ssl,
                "ssl_handshake_timeout": self._handshake_s,
                "ssl_shutdown_timeout": _CLOSE_S,
            }
        options: dict[str, Any] = {"backlog": config.backlog}
        try:
            if sockets is None:
                if self._shared_port:
                    options["reuse_port"] = True
                server = await loop.create_server(
                    self._protocol, config.host, config.port, start_serving=not self._tls, **options
                )
                self.servers = [server]
                if self._tls:
                    self.servers = [self._secured(_copies([server]))]
                    server.close()
            else:
                self.servers = [await self._listen(each, options) for each in sockets]
        except OSError as error:
            log.error(error)
            await self.lifespan.shutdown()
            sys.exit(_STARTUP_FAILURE)
        if sockets is None:
            self._log_started_message(self.servers[0].sockets)
        self.started = True

    async def stop_listening(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listeners, and serve the connections that the kernel had accepted for them.

        The kernel resets those that nobody has fetched when a listener closes. Their clients may have sent a request,
        which a load balancer must not send again. Without descriptors to fetch them they are reset; the requests that
        run are served in either case.
        """
        listening = _copies(self.servers)
        for server in (*self.servers, *(sockets or ())):
            server.close()
        accepted: list[tuple[socket.socket, Any]] = []
        for each in listening:
            each.setblocking(False)
            with contextlib.suppress(OSError), each:  # it has no more, or there are no descriptors
                for _ in range(self.config.backlog + 1):  # as many as wait: more may come all the time
                    accepted.append(each.accept())
        if self._secure:
            for connection, address in accepted:
                self._secure[0].take(connection, address)
            await self._end_handshakes(_LAST_HANDSHAKES_S)
        else:
            await asyncio.gather(*(self._take(connection) for connection, _ in accepted))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, handshakes included."""
        await super().shutdown(sockets)
        await self._end_handshakes(0.0)

    async def _end_handshakes(self, timeout_s: float) -> None:
        await asyncio.gather(*(each.end(timeout_s) for each in self._secure))

    async def _take(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        with contextlib.suppress(OSError):  # the client is gone
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, accepted)

    def _secured(self, sockets: list[socket.socket]) -> asyncio.Server:
        """Listener over TLS on bound sockets, which it closes at its end."""
        for each in sockets:
            each.listen(self.config.backlog)
        self._secure.append(TlsListener(sockets, self._protocol, self._tls, self._on_refused))
        return cast(asyncio.Server, self._secure[-1])

    async def _listen(self, bound: socket.socket, options: dict[str, Any]) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        if bound.family == socket.AF_UNIX:
            return await loop.create_unix_server(self._protocol, sock=bound, **options)
        if self._tls:
            return self._secured([bound.dup()])
        return await loop.create_server(self._protocol, sock=bound, **options)


def _copies(servers: Iterable[asyncio.Server]) -> list[socket.socket]:
    """Further descriptors of the listening sockets, open after their servers close; fewer if there is a shortage."""
    copies: list[socket.socket] = []
    try:
        for each in (each for server in servers for each in server.sockets):
            copies.append(socket.socket(fileno=os.dup(each.fileno())))
    except OSError as error:
        log.warning("connections that were not accepted yet are reset: %s", error.strerror)
    return copies
