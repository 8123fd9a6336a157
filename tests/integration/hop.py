"""A hop between proxy and engine that loses request headers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web


class Hop:
    """A hop between proxy and engine that removes request headers, all but a few, while ``strips``."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.strips = False

    async def handle(self, request: web.Request) -> web.Response:
        kept = {"content-type"} if self.strips else {"content-type", "x-request-id"}
        headers = {name: value for name, value in request.headers.items() if name.lower() in kept}
        url, body = self._target + request.path_qs, await request.read()
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url, data=body, headers=headers) as answer,
        ):
            return web.Response(
                body=await answer.read(), status=answer.status, headers={"content-type": answer.headers["content-type"]}
            )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            assert site._server is not None
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        finally:
            await runner.cleanup()
