"""Route of the breakdown: rows by filter, in pages, as a download, or live as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BeforeValidator
from sse_starlette import EventSourceResponse

from policies.row import RequestOutcome
from policies.types import RequestClass
from proxy.admin.admin_route import AdminRoute
from proxy.breakdown import RowPage
from proxy.core import Core
from proxy.errors import RequestError
from proxy.records.filters import RowFilter

_ROWS_PER_PIECE = 500
_GATHER_S = 0.05
"""Rows that end this soon after another are sent with it: at 200 a second, a tenth of the writes."""
_NUMBER = {"ge": 0, "le": 2**53}
_SERVER_SENT = "text/event-stream"


class Followers:
    """Streams of rows, bounded in number; each has a bounded buffer."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._streams = 0

    def follow(self, wanted: RowFilter, after: int | None) -> EventSourceResponse:
        """The stream of matching rows: those after a number, if given, then each as it ends.

        Raises:
            RequestError: 503, too many streams.
        """
        most = self._core.settings.breakdown.max_followers
        if self._streams >= most:
            raise RequestError(
                503,
                f"{most} streams of rows are open, as many as permitted (breakdown.max_followers)",
                kind="service_unavailable",
                code="too_many_followers",
            )
        return EventSourceResponse(
            self._events(wanted, after), send_timeout=self._core.settings.timeouts.client_stall_s, sep="\n"
        )

    async def _events(self, wanted: RowFilter, after: int | None) -> AsyncIterator[bytes]:
        breakdown = self._core.breakdown
        self._streams += 1
        try:
            async with breakdown.subscribe() as rows:
                newest = breakdown.number
                while after is not None:
                    page = await breakdown.page(_ROWS_PER_PIECE, wanted, before=newest + 1, after=after)
                    for number, line in page.rows:
                        yield _event(number, line)
                    after = page.after if page.after < newest else None
                dropped = 0
                async for first in rows:
                    number = rows.number
                    await asyncio.sleep(_GATHER_S)
                    found = [(number, first), *rows.take()]
                    events = [_event(number, line) for number, line in found if wanted.matches(line)]
                    if rows.dropped > dropped:
                        events.insert(0, b'event: dropped\ndata: {"rows": %d}\n\n' % (rows.dropped - dropped))
                        dropped = rows.dropped
                    if events:
                        yield b"".join(events)
            yield b'event: end\ndata: {"reason": "shutdown"}\n\n'
        finally:
            self._streams -= 1


def breakdown_routes(core: Core) -> APIRouter:
    """Routes over one core."""
    routes = APIRouter(route_class=AdminRoute)
    followers = Followers(core)

    @routes.get(
        "/breakdown",
        summary="The newest requests: decision, timings, cached tokens",
        response_model=None,
        responses={200: {"content": {"application/json": {}, "application/x-ndjson": {}, _SERVER_SENT: {}}}},
    )
    async def breakdown(
        limit: Annotated[int, Query(ge=1, le=1_000_000, description="maximum number of rows")] = 100,
        fmt: Annotated[str, Query(alias="format", pattern="^(json|jsonl)$")] = "json",
        instance: str | None = None,
        request_class: Annotated[
            RequestClass | None, BeforeValidator(_in_capitals), Query(alias="class", description="in any case")
        ] = None,
        outcome: RequestOutcome | None = None,
        session_id: str | None = None,
        tenant: str | None = None,
        request_id: str | None = None,
        policy: str | None = None,
        reason: Annotated[str | None, Query(description="reason for the choice of the instance")] = None,
        since_s: Annotated[
            float | None, Query(gt=0, allow_inf_nan=False, description="only requests of the last so many seconds")
        ] = None,
        min_e2e_s: Annotated[
            float | None, Query(ge=0, allow_inf_nan=False, description="only requests that took so many seconds")
        ] = None,
        before: Annotated[int | None, Query(**_NUMBER, description="only rows with smaller numbers")] = None,
        after: Annotated[
            int | None, Query(**_NUMBER, description="only rows with larger numbers, the oldest first")
        ] = None,
        follow: Annotated[bool, Query(description="server-sent events: each row as its request ends")] = False,
        last_event_id: Annotated[str | None, Header(description="with follow: as after")] = None,
    ) -> Response:
        equal = {
            "instance": instance,
            "class": None if request_class is None else request_class.value,
            "outcome": None if outcome is None else outcome.value,
            "session_id": session_id,
            "tenant": tenant,
            "request_id": request_id,
            "policy": policy,
            "reason": reason,
        }
        wanted = RowFilter(
            {name: value for name, value in equal.items() if value is not None},
            None if since_s is None else time.time() - since_s,
            min_e2e_s,
        )
        if follow and fmt != "json":
            raise RequestError(
                400,
                f"follow=true has no format {fmt}: rows come as server-sent events, with the row in data",
                code="format_refused",
                param="format",
            )
        if follow:
            return followers.follow(wanted, _number(last_event_id) if after is None else after)
        page = await core.breakdown.page(limit, wanted, before, after)
        if fmt == "json":
            return Response(_body(page, core.breakdown.started_unix_s), media_type="application/json")
        return StreamingResponse(
            _pieces(page),
            media_type="application/x-ndjson",
            headers={"content-disposition": "attachment; filename=breakdown.jsonl"},
        )

    return routes


def _in_capitals(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _event(number: int, line: bytes) -> bytes:
    """A row as a server-sent event; JSON has no line end."""
    return b"id: %d\nevent: row\ndata: %b\n\n" % (number, line)


def _number(last_event_id: str | None) -> int | None:
    """Number of the last row that a client received before its connection broke; None if it has none."""
    if last_event_id is None or not last_event_id.isascii() or not last_event_id.isdigit() or len(last_event_id) > 16:
        return None
    return int(last_event_id)


def _body(page: RowPage, started_unix_s: float) -> bytes:
    """The page as one JSON object. Its rows are JSON already."""
    rest = {
        "next": {"before": page.before, "after": page.after},
        "proxy_started_unix_s": started_unix_s,
        "unix_s": round(time.time(), 3),
    }
    return b'{"rows":[%b],%b' % (b",".join(line for _, line in page.rows), msgspec.json.encode(rest)[1:])


async def _pieces(page: RowPage) -> AsyncIterator[bytes]:
    for begin in range(0, len(page.rows), _ROWS_PER_PIECE):
        yield b"".join(line + b"\n" for _, line in page.rows[begin : begin + _ROWS_PER_PIECE])
