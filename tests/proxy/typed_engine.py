"""A scripted engine that also serves Messages and Responses, with the events of vLLM 0.18 as they were recorded."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.proxy.stub_engine import StubEngine

HEADERS = {"content-type": "text/event-stream; charset=utf-8"}


def event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


MESSAGE = [
    event(
        "message_start",
        message={"id": "chatcmpl-1", "content": [], "model": "stub", "usage": {"input_tokens": 90, "output_tokens": 0}},
    ),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    *(
        event("content_block_delta", index=0, delta={"type": "text_delta", "text": f"w{number} é\n"})
        for number in range(4)
    ),
    event("content_block_stop", index=0),
    event(
        "message_delta",
        delta={"stop_reason": "end_turn"},
        usage={
            "input_tokens": 26,
            "output_tokens": 4,
            "cache_read_input_tokens": 64,
            "cache_creation_input_tokens": 0,
        },
    ),
    event("message_stop"),
    b"data: [DONE]\n\n",
]
"""With the ``[DONE]`` that vLLM 0.18 writes after the last event, and usage as later versions report it."""
WHOLE_MESSAGE = {
    "id": "chatcmpl-1",
    "type": "message",
    "content": [{"type": "text", "text": "w"}],
    "usage": {"input_tokens": 26, "output_tokens": 4, "cache_read_input_tokens": 64},
}


def response(response_id: str, status: str) -> dict[str, Any]:
    usage = {"input_tokens": 90, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 64}}
    return {
        "id": response_id,
        "object": "response",
        "status": status,
        "output": [],
        "usage": None if status == "in_progress" else usage,
    }


def response_events(response_id: str) -> list[bytes]:
    return [
        event("response.created", sequence_number=0, response=response(response_id, "in_progress")),
        event("response.in_progress", sequence_number=1, response=response(response_id, "in_progress")),
        *(
            event("response.output_text.delta", sequence_number=2 + number, delta=f"w{number} ", output_index=0)
            for number in range(4)
        ),
        event("response.completed", sequence_number=6, response=response(response_id, "completed")),
    ]


def error_event(kind: str) -> bytes:
    """The event with which vLLM ends a message that fails."""
    return event("error", error={"type": kind, "message": "as reported"})


@dataclass
class TypedEngine(StubEngine):
    """Ids of responses begin with ``resp_`` and the engine's port."""

    piece_bytes: int = 0
    """Size of the pieces in which streams are written; 0: one event each."""
    paths: list[str] = field(default_factory=list)
    """Method and target of every request for messages or responses."""
    answered: int = 0
    computed: asyncio.Event | None = None
    """Set: the prefill of a response is over. vLLM sends the first two events of a stream before it."""
    caught: str = ""
    """Text of an exception that vLLM's Messages API answers with 500; empty: none."""

    def _more_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/messages", self._message)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_post("/v1/responses", self._respond)
        app.router.add_get("/v1/responses/{id}", self._stored)
        app.router.add_post("/v1/responses/{id}/cancel", self._stored)

    async def _typed(self, request: web.Request, whole: dict[str, Any], events: list[bytes]) -> web.StreamResponse:
        raw = await request.read()
        self.paths.append(f"{request.method} {request.path_qs}")
        self.raw_bodies.append(raw)
        self.seen_headers.append({key.lower(): value for key, value in request.headers.items()})
        body = json.loads(raw)
        self.seen.append(body)
        if self.mode == "error":
            return web.json_response({"type": "error", "error": {"type": "boom", "message": "boom"}}, status=500)
        if self.caught:
            return web.json_response(
                {"type": "error", "error": {"type": "internal_error", "message": self.caught}}, status=500
            )
        if self.mode == "reset":
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(0.05)
        try:
            if self.mode == "hang":
                await asyncio.sleep(3600)
            if not body.get("stream"):
                return web.json_response(whole)
            return await self._write(request, events)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def _write(self, request: web.Request, events: list[bytes]) -> web.StreamResponse:
        answer = web.StreamResponse(headers=HEADERS)
        await answer.prepare(request)
        if self.mode == "no_cache_counts":
            usage = {"input_tokens": 90, "output_tokens": 4}
            events = [event("message_delta", usage=usage) if b"cache_read" in each else each for each in events]
        if self.mode == "report_error":
            events = [*events[:2], error_event("internal_error")]
        if self.mode == "truncate_stream":
            events = [each for each in events[:-1] if b"message_stop" not in each]
        stream = b"".join(events)
        size = self.piece_bytes
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)] if size else events
        for number, piece in enumerate(pieces):
            if number == 2 and self.computed is not None:
                await self.computed.wait()
            if number == 3 and self.mode == "break_stream":
                assert request.transport is not None
                request.transport.abort()
                return answer
            if number == 3 and self.mode == "stall_stream":
                await asyncio.sleep(3600)
            await answer.write(piece)
            await asyncio.sleep(0)
        if self.mode == "stall_after_end":
            await asyncio.sleep(3600)
        if self.mode == "break_after_end":
            assert request.transport is not None
            request.transport.abort()
            return answer
        await answer.write_eof()
        return answer

    async def _message(self, request: web.Request) -> web.StreamResponse:
        return await self._typed(request, WHOLE_MESSAGE, MESSAGE)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        self.answered += 1
        response_id = f"resp_{self.port}_{self.answered}"
        return await self._typed(request, response(response_id, "completed"), response_events(response_id))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        return await self._typed(request, {"input_tokens": 90, "port": self.port}, [])

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(f"{request.method} {request.path_qs}")
        streamed = request.query.get("stream") == "true"
        if self.mode == "dying" or (self.mode == "no_events" and streamed):
            # As vLLM ends the stream of a response of which it has kept no events.
            answer = web.StreamResponse(headers=HEADERS)
            await answer.prepare(request)
            assert request.transport is not None
            request.transport.close()
            return answer
        if streamed:
            return await self._write(request, response_events(request.match_info["id"]))
        return web.json_response(response(request.match_info["id"], "completed"))
