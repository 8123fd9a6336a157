"""The proxy's recycle requests, and engines that are dead behind a live API server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from launch.run.proxy_access import ProxyAccess

DRAIN_LIMIT_S = 30.0
"""An engine is stopped this long after its recycle request was first seen, idle or not."""
DEAD_AFTER = 3
"""Server errors from /health in a row that make an engine dead."""


class RecycleRequests:
    """Recycle requests in the proxy's ``GET /instances``, tracked over time.

    Args:
        drain_limit_s: longest wait for an engine to become idle; default `DRAIN_LIMIT_S`.
        clock: seconds from any fixed moment.
    """

    def __init__(self, drain_limit_s: float = DRAIN_LIMIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._drain_limit_s = drain_limit_s
        self._clock = clock
        self._first_seen: dict[str, float] = {}
        self._approved: set[str] = set()
        """Recycled, but not yet noticed by the proxy: its row still describes the previous engine."""

    def due(self, rows: list[dict[str, Any]]) -> dict[str, str]:
        """Engines to recycle now, with the proxy's reason: those that are idle or have drained long enough.

        An engine is recycled for any of its data-parallel ranks, and is idle if all of them are.
        """
        now = self._clock()
        requests: dict[str, int] = {}
        reasons: dict[str, str] = {}
        for row in rows:
            name = _engine_of(row)
            requests[name] = requests.get(name, 0) + (row.get("requests") or 0)
            if row.get("recycle_wanted"):
                reasons.setdefault(name, str(row["recycle_wanted"]))
        self._approved -= requests.keys() - reasons.keys()
        wanted = {name: reason for name, reason in reasons.items() if name not in self._approved}
        self._first_seen = {name: self._first_seen.get(name, now) for name in wanted}
        return {
            name: reason
            for name, reason in wanted.items()
            if not requests[name] or now - self._first_seen[name] >= self._drain_limit_s
        }

    def approve(self, name: str) -> None:
        """Mark an instance as being recycled: further requests count once the proxy has withdrawn this one."""
        self._first_seen.pop(name, None)
        self._approved.add(name)


def _engine_of(row: dict[str, Any]) -> str:
    name, rank = str(row.get("name")), row.get("data_parallel_rank")
    return name if rank is None else name.removesuffix(f"/{rank}")


class RowsRefusedError(Exception):
    """The proxy refuses its launcher; the message has the status or the TLS error."""


async def instance_rows(access: ProxyAccess) -> list[dict[str, Any]]:
    """The rows of the proxy's ``GET /instances``; empty when it does not answer (its end is noticed elsewhere).

    Raises:
        RowsRefusedError: it answers 401, 403 or 404, or its certificate is not the one it started with.
    """
    try:
        async with access.client() as client:
            response = await client.get(f"{access.admin_url}/instances")
        if response.status_code in {401, 403, 404}:
            raise RowsRefusedError(f"it answers {response.status_code}")
        response.raise_for_status()
        rows = response.json()["instances"]
    except httpx.ConnectError as error:
        if "CERTIFICATE" in str(error):
            raise RowsRefusedError(str(error)) from error
        return []
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


class HealthRecord:
    """Counts server errors in a row from /health.

    vLLM answers 503 there once its engine process has died; usually the API server then ends, but not always. No answer
    at all is no evidence: a busy engine may be slow.
    """

    def __init__(self) -> None:
        self._errors: dict[str, int] = {}

    def dead(self, name: str, status: int | None) -> bool:
        """Record one answer (None: none came); returns whether the engine now counts as dead."""
        if status is not None:
            self._errors[name] = self._errors.get(name, 0) + 1 if status >= 500 else 0
        return self._errors.get(name, 0) >= DEAD_AFTER

    def forget(self, name: str) -> None:
        """Reset the count of an engine."""
        self._errors.pop(name, None)


async def health_status(client: httpx.AsyncClient, url: str) -> int | None:
    """Status code of a health URL; None without an answer."""
    try:
        return (await client.get(url)).status_code
    except httpx.HTTPError:
        return None
