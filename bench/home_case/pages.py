"""The proxy's admin pages: effective settings, metrics, breakdown rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import msgspec

from bench.home_case.fleet import HomeCaseError
from bench.routers.engines import samples

_TIMEOUT_S = 5.0
_ROWS_TIMEOUT_S = 60.0
_GAUGES = frozenset(
    (
        "warmroute_held_requests",
        "warmroute_queue_requests",
        "warmroute_in_flight",
        "warmroute_request_body_bytes",
        "warmroute_instance_requests",
        "warmroute_instance_pending_prefill_tokens",
        "warmroute_instance_decoding_tokens",
    )
)
"""Zero when no request is left."""
_COUNTED = ("_total", "_sum", "_count")


class ProxyPages:
    """Reads one proxy. Opens no connection of its own: the client is its owner's.

    Args:
        admin_url: of the listener with the admin endpoints.
        http: client that its owner closes.
    """

    def __init__(self, admin_url: str, http: httpx.AsyncClient) -> None:
        self._url = admin_url
        self._http = http

    async def report(self, path: str) -> dict[str, Any]:
        """A page as JSON. Raises HomeCaseError."""
        answer = await self._get(path, _TIMEOUT_S)
        try:
            return msgspec.json.decode(answer.content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise HomeCaseError(f"{self._url}{path}: not JSON ({error})") from error

    async def metrics(self) -> dict[str, float]:
        """Every series by its name and labels, without histograms' buckets. Raises HomeCaseError."""
        page = (await self._get("/metrics", _TIMEOUT_S)).text
        return {f"{name}{labels}": value for name, labels, value in samples(page) if not name.endswith("_bucket")}

    async def gauges(self) -> dict[str, float] | None:
        """Held, queued and in-flight requests; None when the proxy does not answer.

        From ``/stats``: at every sample ``/metrics`` would add to the CPU time that is measured (14 ms against 1 ms).
        """
        try:
            found = await self.report("/stats")
            admission = found["admission"]
            return {
                "held": found["holding"]["held"],
                "queued": admission["waiting"],
                "in_flight": admission["in_flight"],
            }
        except (HomeCaseError, KeyError):
            return None

    async def left_over(self) -> list[str]:
        """Sentences on requests, tokens and hand-offs that the proxy still counts; empty when it is idle.

        Raises:
            HomeCaseError: it does not answer.
        """
        stats, metrics = await self.report("/stats"), await self.metrics()
        found = {
            **{f"ledger.{name}": value for name, value in stats.get("ledger", {}).items()},
            **{f"requests.{name}": stats.get("requests", {}).get(name, 0) for name in ("in_flight", "abandoned_pulls")},
            **{name: value for name, value in metrics.items() if name.split("{")[0] in _GAUGES},
        }
        return [f"proxy: {name} is {value:g}" for name, value in found.items() if value]

    async def rows(self, requests: int, since_unix_s: float, ids: Iterable[str]) -> bytes:
        """Breakdown rows of a run as JSON lines.

        Args:
            requests: most rows.
            since_unix_s: start of the run; ids repeat from run to run.
            ids: of its requests.

        Raises:
            HomeCaseError: they cannot be read.
        """
        answer = await self._get(f"/breakdown?format=jsonl&limit={max(1, requests)}", _ROWS_TIMEOUT_S)
        wanted = frozenset(ids)
        decode = msgspec.json.Decoder(_RowHead).decode
        kept = []
        for line in answer.content.splitlines():
            if line.strip():
                try:
                    head = decode(line)
                except msgspec.MsgspecError as error:
                    raise HomeCaseError(f"{self._url}/breakdown: not a row ({error})") from error
                if head.request_id in wanted and head.arrived_unix_s >= since_unix_s:
                    kept.append(line + b"\n")
        return b"".join(kept)

    async def _get(self, path: str, timeout_s: float) -> httpx.Response:
        url = self._url + path
        try:
            answer = await self._http.get(url, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise HomeCaseError(f"{url}: {error or type(error).__name__}; is the proxy running?") from error
        if answer.status_code in (401, 403):
            raise HomeCaseError(f"{url} needs an admin key; start the fleet without `keys`, on loopback")
        if not answer.is_success:
            raise HomeCaseError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
        return answer


class _RowHead(msgspec.Struct):
    request_id: str = ""
    arrived_unix_s: float = 0.0


def increase(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Increase of the proxy's own counters that grew, by series."""
    return {
        name: round(value - before.get(name, 0.0), 6)
        for name, value in sorted(after.items())
        if name.startswith("warmroute_") and name.split("{")[0].endswith(_COUNTED) and value > before.get(name, 0.0)
    }
