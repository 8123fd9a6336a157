"""ASGI application before the guard of the main listener: ``OPTIONS`` and cross-origin headers of the client side."""

from __future__ import annotations

from proxy.access.guard import Application, Message, Receive, Scope, Send
from proxy.access.rules import Side, side_of
from proxy.admin.client_routes import client_methods, unsupported
from proxy.core import Core


class ClientSide:
    """Answers ``OPTIONS`` for paths of the client side, and adds cross-origin headers to other answers there."""

    def __init__(self, app: Application, core: Core) -> None:
        self._app = app
        self._core = core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http" or side_of(scope["path"]) is Side.ADMIN:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await self._options(scope, send)
        elif self._core.cors.enabled:
            more = self._core.cors.headers(dict(scope["headers"]))

            async def send_with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), *more]}
                await send(message)

            await self._app(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send)

    async def _options(self, scope: Scope, send: Send) -> None:
        path, cors, headers = scope["path"], self._core.cors, dict(scope["headers"])
        methods = client_methods(self._core, scope)
        if methods:
            status, body, answer = 204, b"", cors.preflight(headers, methods)
        else:
            problem = unsupported("OPTIONS", path, ())
            status, body = problem.status, problem.body()
            answer = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            answer += cors.headers(headers)
        await send({"type": "http.response.start", "status": status, "headers": answer})
        await send({"type": "http.response.body", "body": body})
