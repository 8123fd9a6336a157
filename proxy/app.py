"""The ASGI application: FastAPI for everything but generation, and the lifespan of the core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from proxy.access.guard import Guard
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
from proxy.admin.routes import admin_routes
from proxy.admin.session_routes import session_routes
from proxy.admin.shadow_routes import shadow_routes
from proxy.admin_listener import admin_listener
from proxy.core import Core
from proxy.errors import RequestError, error_body
from proxy.exchange.generation import Generation
from proxy.metrics.conditions import ConditionMetrics
from proxy.operations.operations import Operations
from proxy.restart.snapshots import Snapshots
from proxy.settings import Settings
from proxy.ui.routes import ui_routes


class ProxyApp:
    """ASGI application over one core; ``generation`` handles the generation requests of the listener."""

    def __init__(self, settings: Settings) -> None:
        self.core = core = Core(settings)
        ConditionMetrics(core.metrics.registry, lambda: ((each.name, each.ok) for each in conditions(core)))
        self.operations = Operations(self.core)
        self.generation = Generation(self.core)
        guarded = Guard(_control_app(self.core, self.operations), self.core.access, Listener.MAIN)
        self._rest = ClientSide(guarded, self.core)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI entry point."""
        await self._rest(scope, receive, send)


@asynccontextmanager
async def _admin_listener(app: FastAPI, core: Core) -> AsyncIterator[None]:
    """Run the admin endpoints' own listener, if configured."""
    admin = core.settings.admin
    if admin.port is None:
        yield
        return
    guarded = Guard(app, core.access, Listener.ADMIN)
    async with admin_listener(guarded, core.clients, admin, core.settings.tls) as core.admin_port:
        yield


def _control_app(core: Core, operations: Operations) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
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
            if core.sharing is not None:
                tasks.append(asyncio.create_task(core.sharing.run(), name="sharing"))
            try:
                answering = [instance.name for instance in core.instances if instance.good_probes_in_a_row]
                await core.events.caught_up(answering, core.settings.events.replay_at_start_s)
                if core.sharing is not None:
                    await core.sharing.caught_up()
                async with _admin_listener(app, core):
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

    app = FastAPI(title="warmroute", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(admin_routes(core, operations.fleet))
    app.include_router(breakdown_routes(core))
    app.include_router(client_routes(core))
    app.include_router(admission_routes(core))
    app.include_router(session_routes(core))
    app.include_router(meter_routes(core))
    app.include_router(shadow_routes(core))
    app.include_router(fleet_routes(core, operations))
    app.include_router(replica_routes(core))
    app.include_router(ui_routes(core, operations.fleet))
    describe_generation(app)

    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s is not None else {}
        return Response(error.body(), error.status, headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in error.errors()
        )
        return Response(error_body(problems, "invalid_request_error"), 400, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.scope["path"]
        if error.status_code in {404, 405} and side_of(path) is Side.CLIENT:
            methods = client_methods(core, request.scope)
            problem = unsupported(method, path, methods)
            allowed = {"allow": ", ".join(methods)} if methods else {}
            return Response(problem.body(), problem.status, allowed, "application/json")
        message = f"{method} {path}: {error.detail}"
        return Response(
            error_body(message, "invalid_request_error"), error.status_code, error.headers, "application/json"
        )

    return app
