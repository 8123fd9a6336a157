"""Routes of shadow decisions: reading their figures, and switching them while the proxy serves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.admin.admin_route import AdminRoute, refuse_empty
from proxy.core import Core
from proxy.errors import RequestError
from proxy.settings import ShadowEntry, ShadowSettings
from warmroute_yaml import problem_text


class ShadowSwitch(BaseModel):
    """Body of ``PUT /shadow``; omitted fields stay unchanged, an empty list removes all of its part."""

    model_config = ConfigDict(extra="forbid")

    policies: list[str | ShadowEntry] | None = Field(None, description="routing policies that decide without effect")
    planners: list[str | ShadowEntry] | None = Field(None, description="offload planners, likewise")
    admission: list[str | ShadowEntry] | None = Field(None, description="admission rules, likewise")


def shadow_routes(core: Core) -> APIRouter:
    """Routes over one core."""
    routes = APIRouter(route_class=AdminRoute)

    @routes.get("/shadow", summary="Shadow policies, planners and admission rules: agreement, regret, latest decisions")
    async def shadow() -> dict[str, Any]:
        return core.shadows.as_dict()

    @routes.put("/shadow", summary="Switch the shadows; those that stay keep their figures")
    async def switch(wanted: ShadowSwitch) -> dict[str, Any]:
        refuse_empty(wanted)
        given = {name: value for name in ShadowSwitch.model_fields if (value := getattr(wanted, name)) is not None}
        try:
            core.shadows.switch(ShadowSettings(**{**core.shadows.as_settings(), **given}))
        except ValidationError as error:
            problems = "; ".join(problem_text(problem) for problem in error.errors())
            raise RequestError(400, problems, code="unknown_shadow") from error
        except ValueError as error:
            raise RequestError(400, str(error), code="unknown_shadow") from error
        return core.shadows.as_dict()

    return routes
