"""A scripted engine that answers every POST, and records it as it came."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from tests.proxy.stub_engine import StubEngine

AUDIO = [b"\xff\xf3" + bytes([number]) * 500 for number in range(5)]
EVENTS = [b'data: {"type":"speech.audio.delta"}\n\n', b'data: {"type":"speech.audio.done"}\n\n']


@dataclass
class Arrived:
    """One request as the engine received it."""

    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class PassingEngine(StubEngine):
    """``mode``: ``ok``, ``error``, ``hang``, ``audio``, ``events``, ``break_audio``, ``break_events``, ``no_model``."""

    arrived: list[Arrived] = field(default_factory=list)
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer_fields: dict[str, object] = field(default_factory=dict)
    version: str = "0.18.1"

    def _more_routes(self, app: web.Application) -> None:
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/files/{name}", self._pass)
        app.router.add_post("/{path:.*}", self._pass)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        headers = {key.lower(): value for key, value in request.headers.items()}
        self.arrived.append(Arrived(f"{request.method} {request.path_qs}", headers, await request.read()))
        if self.mode == "error":
            return web.json_response({"error": {"message": "boom"}}, status=500)
        if self.mode == "no_model":
            error = {"message": "The model `stub` does not exist.", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        if self.mode == "hang":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        if self.mode.endswith("audio"):
            return await self._write(request, "audio/mpeg", AUDIO)
        if self.mode.endswith("events"):
            return await self._write(request, "text/event-stream; charset=utf-8", EVENTS)
        return web.json_response({"answered": request.path, **self.answer_fields}, headers=self.answer_headers)

    async def _write(self, request: web.Request, kind: str, pieces: list[bytes]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": kind})
        await answer.prepare(request)
        for number, piece in enumerate(pieces):
            if number == len(pieces) - 1 and self.mode.startswith("break"):
                assert request.transport is not None
                await asyncio.sleep(0.05)
                request.transport.abort()
                return answer
            await answer.write(piece)
        await answer.write_eof()
        return answer
