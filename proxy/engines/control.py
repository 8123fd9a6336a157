"""GET requests to engines outside the hot path: probes and identity queries, bounded in time and in bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import anyio
import httpx

MAX_BYTES = 16 * 1024 * 1024
"""vLLM's /metrics, the longest of these answers, stays under a megabyte."""


class Control:
    """HTTP client for control traffic.

    A query whose caller is cancelled is not cancelled but runs to its bound: when an asyncio task is cancelled during a
    request, httpx keeps the connection marked as busy forever, and its pool is finite.

    Args:
        timeout_s: default bound on one query, in seconds.
        connections: maximum number over all engines.
    """

    def __init__(self, timeout_s: float, connections: int = 4096) -> None:
        self.timeout_s = timeout_s
        # The system's certificate authorities, as for requests: httpx ships its own list.
        self._client = httpx.AsyncClient(
            timeout=timeout_s,
            trust_env=False,
            verify=ssl.create_default_context(),
            # Bounded by `_room` instead: a query that ends while waiting for the pool leaks a connection of the pool.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
        )
        self._room = anyio.Semaphore(connections)
        self._queries: set[asyncio.Task[httpx.Response]] = set()

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
        await self._client.aclose()

    def _query_done(self, task: asyncio.Task[httpx.Response]) -> None:
        self._queries.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone

    async def _get(self, url: str, headers: Mapping[str, str] | None, timeout_s: float) -> httpx.Response:
        parts: list[bytes] = []
        size = 0
        try:
            with anyio.fail_after(timeout_s):
                async with (
                    self._room,
                    self._client.stream("GET", url, headers=headers, timeout=timeout_s) as answer,
                ):
                    async for part in answer.aiter_bytes():
                        parts.append(part)
                        size += len(part)
                        if size > MAX_BYTES:
                            raise httpx.DecodingError(f"{url} answered more than {MAX_BYTES} bytes")
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete answer from {url} within {timeout_s:g} s") from error
        return httpx.Response(answer.status_code, content=b"".join(parts), request=answer.request)
