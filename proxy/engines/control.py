"""GET requests to engines outside the hot path: probes and identity queries, bounded in time and in bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping

import anyio
import httpx

from proxy.resolver import Resolver

MAX_BYTES = 16 * 1024 * 1024
"""vLLM's /metrics, the longest of these answers, stays under a megabyte."""


class Control:
    """HTTP client for control traffic.

    A query whose caller is cancelled is not cancelled but runs to its bound: when an asyncio task is cancelled during a
    request, httpx keeps the connection marked as busy forever, and its pool is finite.

    Args:
        timeout_s: default bound on one query, in seconds.
        resolver: resolves the engines' host names.
        connections: maximum number over all engines.
    """

    def __init__(self, timeout_s: float, resolver: Resolver | None = None, connections: int = 4096) -> None:
        self.timeout_s = timeout_s
        self._resolver = resolver or Resolver()
        # The system's certificate authorities, as for requests: httpx ships its own list.
        self._tls = ssl.create_default_context()
        self._connections = connections
        self._clients = {"": self._new_client()}
        self._room = anyio.Semaphore(connections)
        self._queries: set[asyncio.Task[httpx.Response]] = set()

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            timeout=self.timeout_s,
            trust_env=False,
            verify=self._tls,
            # Bounded by `_room` instead: a query that ends while waiting for the pool leaks a connection of the pool.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._connections),
        )

    async def get(
        self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        """GET ``url`` and return the complete answer.

        Raises:
            httpx.HTTPError: no answer within ``timeout_s``, or a longer one than ``MAX_BYTES``.
        """
        task = asyncio.create_task(self._get(url, headers, timeout_s or self.timeout_s), name=f"control {url}")
        self._queries.add(task)
        task.add_done_callback(self._query_done)
        return await asyncio.shield(task)

    async def aclose(self) -> None:
        """Cancel all queries and close all connections."""
        for task in self._queries:
            task.cancel()
        await asyncio.gather(*self._queries, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()

    def _query_done(self, task: asyncio.Task[httpx.Response]) -> None:
        self._queries.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone

    async def _get(self, url: str, headers: Mapping[str, str] | None, timeout_s: float) -> httpx.Response:
        try:
            with anyio.fail_after(timeout_s):
                async with self._room:
                    return await self._get_from_any(httpx.URL(url), dict(headers or {}), timeout_s)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete answer from {url} within {timeout_s:g} s") from error

    async def _get_from_any(self, url: httpx.URL, headers: dict[str, str], timeout_s: float) -> httpx.Response:
        """GET from the first address of the URL's host that accepts a connection."""
        host = url.host
        try:
            addresses = await self._resolver.addresses(host)
        except OSError as error:
            raise httpx.ConnectError(f"{host} cannot be resolved: {error}") from error
        if addresses == (host,):
            return await self._get_at(self._clients[""], url, url, headers, timeout_s)
        headers["host"] = url.netloc.decode("ascii")
        # A connection of TLS is for the name that its certificate proved, not for any name of the address.
        pool = host if url.scheme == "https" else ""
        client = self._clients.setdefault(pool, self._clients.get(pool) or self._new_client())
        for address in addresses[:-1]:
            with contextlib.suppress(httpx.ConnectError):
                return await self._get_at(client, url.copy_with(host=address), url, headers, timeout_s)
        return await self._get_at(client, url.copy_with(host=addresses[-1]), url, headers, timeout_s)

    async def _get_at(
        self, client: httpx.AsyncClient, at: httpx.URL, url: httpx.URL, headers: dict[str, str], timeout_s: float
    ) -> httpx.Response:
        parts: list[bytes] = []
        size = 0
        extensions = {"sni_hostname": url.host} if at is not url else {}
        async with client.stream("GET", at, headers=headers, timeout=timeout_s, extensions=extensions) as answer:
            async for part in answer.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > MAX_BYTES:
                    raise httpx.DecodingError(f"{url} answered more than {MAX_BYTES} bytes")
        return httpx.Response(answer.status_code, content=b"".join(parts), request=httpx.Request("GET", url))
