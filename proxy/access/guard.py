"""ASGI guard of one listener: only requests that ``Access`` allows reach the FastAPI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from proxy.access.rules import Access, Listener
from proxy.errors import RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI application that checks ``access`` first; ``request.state.admin_key`` is the admin key's name."""

    def __init__(self, app: Application, access: Access, listener: Listener) -> None:
        self._app = app
        self._access = access
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] == "http":
            try:
                client = scope.get("client")
                name = self._access.check(
                    self._listener,
                    scope["method"],
                    scope["path"],
                    dict(scope["headers"]),
                    peer=client[0] if client else "?",
                )
            except RequestError as error:
                await _refuse(send, error)
                return
            scope.setdefault("state", {})["admin_key"] = name
        elif scope["type"] == "websocket":
            # No route uses WebSocket, and browsers let any page open one.
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)


async def _refuse(send: Send, error: RequestError) -> None:
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
