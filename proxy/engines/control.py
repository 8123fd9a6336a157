"""GET requests to engines outside the hot path: probes and identity queries, bounded in time and in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import lru_cache

import httpx

from proxy.engines.client import EngineClient
from proxy.engines.upstream import NotConnectedError, UpstreamError
from proxy.resolver import Resolver

MAX_BYTES = 16 * 1024 * 1024
"""vLLM's /metrics, the longest of these answers, stays under a megabyte."""
_CONNECT_S = 3600.0
"""Bound on connecting, which a query's own bound is always shorter than."""


class Control:
    """HTTP client for control traffic, with httpx's answers and errors.

    Its connections are ``EngineClient``'s, in a pool of their own: httpx's needed a millisecond of CPU for each query,
    an eighth of a core for the probes of 64 engines.

    Args:
        timeout_s: default bound on one query, in seconds.
        resolver: resolves the engines' host names.
    """

    def __init__(self, timeout_s: float, resolver: Resolver | None = None) -> None:
        self.timeout_s = timeout_s
        self._resolver = resolver or Resolver()
        self._client: EngineClient | None = None

    async def get(
        self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        """GET ``url`` and return the complete answer.

        Raises:
            httpx.HTTPError: no answer within ``timeout_s``, or a longer one than ``MAX_BYTES``.
        """
        bound_s = timeout_s or self.timeout_s
        if self._client is None:  # here, where a loop runs
            self._client = EngineClient(_CONNECT_S, self._resolver)
        try:
            async with asyncio.timeout(bound_s):
                status, body = await _answer_of(self._client, url, headers or {})
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete answer from {url} within {bound_s:g} s") from error
        except NotConnectedError as error:
            raise httpx.ConnectError(str(error)) from error
        except UpstreamError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        return httpx.Response(status, content=body, request=_request(url))

    async def aclose(self) -> None:
        """Close all connections; queries in progress fail."""
        if self._client is not None:
            await self._client.close()


@lru_cache(maxsize=1024)
def _request(url: str) -> httpx.Request:
    """The request that an answer names in its errors; probes repeat the same few URLs."""
    return httpx.Request("GET", url)


async def _answer_of(client: EngineClient, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Status and body. Raises UpstreamError, and httpx.DecodingError for too long a body."""
    answer = await client.send("GET", url, b"", headers)
    parts: list[bytes] = []
    size = 0
    try:
        while part := await answer.chunk():
            parts.append(part)
            size += len(part)
            if size > MAX_BYTES:
                raise httpx.DecodingError(f"{url} answered more than {MAX_BYTES} bytes")
    finally:
        answer.close()
    return answer.status, b"".join(parts)
