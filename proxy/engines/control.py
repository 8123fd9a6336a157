"""GETs to engines outside the hot path: probes and identity questions, bounded in time and in bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import anyio
import httpx

MAX_BYTES = 16 * 1024 * 1024
"""vLLM's /metrics, the longest of these answers, stays under a megabyte."""


class Control:
    """One client for control traffic.

    A question that nobody waits for any more is not cancelled but left to its bound: httpx keeps a connection as busy
    for ever when a task of asyncio's is cancelled in the midst of it, and its pool has an end.

    Args:
        timeout_s: bound on one question, unless it has one of its own.
        connections: at most, over all engines.
    """

    def __init__(self, timeout_s: float, connections: int = 4096) -> None:
        self.timeout_s = timeout_s
        # The system's authorities, as for requests: httpx has a list of its own.
        self._client = httpx.AsyncClient(
            timeout=timeout_s,
            trust_env=False,
            verify=ssl.create_default_context(),
            # Bounded by `_room` instead: a question that ends while the pool lets it wait costs the pool a connection.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
        )
        self._room = anyio.Semaphore(connections)
        self._asking: set[asyncio.Task[httpx.Response]] = set()

    async def get(
        self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        """One whole answer.

        Raises:
            httpx.HTTPError: no answer in time, or one that is too long.
        """
        task = asyncio.create_task(self._get(url, headers, timeout_s or self.timeout_s), name=f"control {url}")
        self._asking.add(task)
        task.add_done_callback(self._asked)
        return await asyncio.shield(task)

    async def aclose(self) -> None:
        """End every question and close every connection."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._client.aclose()

    def _asked(self, task: asyncio.Task[httpx.Response]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

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
            raise httpx.ReadTimeout(f"no whole answer from {url} within {timeout_s:g} s") from error
        return httpx.Response(answer.status_code, content=b"".join(parts), request=answer.request)
