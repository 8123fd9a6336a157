"""Pages of the dashboard and of the API's description, and the feed. The pages hold no data: anyone may load them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Header, Response
from fastapi.responses import RedirectResponse
from sse_starlette import EventSourceResponse

from proxy.core import Core
from proxy.errors import RequestError
from proxy.operations.fleet_changes import FleetChanges
from proxy.ui.feed import DashboardFeed

STATIC = Path(__file__).parent / "static"
_TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
_HEADERS = MappingProxyType(
    {
        "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }
)
_SEND_S = 10.0
"""Seconds that a viewer may take for one message before its stream ends; the page connects again."""


class _Page(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@functools.cache
def _pages() -> Mapping[str, _Page]:
    """Every file of the dashboard, 100 KB in all, by its path below the folder."""
    return MappingProxyType(
        {
            file.relative_to(STATIC).as_posix(): _page(file.read_bytes(), _TYPES[file.suffix])
            for file in sorted(STATIC.rglob("*.*"))
            if file.suffix in _TYPES
        }
    )


def _page(content: bytes, media_type: str) -> _Page:
    return _Page(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def ui_routes(core: Core, fleet: FleetChanges) -> APIRouter:
    """Routes over one core."""
    # Not in the API's description: they are for browsers, and the feed never ends.
    routes = APIRouter(include_in_schema=False)
    feed = DashboardFeed(core, fleet)

    @routes.get("/ui")
    async def ui() -> Response:
        return RedirectResponse("ui/", 307, dict(_HEADERS))

    @routes.get("/ui/")
    async def index(if_none_match: Annotated[str | None, Header()] = None) -> Response:
        return _answer("index.html", if_none_match)

    @routes.get("/ui/static/{name:path}")
    async def static(name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
        return _answer(name, if_none_match)

    @routes.get("/docs")
    async def docs(if_none_match: Annotated[str | None, Header()] = None) -> Response:
        return _answer("docs.html", if_none_match)

    @routes.get("/ui/feed")
    async def events() -> Response:
        feed.check_room()
        return EventSourceResponse(feed.events(), send_timeout=_SEND_S)

    return routes


def _answer(name: str, known: str | None) -> Response:
    page = _pages().get(name)
    if page is None:
        raise RequestError(404, "there is no such file of the dashboard", kind="not_found_error", code="no_such_file")
    headers = {**_HEADERS, "etag": page.etag}
    if known == page.etag:
        return Response(None, 304, headers)
    return Response(page.content, 200, headers, page.media_type)
