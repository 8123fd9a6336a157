"""Routes of the admission rule: reading it, and switching it while the proxy serves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import Field

from policies.registry import UnknownPolicyError
from proxy.admin.admin_route import AdminRoute, refuse_empty
from proxy.core import Core
from proxy.errors import RequestError
from proxy.settings.section import Section


class AdmissionSwitch(Section):
    """Body of ``PUT /admission``; omitted fields stay unchanged."""

    name: str | None = Field(None, description="admission rule to apply; default: the active one")
    params: dict[str, Any] = Field(default_factory=dict, description="its parameters; the others take their defaults")
    max_hold_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="longest time a request is held, in seconds"
    )


def admission_routes(core: Core) -> APIRouter:
    """Routes over one core."""
    routes = APIRouter(route_class=AdminRoute)

    @routes.get("/admission", summary="The active admission rule, its bounds, and the installed ones")
    async def admission() -> dict[str, Any]:
        return core.holding.rule_as_dict()

    @routes.put("/admission", summary="Switch the admission rule or its bound; held requests stay in line")
    async def switch(wanted: AdmissionSwitch) -> dict[str, Any]:
        refuse_empty(wanted)
        try:
            core.holding.switch(wanted.name, wanted.params, wanted.max_hold_s)
        except ValueError as error:
            code = "unknown_admission_rule" if isinstance(error, UnknownPolicyError) else "admission_rule_refused"
            raise RequestError(400, str(error), code=code) from error
        return core.holding.rule_as_dict()

    return routes
