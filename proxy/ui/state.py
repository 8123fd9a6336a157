"""Figures of the dashboard over the last minutes, from finished requests: no I/O and no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import ceil
from typing import Any

import msgspec

from policies.row import FAILED_OUTCOMES

KEPT_S = 300
"""Seconds of the charts."""
INSTANCE_WINDOW_S = 60
"""Seconds over which figures of instances and hand-offs are summed."""
SMOOTHING_S = 10
"""Seconds that one point of a chart covers."""


class FinishedRequest(msgspec.Struct, frozen=True, gc=False):  # of texts and numbers: no cycles
    """Fields of a breakdown row that the dashboard shows; scores and attempts are not decoded."""

    request_id: str
    arrived_unix_s: float
    outcome: str
    status: int
    session_id: str | None = None
    tenant: str | None = None
    error: str | None = None
    policy: str | None = None
    request_class: str | None = msgspec.field(default=None, name="class")
    instance: str | None = None
    prefill_instance: str | None = None
    reason: str | None = None
    offload_reason: str | None = None
    admission: str | None = None
    held_s: float = 0.0
    prompt_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    actual_cached_tokens: int | None = None
    completion_tokens: int | None = None
    stages_ms: dict[str, float] = {}

    @property
    def ended_unix_s(self) -> float:
        """Time of its last byte; of its arrival if it was not served."""
        return self.arrived_unix_s + self.stages_ms.get("total", 0.0) / 1e3

    @property
    def failed(self) -> bool:
        """True as the alert WarmrouteErrorShare counts: it got a 5xx or a broken stream."""
        return self.outcome in FAILED_OUTCOMES


class _Sums:
    """Sums over requests, of which old ones are subtracted again."""

    __slots__ = ("cached_tokens", "failed", "first_byte_ms", "first_bytes", "known_prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.known_prompt_tokens = 0
        """Prompt tokens of the requests whose cached tokens the engine reported."""
        self.cached_tokens = 0
        self.first_byte_ms = 0.0
        self.first_bytes = 0

    def count(self, row: FinishedRequest, sign: int) -> None:
        """Add a request (``sign`` 1), or subtract it (-1)."""
        self.requests += sign
        self.failed += sign * row.failed
        if row.prompt_tokens and row.actual_cached_tokens is not None:
            self.known_prompt_tokens += sign * row.prompt_tokens
            self.cached_tokens += sign * row.actual_cached_tokens
        first_byte_ms = row.stages_ms.get("first_byte")
        if first_byte_ms is not None:
            self.first_byte_ms += sign * first_byte_ms
            self.first_bytes += sign

    @property
    def hit_rate(self) -> float | None:
        """Cached over prompt tokens; None without a report."""
        return self.cached_tokens / self.known_prompt_tokens if self.known_prompt_tokens else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        mean_ms = self.first_byte_ms / self.first_bytes if self.first_bytes else None
        return {
            "finished": self.requests,
            "failed": self.failed,
            "hit_rate": None if self.hit_rate is None else round(self.hit_rate, 4),
            "first_byte_ms": None if mean_ms is None else round(mean_ms, 1),
        }


class _Second:
    """Requests that ended in one second, and their figures for the charts."""

    __slots__ = ("cached_tokens", "failed", "first_bytes_ms", "known_prompt_tokens", "rows", "totals_ms", "unix_s")

    def __init__(self, unix_s: int) -> None:
        self.unix_s = unix_s
        self.rows: list[FinishedRequest] = []
        self.failed = 0
        self.known_prompt_tokens = 0
        self.cached_tokens = 0
        self.first_bytes_ms: list[float] = []
        self.totals_ms: list[float] = []

    def add(self, row: FinishedRequest) -> None:
        """Count a request."""
        self.rows.append(row)
        self.failed += row.failed
        if row.prompt_tokens and row.actual_cached_tokens is not None:
            self.known_prompt_tokens += row.prompt_tokens
            self.cached_tokens += row.actual_cached_tokens
        stages = row.stages_ms
        if "first_byte" in stages:
            self.first_bytes_ms.append(stages["first_byte"])
        if row.outcome == "ok" and "total" in stages:
            self.totals_ms.append(stages["total"])


class RecentRequests:
    """Requests of the last minutes by the second of their end. Seconds are whole Unix seconds.

    A request counts in the second in which it ended, and never in one that was charted before. ``advance`` is
    O(requests of the last ``SMOOTHING_S`` seconds) per second passed.
    """

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        self._charted: int | None = None
        self._instances: dict[str, _Sums] = {}
        self._flows: dict[tuple[str, str], list[int]] = {}
        self._fleet = _Sums()
        self.points: deque[dict[str, Any]] = deque(maxlen=KEPT_S)
        """Points of the charts, oldest first."""

    def add(self, rows: Iterable[FinishedRequest]) -> None:
        """Count finished requests."""
        for row in rows:
            unix_s = int(row.ended_unix_s)
            if self._charted is not None:
                unix_s = max(unix_s, self._charted + 1)
            self._second(unix_s).add(row)
            self._count(row, 1)

    def advance(self, now_unix_s: float, gauges: dict[str, int] | None = None) -> list[dict[str, Any]]:
        """Chart the whole seconds that have passed, and drop what is old; returns the new points, oldest first.

        Args:
            now_unix_s: the time.
            gauges: further figures of the last of these seconds.
        """
        last = int(now_unix_s) - 1
        began = self._seconds[0].unix_s if self._seconds else last
        first = max(began if self._charted is None else self._charted + 1, last - KEPT_S + 1)
        points = [self._point(second) for second in range(first, last + 1)]
        if points and gauges:
            points[-1].update(gauges)
        self.points.extend(points)
        self._charted = max(last, self._charted or 0)
        while self._seconds and self._seconds[0].unix_s <= last - INSTANCE_WINDOW_S:
            for row in self._seconds.popleft().rows:
                self._count(row, -1)
        return points

    def fleet(self) -> dict[str, int]:
        """Requests that ended within the last minute, and those that failed, also if no instance got them."""
        return {"finished": self._fleet.requests, "failed": self._fleet.failed}

    def by_instance(self) -> dict[str, dict[str, Any]]:
        """Figures of the last minute by instance: finished, failed, hit rate, mean time to the first byte."""
        return {name: sums.as_dict() for name, sums in self._instances.items()}

    def flows(self) -> list[dict[str, Any]]:
        """Hand-offs of the last minute, most first."""
        found = [
            {"from": source, "to": target, "requests": requests, "tokens": tokens}
            for (source, target), (requests, tokens) in self._flows.items()
        ]
        return sorted(found, key=lambda flow: (-int(flow["requests"]), flow["from"], flow["to"]))

    def _second(self, unix_s: int) -> _Second:
        """The second of that time, added in its place if there is none."""
        seconds = self._seconds
        place = len(seconds)
        while place and seconds[place - 1].unix_s > unix_s:
            place -= 1
        if not place or seconds[place - 1].unix_s != unix_s:
            seconds.insert(place, _Second(unix_s))
            place += 1
        return seconds[place - 1]

    def _count(self, row: FinishedRequest, sign: int) -> None:
        self._fleet.count(row, sign)
        if row.instance is None:
            return
        sums = self._instances.setdefault(row.instance, _Sums())
        sums.count(row, sign)
        if not sums.requests:
            del self._instances[row.instance]
        if row.prefill_instance is not None:
            pair = (row.prefill_instance, row.instance)
            flow = self._flows.setdefault(pair, [0, 0])
            flow[0] += sign
            flow[1] += sign * (row.prompt_tokens or 0)
            if not flow[0]:
                del self._flows[pair]

    def _point(self, unix_s: int) -> dict[str, Any]:
        covered = [second for second in self._seconds if unix_s - SMOOTHING_S < second.unix_s <= unix_s]
        for second in covered:  # each once, nearly: sorted runs merge in a third of the time of sorting them all
            second.first_bytes_ms.sort()
            second.totals_ms.sort()
        latest = covered[-1] if covered and covered[-1].unix_s == unix_s else _Second(unix_s)
        first_bytes = sorted(chain.from_iterable(second.first_bytes_ms for second in covered))
        totals = sorted(chain.from_iterable(second.totals_ms for second in covered))
        prompt_tokens = sum(second.known_prompt_tokens for second in covered)
        cached_tokens = sum(second.cached_tokens for second in covered)
        return {
            "unix_s": unix_s,
            "requests": len(latest.rows),
            "failed": latest.failed,
            "first_byte_p50_ms": percentile(first_bytes, 0.5),
            "first_byte_p95_ms": percentile(first_bytes, 0.95),
            "total_p50_ms": percentile(totals, 0.5),
            "hit_rate": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else None,
        }


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of ascending values, rounded to 0.1; None without values."""
    return round(ordered[max(0, ceil(share * len(ordered)) - 1)], 1) if ordered else None


