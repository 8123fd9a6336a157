"""Conversations for tests of the detector, and rows as the proxy fills them."""

from __future__ import annotations

import json
import random
from typing import Any

from policies.row import RequestOutcome, Row
from proxy.request.parse import Endpoint, Parsed
from proxy.sessions.cache_killers import CacheKiller, CacheKillers
from proxy.settings import CacheKillerSettings
from tests.proxy.request.parsing import parse_request

BLOCK_BYTES = 1024
Messages = list[dict[str, Any]]


def words(count: int, seed: int) -> str:
    """Text without digits, different for each seed."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghijklmnop", k=5)) for _ in range(count))


def conversation(turns: int, system: str = "", seed: int = 1, length: int = 300) -> Messages:
    """A system prompt and ``turns`` questions, with the answers between them."""
    messages: Messages = [{"role": "system", "content": system + words(length, seed)}]
    for number in range(turns):
        if number:
            messages.append({"role": "assistant", "content": words(length, seed * 1000 + number)})
        messages.append({"role": "user", "content": words(length, seed * 2000 + number)})
    return messages


def billing_line(number: int) -> str:
    """The first line of Claude Code's system prompt, as its request ``number`` has it."""
    cch = f"{number * 7919 % 0xFFFFF:05x}"
    return f"x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={cch};\n"


def parsed_chat(messages: Messages, **fields: Any) -> Parsed:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return parse_request(Endpoint.CHAT, body, 16, BLOCK_BYTES, seed=7)


def parsed(endpoint: Endpoint, **body: Any) -> Parsed:
    encoded = json.dumps({"model": "m", **body}, separators=(",", ":")).encode()
    return parse_request(endpoint, encoded, 16, BLOCK_BYTES, seed=7)


def claude_code_turn(turns: int, line: str, seed: int = 1, length: int = 300) -> dict[str, Any]:
    """System prompt, tools and messages as Claude Code sends them: the cache marks move to the end in every turn."""
    mark = {"cache_control": {"type": "ephemeral"}}
    system, *messages = conversation(turns, seed=seed, length=length)
    blocks = [line, "You are Claude Code. ", system["content"]]
    for number, message in enumerate(messages):
        text = {"type": "text", "text": message["content"]}
        if number == len(messages) - 1:
            message["content"] = [{**text, **mark}]
        elif number % 4 == 0:  # some clients write a list in every turn, others only where there is a mark
            message["content"] = [text]
    return {
        "system": [{"type": "text", "text": text, **(mark if number else {})} for number, text in enumerate(blocks)],
        "tools": [{"name": f"t{number}", "description": words(20, number)} for number in range(6)],
        "messages": messages,
        "max_tokens": 2,
    }


class Watch:
    """A detector and the requests sent to it."""

    def __init__(self, **settings: Any) -> None:
        self.killers = CacheKillers(CacheKillerSettings(**settings), BLOCK_BYTES)
        self._requests = 0

    def turn(
        self, messages: Messages, session: str | None = "s", cached: int | None = None, **fields: Any
    ) -> CacheKiller | None:
        return self.see(parsed_chat(messages, **fields), session, cached)

    def see(self, request: Parsed, session: str | None = "s", cached: int | None = None) -> CacheKiller | None:
        self._requests += 1
        row = Row(f"r{self._requests}", request.endpoint.value, float(self._requests), session)
        row.outcome = RequestOutcome.OK
        row.prompt_tokens, row.actual_cached_tokens = request.prompt.text_bytes // 4, cached
        return self.killers.observe(request, row)
