"""Route of the meters, and the task that examines the conditions."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from fastapi import APIRouter

from proxy.admin.admin_route import AdminRoute
from proxy.admin.conditions import conditions
from proxy.core import Core

log = logging.getLogger("warmroute.conditions")


def meter_routes(core: Core) -> APIRouter:
    """Routes over one core."""
    routes = APIRouter(route_class=AdminRoute)

    @routes.get("/meters", summary="Hit rates and their losses, and predictions against the engines' reports")
    async def meters() -> dict[str, Any]:
        return core.meters.as_dict(time.monotonic())

    return routes


class ConditionWatch:
    """Examines all conditions every ``meters.interval_s`` seconds, and logs those that change."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._known: dict[str, bool] = {}

    async def run(self) -> None:
        """Examine until cancelled."""
        while True:
            try:
                self.examine()
            except Exception:
                # A failing check must not end the others, nor the proxy.
                log.exception("the conditions could not be examined")
            await asyncio.sleep(self._core.settings.meters.interval_s)

    def examine(self) -> None:
        """Examine all conditions once."""
        self._core.meters.examine(time.monotonic())
        for each in conditions(self._core):
            if each.ok is not self._known.get(each.name, True) and not self._core.draining:
                if each.ok:
                    log.info("condition %s is ok again", each.name)
                else:
                    log.warning("condition %s: %s; remedy: %s", each.name, each.detail, each.remedy)
            self._known[each.name] = each.ok
