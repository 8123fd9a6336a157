"""Figures of ``top``, from the answers of a proxy's admin endpoints. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from policies.row import FAILED_OUTCOMES

WINDOW_S = 60.0
"""Rates, hit rates and latencies are those of requests that ended within so many seconds, at most."""
MAX_ROWS = 20_000
"""Rows kept for the window."""


class TopRow(msgspec.Struct, frozen=True):
    """The fields of a breakdown row that are shown."""

    row: int = 0
    request_id: str = ""
    arrived_unix_s: float = 0.0
    outcome: str = ""
    request_class: str | None = msgspec.field(default=None, name="class")
    instance: str | None = None
    prefill_instance: str | None = None
    reason: str | None = None
    stream: bool = False
    prompt_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    actual_cached_tokens: int | None = None
    held_s: float = 0.0
    stages_ms: dict[str, float] = {}

    @property
    def ended_unix_s(self) -> float:
        """End of the request on the proxy's clock."""
        return self.arrived_unix_s + self.stages_ms.get("total", 0.0) / 1e3


class TopPage(msgspec.Struct, frozen=True):
    """Answer of ``GET /breakdown``."""

    rows: list[TopRow]
    next: dict[str, int | None] = {}
    proxy_started_unix_s: float = 0.0
    unix_s: float = 0.0
    """The proxy's clock."""


class TopAnswers(NamedTuple):
    """Answers of one poll."""

    instances: Sequence[dict[str, Any]]
    stats: dict[str, Any]
    conditions: Sequence[dict[str, Any]]
    page: TopPage


class RecentFigures(NamedTuple):
    """Figures of the requests that ended within the window."""

    per_s: float
    hit_rate: float | None
    """Share of prompt tokens that engines reported as cached; None: none reported."""
    ttft_ms: float | None
    """Median time to the first byte of streamed answers; None: there were none."""
    failed: int
    """Requests that failed as the alert WarmrouteErrorShare counts them: 5xx and broken streams."""


class InstanceFigures(NamedTuple):
    """One line of the fleet."""

    name: str
    state: str
    ok: bool
    requests: int
    prefilling: int
    classes: tuple[int, int, int]
    """Those of ``requests`` that decode here, of class WARM, MEDIUM and HEAVY."""
    waiting: int | None
    """Requests that wait inside the engine; None: not reported."""
    kv_usage: float | None
    recent: RecentFigures


class FleetFigures(NamedTuple):
    """Everything that a frame shows."""

    span_s: float
    """Seconds that the recent figures cover."""

    instances: tuple[InstanceFigures, ...]
    """Those that need attention first, then by load."""
    recent: RecentFigures
    stats: dict[str, Any]
    problems: tuple[tuple[str, str, str], ...]
    """Name, detail and remedy of each condition that is not ok."""
    last: tuple[TopRow, ...]
    """Newest first."""


