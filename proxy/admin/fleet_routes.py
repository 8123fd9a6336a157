"""Admin endpoints that change the fleet. All of them require an admin key."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response

from proxy.access.rules import admin_key_of
from proxy.admin.instance_rows import departure_row, instance_row
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
    routes = APIRouter()
    fleet, reloader = operations.fleet, operations.reloader

    @routes.get("/instances/{name:path}", summary="One instance: health, identity, load, cache")
    async def show(name: str) -> dict[str, Any]:
        return _row(core, fleet, _instance(core, name))

    @routes.post(
        "/instances", status_code=201, summary="Add an instance; it receives requests after its first successful probe"
    )
    async def add(request: Request, wanted: Annotated[InstanceSettings, Body()]) -> dict[str, Any]:
        admin_key_of(request)
        settings = await _admitted(core, wanted)
        try:
            instance = await fleet.add(settings)
        except FleetChangeError as error:
            raise _refused(error) from error
        return _row(core, fleet, instance)

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
        return _row(core, fleet, instance)

    @routes.delete("/instances/{name:path}", summary="Drain an instance, then remove it")
    async def remove(
        request: Request,
        response: Response,
        name: str,
        grace_s: Grace = None,
        wait: Annotated[bool, Query(description="answer after the removal; false: answer at once with 202")] = True,
    ) -> dict[str, Any]:
        admin_key_of(request)
        try:
            if not wait:
                response.status_code = 202
                departure = fleet.depart(_instance(core, name), _grace_s(core, grace_s))
                return departure_row(departure)
            departure = await fleet.remove(name, _grace_s(core, grace_s))
        except FleetChangeError as error:
            raise _refused(error) from error
        return {"name": name, "removed": True, "cut_requests": departure.cut_legs}

    @routes.post("/instances/{name:path}/drain", summary="Stop new requests to an instance; running ones finish")
    async def drain(request: Request, name: str) -> dict[str, Any]:
        admin_key_of(request)
        try:
            return _row(core, fleet, fleet.drain(name))
        except FleetChangeError as error:
            raise _refused(error) from error

    @routes.post("/instances/{name:path}/undrain", summary="Resume sending requests to an instance")
    async def undrain(request: Request, name: str) -> dict[str, Any]:
        admin_key_of(request)
        try:
            return _row(core, fleet, fleet.undrain(name))
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


def _row(core: Core, fleet: FleetChanges, instance: Instance) -> dict[str, Any]:
    return instance_row(core, fleet, instance, time.monotonic())


def _instance(core: Core, name: str) -> Instance:
    instance = core.instances.get(name)
    if instance is None:
        raise _refused(NoSuchInstanceError("no_such_instance", f"there is no instance {name!r}; see GET /instances"))
    return instance


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
