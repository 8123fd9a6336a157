"""A scripted engine for coding agents: it calls their tools, in the events of messages and of responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiohttp import web

from tests.proxy.typed_engine import TypedEngine, event


class ToolCall(NamedTuple):
    """An answer that is a call of one of the client's tools."""

    name: str
    arguments: dict[str, Any]


Script = Callable[[dict[str, Any]], ToolCall | str]
"""Request body to answer."""


def tool_results(body: dict[str, Any]) -> list[str]:
    """Results of tools in a messages or responses body, as JSON."""
    found = [item["output"] for item in body.get("input", ()) if item["type"] == "function_call_output"]
    for message in body.get("messages", ()):
        blocks = message["content"] if isinstance(message["content"], list) else []
        found += [block["content"] for block in blocks if block["type"] == "tool_result"]
    return [json.dumps(each) for each in found]


def message_events(answer: ToolCall | str) -> list[bytes]:
    """A streamed message; the usage counts 900 of 1,000 prompt tokens as read from the cache."""
    if isinstance(answer, str):
        block: dict[str, Any] = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": answer}
    else:
        block = {"type": "tool_use", "id": "toolu_1", "name": answer.name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(answer.arguments)}
    usage = {"input_tokens": 100, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 0}
    start: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "stub",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    reason = {"stop_reason": "end_turn" if isinstance(answer, str) else "tool_use", "stop_sequence": None}
    return [
        event("message_start", message=start),
        event("content_block_start", index=0, content_block=block),
        event("content_block_delta", index=0, delta=delta),
        event("content_block_stop", index=0),
        event("message_delta", delta=reason, usage={**usage, "output_tokens": 8}),
        event("message_stop"),
    ]


def responses_events(response_id: str, answer: ToolCall | str) -> list[bytes]:
    """A streamed response; the usage counts 900 of 1,000 prompt tokens as read from the cache."""
    if isinstance(answer, str):
        part = {"type": "output_text", "text": answer, "annotations": []}
        item: dict[str, Any] = {"id": "i", "type": "message", "role": "assistant", "content": [part]}
        deltas = [event("response.output_text.delta", item_id="i", output_index=0, content_index=0, delta=answer)]
    else:
        arguments = json.dumps(answer.arguments)
        item = {"id": "i", "type": "function_call", "call_id": "c", "name": answer.name, "arguments": arguments}
        deltas = [event("response.function_call_arguments.delta", item_id="i", output_index=0, delta=arguments)]
    without: dict[str, Any] = {"content": []} if isinstance(answer, str) else {"arguments": ""}
    empty = {**item, **without, "status": "in_progress"}
    usage = {
        "input_tokens": 1000,
        "input_tokens_details": {"cached_tokens": 900},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 1008,
    }
    whole = {"id": response_id, "object": "response", "status": "completed", "output": [item], "usage": usage}
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    return [
        event("response.created", response=begun),
        event("response.output_item.added", output_index=0, item=empty),
        *deltas,
        event("response.output_item.done", output_index=0, item={**item, "status": "completed"}),
        event("response.completed", response=whole),
    ]


@dataclass
class AgentEngine(TypedEngine):
    """Answers streamed messages and responses as ``script`` says."""

    script: Script = lambda body: "done"

    async def _message(self, request: web.Request) -> web.StreamResponse:
        return await self._typed(request, {}, message_events(self.script(json.loads(await request.read()))))

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        self.answered += 1
        answer = self.script(json.loads(await request.read()))
        return await self._typed(request, {}, responses_events(f"resp_{self.answered}", answer))
