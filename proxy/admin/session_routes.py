"""Routes about sessions: changes between their turns that end the cached prefix."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from proxy.admin.admin_route import AdminRoute
from proxy.core import Core
from proxy.sessions.killer_rules import KillerRule


def session_routes(core: Core) -> APIRouter:
    """Routes over one core."""
    routes = APIRouter(route_class=AdminRoute)

    @routes.get("/cache-killers", summary="Changes between turns of sessions that end the cached prefix early")
    async def cache_killers(
        limit: Annotated[int, Query(ge=1, le=100_000, description="maximum number of findings")] = 100,
        session_id: str | None = None,
        rule: KillerRule | None = None,
    ) -> dict[str, Any]:
        return core.cache_killers.as_dict(limit, session_id, rule)

    return routes
