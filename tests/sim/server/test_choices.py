"""Streams of several choices, token by token, without a server."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from sim.core.types import TokenEvent
from sim.server.answers import AnswerBuilder
from sim.server.driver import Delivery
from sim.server.generation import stream_choices
from sim.server.parsing import ApiError, parse_completion
from tests.sim.server.test_parsing import SETTINGS


def event(tokens: int, finish_reason: str | None, *, first: bool = False) -> TokenEvent:
    return TokenEvent("r", tokens, first, finish_reason, 0, None, 0.0)


@pytest.mark.parametrize("turns_between", range(6))
async def test_tokens_that_arrive_while_an_event_is_built_are_sent(turns_between: int) -> None:
    call = parse_completion(b'{"prompt":"hello","n":2,"stream":true,"max_tokens":40}', SETTINGS, None)
    deliveries = [Delivery(request, 0.0, True, 1) for request in call.requests]
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])

    refusal = ApiError(500, "failed")
    reader = asyncio.create_task(stream_choices(AnswerBuilder(call, "m"), deliveries, send, refusal))
    await asyncio.sleep(0)
    for tokens, reason in ((29, None), (11, "length")):
        for delivery in deliveries:
            delivery.put(event(tokens, reason, first=reason is None))
            delivery.wake()
        for _ in range(turns_between):
            await asyncio.sleep(0)
    assert await reader
    for index in range(2):
        events = [line for line in b"".join(sent).decode().split("\n\n") if f'"index":{index},' in line]
        texts = [found[1] for line in events if (found := re.search(r'"text":"([^"]*)"', line))]
        assert len("".join(texts)) == 160
        assert ["length" in line for line in events] == [False] * (len(events) - 1) + [True]
