"""GETs to engines outside the hot path: probes and identity questions, with a bound on what they may answer."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

MAX_BYTES = 16 * 1024 * 1024
"""vLLM's /metrics, the longest of these answers, stays under a megabyte."""


async def probe(
    control: httpx.AsyncClient, url: str, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> httpx.Response:
    """One whole answer; ``timeout_s`` for each step of it, None: the client's own.

    Raises:
        httpx.HTTPError: no answer, or one that is too long.
    """
    timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
    parts: list[bytes] = []
    size = 0
    async with control.stream("GET", url, headers=headers, timeout=timeout) as answer:
        async for part in answer.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > MAX_BYTES:
                raise httpx.DecodingError(f"{url} answered more than {MAX_BYTES} bytes", request=answer.request)
    return httpx.Response(answer.status_code, content=b"".join(parts), request=answer.request)
