"""Route of an admin endpoint: what FastAPI would ignore in a request is refused, and a body needs no content type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from proxy.clip import clip
from proxy.errors import RequestError


class AdminRoute(APIRoute):
    """Route that refuses query parameters it does not have: an ignored ``?dryrun=true`` is a real reload."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Handler of a request, for FastAPI. Raises RequestError (400) for an unknown parameter."""
        handle = super().get_route_handler()
        known = [parameter.alias for parameter in self.dependant.query_params]

        async def checked(request: Request) -> Response:
            _refuse_unknown(request, known)
            return await handle(request)

        return checked


def _refuse_unknown(request: Request, known: Collection[str]) -> None:
    unknown = next((name for name in request.query_params if name not in known), None)
    if unknown is not None:
        has = f"known: {', '.join(known)}" if known else "it has none"
        raise RequestError(
            400,
            f"{request.method} {clip(request.url.path, 200)}: unknown query parameter {clip(unknown, 100)!r}; {has}",
            code="unknown_parameter",
            param=unknown,
        )
