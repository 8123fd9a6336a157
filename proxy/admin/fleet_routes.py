"""Admin endpoints that change the fleet. All of them require an admin key."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response

from proxy.access.rules import admin_key_of
from proxy.admin.admin_route import AdminRoute
from proxy.admin.instance_rows import departure_row, engine_row
from proxy.core import Core
from proxy.errors import RequestError
from proxy.fleet.instances import Instance
from proxy.operations.fleet_changes import FleetChangeError, FleetChanges, NoSuchInstanceError
from proxy.operations.operations import Operations
from proxy.settings import InstanceSettings
from proxy.settings.urls import EngineUrlError, ListenAddress, admit

_URLS = ("url", "bootstrap_url", "events_url", "events_replay_url")

Grace = Annotated[
    float | None,
    Query(ge=0, le=86_400, description="seconds its running requests have to finish; default: grace_s of the settings"),
]


def fleet_routes(core: Core, operations: Operations) -> APIRouter:
    """Routes over one core and what changes it."""
    routes = APIRouter(route_class=AdminRoute)
    fleet, reloader = operations.fleet, operations.reloader

    @routes.get("/instances/{name:path}", summary="One instance, or an engine's ranks: health, identity, load, cache")
    async def show(name: str) -> dict[str, Any]:
        return engine_row(core, fleet, name, _ranks(fleet, name))

    @routes.post(
        "/instances", status_code=201, summary="Add an instance; it receives requests after its first successful probe"
    )
    async def add(request: Request, wanted: Annotated[InstanceSettings, Body()]) -> dict[str, Any]:
        admin_key_of(request)
        settings = await _admitted(core, wanted)
        try:
            added = await fleet.add(settings)
        except FleetChangeError as error:
            raise _refused(error) from error
        return engine_row(core, fleet, settings.name, added)

    @routes.put("/instances/{name:path}", summary="Change an instance's settings; a different URL replaces the engine")
    async def replace(
        request: Request,
        name: str,
        wanted: Annotated[InstanceSettings, Body()],
        grace_s: Grace = None,
        force: Annotated[bool, Query(description="replace it even if the new engine does not answer")] = False,
    ) -> dict[str, Any]:
        admin_key_of(request)
        settings = await _admitted(core, _named(wanted, name))
        try:
            instance = await fleet.replace(name, settings, _grace_s(core, grace_s), force=force)
        except FleetChangeError as error:
            raise _refused(error) from error
        return engine_row(core, fleet, name, (instance,))

    @routes.delete("/instances/{name:path}", summary="Drain an instance, then remove it")
    async def remove(
        request: Request,
        response: Response,
        name: str,
        grace_s: Grace = None,
        wait: Annotated[bool, Query(description="answer after the removal; false: answer at once with 202")] = True,
    ) -> dict[str, Any]:
        admin_key_of(request)
        ranks = _ranks(fleet, name)
        if not wait:
            response.status_code = 202
            rows = [departure_row(fleet.depart(each, _grace_s(core, grace_s))) for each in ranks]
            return rows[0] if ranks[0].name == name else {"name": name, "url": ranks[0].url, "ranks": rows}
        departures = await fleet.remove(name, _grace_s(core, grace_s))
        return {"name": name, "removed": True, "cut_requests": sum(each.cut_legs for each in departures)}

    @routes.post("/instances/{name:path}/drain", summary="Stop new requests to an instance; running ones finish")
    async def drain(request: Request, name: str) -> dict[str, Any]:
        admin_key_of(request)
        try:
            return engine_row(core, fleet, name, fleet.drain(name))
        except FleetChangeError as error:
            raise _refused(error) from error

    @routes.post("/instances/{name:path}/undrain", summary="Resume sending requests to an instance")
    async def undrain(request: Request, name: str) -> dict[str, Any]:
        admin_key_of(request)
        try:
            return engine_row(core, fleet, name, fleet.undrain(name))
        except FleetChangeError as error:
            raise _refused(error) from error

    @routes.post("/reload", summary="Read the settings again and apply what can be applied; returns the differences")
    async def reload(
        request: Request,
        dry_run: Annotated[bool, Query(description="only report the differences")] = False,
    ) -> dict[str, Any]:
        admin_key_of(request)
        if reloader.load is None:
            raise RequestError(
                409,
                "this proxy was not started from settings that can be reloaded",
                kind="conflict_error",
                code="not_reloadable",
            )
        report = await reloader.reload(dry_run=dry_run)
        if report.error is not None:
            raise RequestError(400, f"nothing was changed: {report.error}", code="settings_refused")
        return report.as_dict()

    return routes


def _ranks(fleet: FleetChanges, name: str) -> tuple[Instance, ...]:
    """The instance, or the ranks of the engine, of that name. Raises RequestError (404)."""
    try:
        return fleet.of_engine(name)
    except FleetChangeError as error:
        raise _refused(error) from error


def _grace_s(core: Core, wanted_s: float | None) -> float:
    return core.settings.grace_s if wanted_s is None else wanted_s


def _refused(error: FleetChangeError) -> RequestError:
    if isinstance(error, NoSuchInstanceError):
        return RequestError(404, error.message, kind="not_found_error", code=error.code)
    return RequestError(409, error.message, kind="conflict_error", code=error.code)


def _named(wanted: InstanceSettings, name: str) -> InstanceSettings:
    """The settings with the name in the path, which the body may omit but not contradict."""
    if "name" in wanted.model_fields_set and wanted.name != name:
        raise RequestError(
            400,
            f"the path names {name!r}, the body {wanted.name!r}: to rename an instance, remove it and add it again",
            code="name_differs",
            param="name",
        )
    return wanted.model_copy(update={"name": name})


async def _admitted(core: Core, wanted: InstanceSettings) -> InstanceSettings:
    """The settings with every address checked and resolved. Raises RequestError 400."""
    if wanted.api_key_env is not None:
        raise RequestError(
            400,
            "api_key_env is accepted from the settings file only: give api_key",
            code="not_over_http",
            param="api_key_env",
        )
    admin = core.settings.admin
    own = [ListenAddress(core.settings.host, core.port or core.settings.port)]
    if core.admin_port is not None:
        own.append(ListenAddress(admin.host, core.admin_port))
    pinned: dict[str, str] = {}
    for key in _URLS:
        value = getattr(wanted, key)
        if value is None:
            continue
        try:
            pinned[key] = await admit(value, admin.allowed_networks, own)
        except EngineUrlError as error:
            raise RequestError(400, f"{key}: {error}", code="url_refused", param=key) from error
    return wanted.model_copy(update=pinned)