class RecentRows:
    """The rows of the window, and the cursor of the next poll."""

    def __init__(self) -> None:
        self._rows: deque[TopRow] = deque(maxlen=MAX_ROWS)
        self._started_unix_s = 0.0
        self._begin_unix_s = 0.0
        self.cursor: int | None = None
        """Number of the newest row; None: the next poll begins with the newest rows."""
        self.behind = False
        """True if there may be further rows after the last page."""

    def add(self, page: TopPage, limit: int) -> None:
        """Add a page of at most ``limit`` rows, asked for with ``cursor``."""
        newest = self.cursor is None
        if newest or page.proxy_started_unix_s != self._started_unix_s:
            self._rows.clear()
            self._started_unix_s = self._begin_unix_s = page.proxy_started_unix_s
            if newest and len(page.rows) >= limit:  # there are older ones, which were not asked for
                self._begin_unix_s = min(row.ended_unix_s for row in page.rows)
        known = self._rows[-1].row if self._rows else 0
        self._rows.extend(row for row in page.rows if row.row > known)
        self.cursor = page.next.get("after")
        self.behind = not newest and len(page.rows) >= limit

    def add_older(self, page: TopPage, limit: int) -> None:
        """Add a page of at most ``limit`` rows that end right before the oldest known one."""
        self._rows.extendleft(reversed(page.rows))
        ended = [row.ended_unix_s for row in page.rows]
        self._begin_unix_s = min([self._begin_unix_s, *ended]) if len(ended) >= limit else self._started_unix_s

    def skip(self) -> None:
        """Let the next poll begin again with the newest rows, as figures of a window with a gap would be wrong."""
        self.cursor, self.behind = None, False

    def within(self, now_s: float) -> list[TopRow]:
        """The rows of requests that ended within the window before ``now_s``, on the proxy's clock."""
        return [row for row in self._rows if row.ended_unix_s >= now_s - WINDOW_S]

    def span_s(self, now_s: float) -> float:
        """The part of the window that the rows cover: less than all of it soon after the start, and under much load."""
        return min(WINDOW_S, max(1.0, now_s - self._begin_unix_s))

    def last(self, count: int) -> tuple[TopRow, ...]:
        """The newest rows, newest first."""
        return tuple(reversed(list(self._rows)[-count:]))


def figures_of(answers: TopAnswers, recent: RecentRows, now_s: float, shown_rows: int = 20) -> FleetFigures:
    """The figures of one frame; ``now_s`` is the proxy's wall-clock time."""
    rows = recent.within(now_s)
    span_s = recent.span_s(now_s)
    by_instance: dict[str | None, list[TopRow]] = {}
    for row in rows:
        by_instance.setdefault(row.instance, []).append(row)
    fleet = [_instance(each, by_instance.get(each.get("name"), ()), span_s) for each in answers.instances]
    fleet.sort(key=lambda each: (each.ok, -each.requests, each.name))
    problems = tuple(
        (str(each.get("name")), str(each.get("detail")), str(each.get("remedy") or ""))
        for each in answers.conditions
        if not each.get("ok")
    )
    return FleetFigures(span_s, tuple(fleet), _recent(rows, span_s), answers.stats, problems, recent.last(shown_rows))


def _instance(row: dict[str, Any], rows: Iterable[TopRow], span_s: float) -> InstanceFigures:
    engine, in_flight = row.get("engine") or {}, row.get("in_flight") or {}
    breaker = (row.get("breaker") or {}).get("state", "closed")
    if row.get("leaving"):
        state, ok = "leaving", False
    elif row.get("draining"):
        state, ok = "draining", False
    elif breaker != "closed":
        state, ok = str(breaker).replace("_", " "), False
    elif not row.get("healthy"):
        state, ok = "down", False
    else:
        state, ok = "ok", True
    return InstanceFigures(
        str(row.get("name")),
        state,
        ok,
        int(row.get("requests") or 0),
        int(row.get("prefilling") or 0),
        (in_flight.get("WARM", 0), in_flight.get("MEDIUM", 0), in_flight.get("HEAVY", 0)),
        _whole(engine.get("waiting")),
        engine.get("kv_usage"),
        _recent(rows, span_s),
    )


def _recent(rows: Iterable[TopRow], span_s: float) -> RecentFigures:
    rows = list(rows)
    reported = [row for row in rows if row.actual_cached_tokens is not None and row.prompt_tokens]
    prompt = sum(row.prompt_tokens or 0 for row in reported)
    cached = sum(row.actual_cached_tokens or 0 for row in reported)
    first_ms = [row.stages_ms["first_byte"] for row in rows if row.stream and "first_byte" in row.stages_ms]
    return RecentFigures(
        len(rows) / span_s,
        cached / prompt if prompt else None,
        median(first_ms) if first_ms else None,
        sum(row.outcome in FAILED_OUTCOMES for row in rows),
    )


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) else None
