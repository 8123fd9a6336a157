"""The ASGI application: FastAPI for everything but generation, and the lifespan of the core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from proxy.access.guard import Application, Guard
from proxy.access.rules import Listener, Side, side_of
from proxy.admin.admission_routes import admission_routes
from proxy.admin.breakdown_routes import breakdown_routes
from proxy.admin.client_routes import client_methods, client_routes, unsupported
from proxy.admin.client_side import ClientSide
from proxy.admin.conditions import conditions
from proxy.admin.fleet_routes import fleet_routes
from proxy.admin.meter_routes import ConditionWatch, meter_routes
from proxy.admin.openapi import describe_generation
from proxy.admin.replica_routes import replica_routes
from proxy.admin.routes import admin_routes, probe_routes
from proxy.admin.session_routes import session_routes
from proxy.admin.shadow_routes import shadow_routes
from proxy.admin_listener import admin_listener
from proxy.clip import clip
from proxy.core import Core
from proxy.errors import RequestError, dialect_of, error_body, method_error
from proxy.exchange.generation import Generation
from proxy.gather.gather import Gather
from proxy.gather.inner import listed
from proxy.gather.peers import Peers
from proxy.gather.place import Place
from proxy.metrics.conditions import ConditionMetrics
from proxy.operations.operations import Operations
from proxy.paths import NO_ADMIN_ENDPOINT
from proxy.restart.snapshots import Snapshots
from proxy.settings import Settings
from proxy.ui.routes import ui_routes
from warmroute_yaml import problem_text


class ProxyApp:
    """ASGI application over one core; ``generation`` handles the generation requests of the listener."""

    def __init__(self, settings: Settings, place: Place | None = None) -> None:
        """Open nothing yet; ``place``: among several workers, None: the only one."""
        self.core = core = Core(settings, None if place is None else place.identity)
        ConditionMetrics(core.metrics.registry, lambda: ((each.name, each.ok) for each in conditions(core)))
        self.operations = Operations(self.core)
        self.generation = Generation(self.core)
        endpoints = _Endpoints(self.core, place)
        endpoints.own = _control_app(self.core, self.operations, endpoints)
        guarded = Guard(endpoints.of_all, self.core.access, Listener.MAIN)
        self._rest = ClientSide(guarded, self.core)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI entry point."""
        await self._rest(scope, receive, send)


class _Endpoints:
    """Endpoints of this worker (``own``), and those that answer for all workers; of one process they are the same."""

    own: FastAPI

    def __init__(self, core: Core, place: Place | None) -> None:
        self._core = core
        self._place = place
        self._peers = None if place is None else Peers(place)

    @property
    def of_all(self) -> Application:
        """The endpoints for the listeners."""
        if self._place is None or self._peers is None:
            return self.own
        return Gather(self.own, self._core, self._place, self._peers)

    @asynccontextmanager
    async def parent(self) -> AsyncIterator[None]:
        """Be connected to the parent in the context, if there is one."""
        if self._place is None:
            yield
            return
        async with self._place.line.opened():
            yield

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Run the listeners other than the main one: for the other workers, and the admin endpoints' own."""
        core, place, peers = self._core, self._place, self._peers
        async with AsyncExitStack() as stack:
            if place is not None and peers is not None:
                stack.push_async_callback(peers.close)
                await stack.enter_async_context(listed(self.own, core, place, peers))
            admin = core.settings.admin
            if admin.port is not None:
                guarded = Guard(self.of_all, core.access, Listener.ADMIN)
                core.admin_port = await stack.enter_async_context(
                    admin_listener(
                        guarded,
                        core.clients,
                        admin,
                        core.certificate.context,
                        core.settings.tls.handshake_s,
                        shared_port=place is not None,
                    )
                )
            yield


def _control_app(core: Core, operations: Operations, endpoints: _Endpoints) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with endpoints.parent(), _running(core, operations, endpoints):
            yield

    app = FastAPI(title="warmroute", lifespan=lifespan, docs_url=None, redoc_url=None)
    routers = (
        probe_routes(core),
        admin_routes(core, operations.fleet),
        breakdown_routes(core),
        client_routes(core),
        admission_routes(core),
        session_routes(core),
        meter_routes(core),
        shadow_routes(core),
        fleet_routes(core, operations),
        replica_routes(core),
        ui_routes(core, operations.fleet),
    )
    registered = [*app.routes, *(route for router in routers for route in router.routes)]
    # A route without a path, as a nested router is, may have any.
    core.access.set_endpoints(
        (str(getattr(route, "path", None) or "/"), getattr(route, "methods", None) or ()) for route in registered
    )
    for router in routers:
        app.include_router(router)
    describe_generation(app)
    _handle_errors(app, core)
    return app


@asynccontextmanager
async def _running(core: Core, operations: Operations, endpoints: _Endpoints) -> AsyncIterator[None]:
    """Everything of a proxy but its main listener."""
    core.open()
    discovering = AsyncExitStack()
    monitor, snapshots = operations.monitor, Snapshots(core)
    try:
        await discovering.enter_async_context(operations.discovery.running())
        # The first probe reads block size and capacity, so it precedes the first request.
        await monitor.probe_all()
        await snapshots.restore()
        snapshots.open()
        tasks = [
            asyncio.create_task(monitor.run(), name="health"),
            asyncio.create_task(core.events.run(), name="kv-events"),
            asyncio.create_task(ConditionWatch(core).run(), name="conditions"),
            asyncio.create_task(core.shadows.run(), name="shadows"),
        ]
        if core.certificate.context is not None:
            tasks.append(asyncio.create_task(core.certificate.watch(), name="certificate"))
        if core.sharing is not None:
            tasks.append(asyncio.create_task(core.sharing.run(), name="sharing"))
        try:
            answering = [instance.name for instance in core.instances if instance.good_probes_in_a_row]
            await core.events.caught_up(answering, core.settings.events.replay_at_start_s)
            if core.sharing is not None:
                await core.sharing.caught_up()
            async with endpoints.listening():
                yield
        finally:
            core.draining = True
            core.breakdown.end_subscriptions()
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
    finally:
        async with AsyncExitStack() as closing:
            closing.push_async_callback(core.close)
            closing.push_async_callback(operations.close)
            closing.push_async_callback(snapshots.close)
            await discovering.aclose()


def _handle_errors(app: FastAPI, core: Core) -> None:
    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return Response(error.body(), error.status, error.headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem_text(problem)}" for problem in error.errors()
        )
        return Response(error_body(problems, "invalid_request_error"), 400, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.scope["path"]
        if error.status_code in {404, 405}:
            if side_of(path) is Side.CLIENT:
                problem = unsupported(method, path, client_methods(core, request.scope))
            elif error.status_code == 405:
                problem = method_error(method, path, core.access.endpoints.methods(path))
            else:
                message = f"{method} {clip(path, 200)}: {NO_ADMIN_ENDPOINT}"
                problem = RequestError(404, message, kind="not_found_error", code="unknown_path")
            return Response(dialect_of(path).body(problem), problem.status, problem.headers, "application/json")
        message = f"{method} {path}: {error.detail}"
        return Response(
            error_body(message, "invalid_request_error"), error.status_code, error.headers, "application/json"
        )
