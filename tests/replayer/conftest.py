"""A stub engine that records what it is asked, and small traces."""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from replayer.traces.trace import Trace, TraceRequest
from tests.replayer.constructed_runs import run_maker, stored

__all__ = ["run_maker", "stored"]

BLOCK = 16


@dataclass
class Call:
    """One request as the stub saw it."""

    request_id: str
    session_id: str
    body: dict[str, Any]
    overlapping: bool
    """True if another request of the session was in progress."""


@dataclass
class Stub:
    """An OpenAI endpoint. ``faults`` maps request ids to what goes wrong."""

    url: str = ""
    key: str = ""
    """Without it the list of models is refused; empty: none is wanted."""
    calls: list[Call] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    pieces: int = 1
    """Send each event in so many pieces, to tear lines apart."""
    inflight: dict[str, int] = field(default_factory=dict)
    most_sessions: int = 0
    hold_after: int | None = None
    """Answers to calls past this number never come."""
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a call is held."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rid, sid = request.headers["x-request-id"], request.headers["x-session-id"]
        self.calls.append(Call(rid, sid, body, self.inflight.get(sid, 0) > 0))
        self.inflight[sid] = self.inflight.get(sid, 0) + 1
        self.most_sessions = max(self.most_sessions, sum(count > 0 for count in self.inflight.values()))
        try:
            return await self._answer(request, body, self.faults.get(rid, ""))
        finally:
            self.inflight[sid] -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        if self.hold_after is not None and len(self.calls) > self.hold_after:
            self.held.set()
            await asyncio.sleep(60)
        await asyncio.sleep(self.delay_s)
        if fault == "busy":
            return web.json_response({"error": {"message": "too busy"}}, status=503)
        if fault == "hang":
            await asyncio.sleep(30)
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream",
                "x-warmroute-instance": "inst-3",
                "x-warmroute-class": "WARM",
                "x-warmroute-reason": "lowest_score",
                "x-warmroute-predicted-cached-tokens": "7",
            }
        )
        await response.prepare(request)
        count = body["max_tokens"]
        key = "text" if "prompt" in body else "delta"
        if key == "delta":
            await self._event(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if fault == "garbage":
            await response.write(b"data: {not json\n\n")
        for index in range(count):
            if fault == "cut" and index == 1:
                assert request.transport is not None
                request.transport.close()
                return response
            if fault == "error_event":
                await self._event(response, {"error": {"message": "out of memory"}, "choices": []})
                break
            said = {"text": " a"} if key == "text" else {"delta": {"content": " a"}}
            finish = "length" if index == count - 1 and fault != "early_end" else None
            await self._event(response, {"choices": [{"index": 0, **said, "finish_reason": finish}]})
        if fault == "early_end":
            return response
        prompt = body.get("prompt")
        usage = {
            "prompt_tokens": len(prompt) if isinstance(prompt, list) else 5,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        size = -(-len(data) // self.pieces)
        for start in range(0, len(data), size):
            await response.write(data[start : start + size])
            await asyncio.sleep(0)

    async def models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        return web.json_response({"object": "list", "data": [{"id": "stub-model", "object": "model"}]})


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    """A running stub on a free port."""
    state = Stub()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", state.complete)
    app.router.add_post("/v1/chat/completions", state.complete)
    app.router.add_get("/v1/models", state.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        state.url = f"http://{host}:{port}"
        yield state
    finally:
        await runner.cleanup()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of reports empty: they are made, and to draw them is most of the time of a report."""
    monkeypatch.setattr("replayer.report.figures.style.Drawing.inline", lambda drawing: "<svg></svg>")


def make_trace(sessions: int = 3, turns: int = 3, *, gap_s: float = 0.0, think_s: float | None = 0.0) -> Trace:
    """Growing conversations of blocks of 16 tokens, sessions ``gap_s`` apart, turns interleaved in time."""
    requests = []
    for turn in range(turns):
        for session in range(sessions):
            blocks = 2 * (turn + 1)
            requests.append(
                TraceRequest(
                    chat_id=session * turns + turn,
                    parent_chat_id=-1 if turn == 0 else session * turns + turn - 1,
                    session_id=f"s{session}",
                    turn=turn + 1,
                    timestamp_s=session * gap_s + turn * 1000.0,
                    input_length=blocks * BLOCK + 3,
                    output_length=2 + turn,
                    hash_ids=array("q", [session * 1000 + block for block in range(blocks)]),
                    think_time_s=think_s,
                )
            )
    requests.sort(key=lambda request: request.timestamp_s)
    return Trace(requests=requests, block_tokens=BLOCK, tail="floor", name="small", sha256="0123456789abcdef" * 4)


@pytest.fixture(scope="session")
def public_traces() -> Path:
    """The folder of public traces, or skip."""
    folder = Path(os.environ.get("WARMROUTE_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    return folder
