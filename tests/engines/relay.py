"""A thin HTTP relay between the proxy and a real engine, in which a test can inspect, hold, change or cut messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

Before = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""(path, body) -> body to send on."""
After = Callable[[str, dict[str, Any]], Awaitable[None]]
"""(path, body as sent): called when the whole answer has arrived, before any of it is passed on."""
Change = Callable[[bytes], bytes]
"""Answer of a GET -> answer to give."""


class Relay:
    """Passes everything on by default; ``bodies`` keeps every POST body, ``answers`` the bytes that were passed on."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[bytes] = []
        self.before: Before | None = None
        self.after: After | None = None
        self.change: Change | None = None
        self._client: aiohttp.ClientSession
        self._runner: web.AppRunner

    @property
    def url(self) -> str:
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A departed client must end the request to the engine, as it would without the relay.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300))
        await self.listen()

    async def listen(self) -> None:
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def close_port(self) -> None:
        """Refuse connections from now on."""
        for site in list(self._runner.sites):
            await site.stop()

    async def stop(self) -> None:
        await self._client.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await (self._get if request.method == "GET" else self._post)(request)
        except aiohttp.ClientError:
            # The engine refused or broke off: the relay does the same.
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None

    async def _get(self, request: web.Request) -> web.StreamResponse:
        async with self._client.get(self.target + request.path_qs) as answer:
            content = await answer.read()
        changed = self.change(content) if self.change else content
        response = web.Response(status=answer.status, body=changed, content_type=answer.content_type)
        # Kept connections would survive `close_port`.
        response.force_close()
        return response

    async def _post(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path_qs, json.loads(await request.read())
        self.bodies.append(body)
        if self.before:
            body = await self.before(path, body)
        async with self._client.post(self.target + path, json=body) as answer:
            return await self._pass_on(request, answer, path, body)

    async def _pass_on(
        self, request: web.Request, answer: aiohttp.ClientResponse, path: str, body: dict[str, Any]
    ) -> web.StreamResponse:
        if self.after:
            content = await answer.read()
            await self.after(path, body)
            return web.Response(status=answer.status, body=content, content_type=answer.content_type)
        response = web.StreamResponse(status=answer.status, headers={"content-type": answer.headers["content-type"]})
        await response.prepare(request)
        passed = bytearray()
        async for piece in answer.content.iter_any():
            passed += piece
            await response.write(piece)
        await response.write_eof()
        self.answers.append(bytes(passed))
        return response
