"""The narrow door to the engines on the hot path. aiohttp behind it today; nothing else in the proxy knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import aiohttp


class UpstreamError(Exception):
    """An engine could not be reached, or its answer broke off."""


class NotConnectedError(UpstreamError):
    """The engine refused the connection or did not accept it in time: it has seen nothing of the request."""


class Answer(Protocol):
    """An engine's answer: status and headers are there, the body may still come."""

    status: int
    content_type: str

    async def chunk(self) -> bytes:
        """Next piece of the body as it arrived; empty at the end. Raises UpstreamError when it breaks off."""
        ...

    async def read(self) -> bytes:
        """The whole body. Raises UpstreamError when it breaks off."""
        ...

    def close(self) -> None:
        """Give the connection back when the body was read to its end, else cut it, which aborts the request."""
        ...


class Upstream(Protocol):
    """Posts a body to an engine."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send; return once status and headers are there.

        Cancelling aborts the request upstream. Raises NotConnectedError or UpstreamError.
        """
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class _AiohttpAnswer:
    __slots__ = ("_response", "content_type", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")

    async def chunk(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UpstreamError(_describe(error)) from error

    async def read(self) -> bytes:
        try:
            return await self._response.content.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UpstreamError(_describe(error)) from error

    def close(self) -> None:
        if self._response.content.is_eof():
            self._response.release()
        else:
            self._response.close()


class AiohttpUpstream:
    """``Upstream`` over one aiohttp session: no pool limit, no decompression, no redirects."""

    # vLLM's HTTP server closes idle sockets after 5 s; ours must go first, or a request may meet a closing socket.
    _KEEPALIVE_S = 2.0

    def __init__(self, connect_timeout_s: float, total_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=total_timeout_s, sock_connect=connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """See ``Upstream.post``."""
        try:
            return _AiohttpAnswer(await self._session.post(url, data=body, headers=headers, allow_redirects=False))
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise NotConnectedError(_describe(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UpstreamError(_describe(error)) from error

    async def close(self) -> None:
        """See ``Upstream.close``."""
        await self._session.close()


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