def sample(rows: Sequence[FinishedRequest], limit: int) -> list[FinishedRequest]:
    """At most ``limit`` of the rows in their order: failures first (at most half), then evenly spread others."""
    if len(rows) <= limit:
        return list(rows)
    failed = [place for place, row in enumerate(rows) if row.failed][-(limit // 2) :]
    others = [place for place, row in enumerate(rows) if not row.failed]
    left = min(limit - len(failed), len(others))
    spread = [others[number * len(others) // left] for number in range(left)]
    return [rows[place] for place in sorted((*failed, *spread))]


def decisions(rows: Iterable[FinishedRequest]) -> Iterator[dict[str, Any]]:
    """JSON-ready decisions for the stream."""
    for row in rows:
        stages = row.stages_ms
        yield {
            "request_id": row.request_id,
            "session_id": row.session_id,
            "tenant": row.tenant,
            "ended_unix_s": round(row.ended_unix_s, 3),
            "outcome": row.outcome,
            "status": row.status,
            "error": row.error,
            "policy": row.policy,
            "class": row.request_class,
            "instance": row.instance,
            "prefill_instance": row.prefill_instance,
            "reason": row.reason,
            "offload_reason": row.offload_reason,
            "held_s": row.held_s,
            "prompt_tokens": row.prompt_tokens,
            "cached_tokens": row.actual_cached_tokens,
            "first_byte_ms": stages.get("first_byte"),
            "total_ms": stages.get("total"),
        }
