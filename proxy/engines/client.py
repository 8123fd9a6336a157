"""``Upstream`` over pooled connections per engine, with a fix for the keep-alive race."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from proxy.engines.connection import ConnectionLostError, EngineAnswer, EngineConnection
from proxy.engines.shortage import own_shortage
from proxy.engines.upstream import (
    LostAndRefusedError,
    NoSocketError,
    NotAcceptedError,
    NotConnectedError,
    UpstreamError,
)
from proxy.resolver import Resolver

_KEEPALIVE_S = 2.0
"""vLLM's HTTP server closes idle sockets after 5 s; ours must go first, or a request may meet a closing socket."""
_STALE_S = 1.0
"""A reused connection lost this soon, without an answer byte, was already closing when the request was written."""


@dataclass(slots=True, eq=False)
class _Origin:
    """One engine's address and its idle connections, most recently used last."""

    host: str
    port: int
    tls: bool
    authority: str
    base_url: str
    idle: list[EngineConnection] = field(default_factory=list)


class EngineClient:
    """``Upstream`` without redirects, decompression, cookies, proxies or a bound on connections.

    Args:
        connect_timeout_s: bound on opening a connection, its name's lookup included, in seconds.
        resolver: resolves the engines' host names.
    """

    def __init__(self, connect_timeout_s: float, resolver: Resolver | None = None) -> None:
        self.connect_timeout_s = connect_timeout_s
        self._resolver = resolver or Resolver()
        self._loop = asyncio.get_running_loop()
        self._origins: dict[str, _Origin] = {}
        self._targets: dict[str, tuple[_Origin, bytes]] = {}
        self._open: dict[EngineConnection, _Origin] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._closed = False
        self._all_gone: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Coroutine[Any, Any, EngineAnswer]:
        origin, start = self._targets.get(url) or self._target(url)
        return self._send(origin, start, url, body, headers)

    def send(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> Coroutine[Any, Any, EngineAnswer]:
        origin, start = self._start(method, url)
        return self._send(origin, start, url, body, headers)

    async def _send(
        self, origin: _Origin, start: bytes, url: str, body: bytes, headers: Mapping[str, str]
    ) -> EngineAnswer:
        head = _head(start, headers, len(body))
        connection = self._idle(origin)
        if connection is not None:
            sent_s = self._loop.time()
            try:
                return await self._exchange(connection, url, head, body)
            except ConnectionLostError:
                # Closed by the engine before it read the request; a later loss may be caused by the request.
                if self._loop.time() - sent_s > _STALE_S:
                    raise
                return await self._exchange(await self._reconnect(origin), url, head, body)
        return await self._exchange(await self._connect(origin), url, head, body)

    def in_use(self, base_url: str) -> int:
        return len(self._busy(base_url))

    def cut(self, base_url: str, why: str) -> None:
        for connection in self._busy(base_url):
            connection.cut(why)

    def _busy(self, base_url: str) -> list[EngineConnection]:
        # By URL and not by address: engines behind one gateway differ in their path only.
        start = base_url.rstrip("/") + "/"
        return [each for each in self._open if each.url.startswith(start) and not each.usable]

    def forget(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        origin = self._origins.pop(f"{parts.scheme}://{parts.netloc}", None)
        if origin is None:
            return
        self._targets = {url: target for url, target in self._targets.items() if target[0] is not origin}
        for connection in origin.idle:
            connection.cut()
        origin.idle.clear()
        self._resolver.forget(origin.host)

    async def close(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._open):
            connection.cut()
        if self._open:  # an aborted transport reports its end in a later turn of the loop
            self._all_gone = self._loop.create_future()
            await self._all_gone

    async def _exchange(self, connection: EngineConnection, url: str, head: bytes, body: bytes) -> EngineAnswer:
        connection.url = url
        answer = connection.send(head, body)
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def _target(self, url: str) -> tuple[_Origin, bytes]:
        target = self._targets[url] = self._start("POST", url)
        return target

    def _start(self, method: str, url: str) -> tuple[_Origin, bytes]:
        """The engine's address, and the first lines of a request."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        base_url = f"{parts.scheme}://{parts.netloc}"
        origin = self._origins.get(base_url)
        if origin is None:
            tls = parts.scheme == "https"
            origin = _Origin(parts.hostname, parts.port or (443 if tls else 80), tls, parts.netloc, base_url)
            self._origins[base_url] = origin
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # The proxy reads usage and events from answers, so it requests them uncompressed.
        start = f"{method} {path} HTTP/1.1\r\nhost: {origin.authority}\r\naccept-encoding: identity\r\n".encode(
            "latin-1"
        )
        return origin, start

    def _idle(self, origin: _Origin) -> EngineConnection | None:
        oldest_s = self._loop.time() - _KEEPALIVE_S
        while origin.idle:
            connection = origin.idle.pop()
            if not connection.usable:
                continue
            if connection.idle_since_s >= oldest_s and connection.silent:
                return connection
            connection.cut()
        return None

    async def _reconnect(self, origin: _Origin) -> EngineConnection:
        """A new connection after a reused one was lost with a request on it."""
        try:
            return await self._connect(origin)
        except NotAcceptedError:
            raise
        except NotConnectedError as error:
            raise LostAndRefusedError(f"closed the connection without an answer, then: {error}") from error

    async def _connect(self, origin: _Origin) -> EngineConnection:
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                connection = await self._connect_to_any(origin)
        except TimeoutError as error:
            raise NotAcceptedError(
                f"no connection to {origin.authority} within {self.connect_timeout_s:g} s"
            ) from error
        except OSError as error:
            shortage = own_shortage(error)
            if shortage is not None:
                raise NoSocketError(
                    f"no connection to {origin.authority}: this proxy is out of sockets: {shortage} "
                    "(limits.connections, ulimit -n)"
                ) from error
            raise NotConnectedError(f"no connection to {origin.authority}: {error}") from error
        self._open[connection] = origin
        if self._closed or not connection.usable:
            connection.cut()
            raise UpstreamError(f"the connection to {origin.authority} was closed immediately")
        return connection

    async def _connect_to_any(self, origin: _Origin) -> EngineConnection:
        """Connect to the first address that accepts. Raises OSError, the last address's if there are several."""
        failure = OSError("the name has no address")
        for address in await self._resolver.addresses(origin.host):
            try:
                _, connection = await self._loop.create_connection(
                    lambda: EngineConnection(self._released, self._gone),
                    address,
                    origin.port,
                    ssl=self._tls_context() if origin.tls else None,
                    server_hostname=origin.host if origin.tls else None,
                )
            except OSError as error:
                failure = error
            else:
                return connection
        try:
            raise failure
        finally:
            del failure  # it references this frame

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _released(self, connection: EngineConnection) -> None:
        origin = self._open.get(connection)
        if origin is None or self._closed or self._origins.get(origin.base_url) is not origin:
            connection.cut()
            return
        connection.idle_since_s = self._loop.time()
        origin.idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_KEEPALIVE_S, self._sweep)

    def _gone(self, connection: EngineConnection) -> None:
        origin = self._open.pop(connection, None)
        if origin is not None and connection in origin.idle:
            origin.idle.remove(connection)
        if self._all_gone is not None and not self._open and not self._all_gone.done():
            self._all_gone.set_result(None)

    def _sweep(self) -> None:
        """Close connections that have been idle for too long; reschedules itself while any are idle."""
        self._sweeper = None
        oldest_s = self._loop.time() - _KEEPALIVE_S
        left = False
        for origin in self._origins.values():
            for connection in [each for each in origin.idle if each.idle_since_s < oldest_s]:
                origin.idle.remove(connection)
                connection.cut()
            left = left or bool(origin.idle)
        if left:
            self._sweeper = self._loop.call_later(_KEEPALIVE_S / 2, self._sweep)


def _head(start: bytes, headers: Mapping[str, str], length: int) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header holds a line break")
    return start + f"{lines}content-length: {length}\r\n\r\n".encode("latin-1")
