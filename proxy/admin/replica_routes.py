"""Route that lists the replicas that share state."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from proxy.admin.admin_route import AdminRoute
from proxy.core import Core


def replica_routes(core: Core) -> APIRouter:
    """Routes over one core."""
    routes = APIRouter(route_class=AdminRoute)

    @routes.get("/replicas", summary="This replica and the others that share state: age, load, open breakers")
    async def replicas() -> dict[str, Any]:
        if core.sharing is None:
            return {"replica": None, "linked": False, "others": []}
        return core.sharing.as_dict()

    return routes
