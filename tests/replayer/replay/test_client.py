"""Tokens of each event as the client reports them."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from replayer.replay.client import ReplayedAnswer, send


async def reported(*events: dict[str, Any]) -> tuple[ReplayedAnswer, list[tuple[str, int]]]:
    """The answer to a request whose stream has these events, and what ``on_output`` was called with."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    found: list[tuple[str, int]] = []
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with aiohttp.ClientSession() as http:
            got = await send(http, url, b"{}", {}, 30.0, lambda text, tokens, now_s: found.append((text, tokens)))
    finally:
        await runner.cleanup()
    return got, found


def event(text: str, tokens: int | None = None, ids: list[int] | None = None, end: str | None = None) -> dict[str, Any]:
    usage = None if tokens is None else {"prompt_tokens": 9, "completion_tokens": tokens}
    return {"choices": [{"text": text, "token_ids": ids, "finish_reason": end}], "usage": usage}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((event("a"), event("bc", end="length")), [("a", 1), ("bc", 1)]),
        ((event("a", ids=[1]), event("bc", ids=[2, 3], end="length")), [("a", 1), ("bc", 2)]),
        ((event("a", 1), event("bcd", 4), event("e", 5, end="length")), [("a", 1), ("bcd", 3), ("e", 1)]),
    ],
    ids=["neither", "token ids", "usage of every event"],
)
async def test_tokens_of_an_event(events: tuple[dict[str, Any], ...], expected: list[tuple[str, int]]) -> None:
    answer, found = await reported(*events)
    assert answer.ok, answer.error
    assert found == expected
