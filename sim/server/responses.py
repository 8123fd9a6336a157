"""OpenAI's Responses API: creating, continuing and reading responses, with vLLM's events."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from sim.core.content import output_bytes, text_token_bytes
from sim.server.answers import Answers
from sim.server.driver import Delivery
from sim.server.fields import OrderedFields
from sim.server.parsing import ApiError, GenerationCall, call_of, decode_body, render_chat
from sim.server.settings import ServerSettings

_MAX_STORED = 1000
"""Responses kept, the oldest dropped; vLLM keeps all."""
_OF_ITEMS = frozenset(("id", "status", "type"))
"""Fields of a message item that are not in its prompt."""


class ResponseFields(OrderedFields, kw_only=True):
    """Body of POST /v1/responses: the fields that the simulator reads."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = "auto"
    metadata: dict[str, Any] | None = None
    background: bool | None = False
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    prompt: Any = None
    conversation: Any = None


_decoder = msgspec.json.Decoder(ResponseFields, strict=False)


class _Kept(NamedTuple):
    """One stored response."""

    body: bytes
    messages: list[dict[str, Any]]
    """The conversation without instructions, its output included."""


class ResponsesApi:
    """POST /v1/responses, and the responses of one engine that are stored."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def begin(self, body: bytes, settings: ServerSettings, request_id: str | None) -> tuple[GenerationCall, Answers]:
        fields = decode_body(_decoder, body)
        _refuse_unsupported(fields)
        messages = [] if fields.previous_response_id is None else list(self._find(fields.previous_response_id).messages)
        messages += _messages(fields.input)
        system = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
        tokens = text_token_bytes(render_chat([*system, *messages], fields.tools))
        call = call_of(fields, tokens, fields.max_output_tokens, settings, request_id, chat=True)
        return call, _ResponseBuilder(self, call, fields, messages, settings.model)

    def error(self, error: ApiError) -> bytes:
        return error.body

    def keep(self, response_id: str, body: bytes, messages: list[dict[str, Any]]) -> None:
        """Store a finished response."""
        self._kept[response_id] = _Kept(body, messages)
        if len(self._kept) > _MAX_STORED:
            self._kept.popitem(last=False)

    def read(self, response_id: str) -> bytes:
        """A stored response. Raises ApiError (404)."""
        return self._find(response_id).body

    def cancel(self, response_id: str) -> None:
        """Raise ApiError: 404 for an unknown response; 400 for a known one, since none runs in the background."""
        self._find(response_id)
        raise ApiError(400, "Cannot cancel a synchronous response.", "invalid_request_error", "response_id")

    def _find(self, response_id: str) -> _Kept:
        kept = self._kept.get(response_id)
        if kept is None:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, message, "invalid_request_error", "response_id")
        return kept


def _refuse_unsupported(fields: ResponseFields) -> None:
    asked = {
        "background": fields.background,
        "tool_choice": fields.tool_choice not in (None, "auto", "none"),
        "include": "message.output_text.logprobs" in (fields.include or ()),
        "text": ((fields.text or {}).get("format") or {}).get("type", "text") != "text",
        "prompt": fields.prompt is not None,
        "conversation": fields.conversation is not None,
    }
    for name, given in asked.items():
        if given:
            raise ApiError(400, f"the simulator does not support this value of '{name}'", param=name)


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input items as messages: equal conversations give equal ones, however much of them the client repeats."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = []
    for item in given:
        if isinstance(item.get("role"), str):
            messages.append({key: value for key, value in item.items() if key not in _OF_ITEMS})
        else:
            messages.append({"role": str(item.get("type")), **item})
    return messages


class _ResponseBuilder:
    """Builds one response. Generated text is ASCII letters and spaces, so it needs no JSON escaping."""

    def __init__(
        self,
        api: ResponsesApi,
        call: GenerationCall,
        fields: ResponseFields,
        messages: list[dict[str, Any]],
        model: str,
    ) -> None:
        self._api = api
        self._call = call
        self._fields = fields
        self._messages = messages
        self._offset = call.request.output_offset
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._events = 0
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": int(time.time()),
            "incomplete_details": None,
            "instructions": fields.instructions,
            "metadata": fields.metadata,
            "model": model,
            "object": "response",
            "output": [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": call.request.max_tokens,
            "previous_response_id": fields.previous_response_id,
            "status": "in_progress",
            "truncation": "disabled",
            "usage": None,
        }

    def before_prefill(self) -> bytes:
        created = self._event("response.created", response=self._head)
        return created + self._event("response.in_progress", response=self._head)

    def opening(self, _: Delivery) -> bytes:
        item = {**self._item("in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._event("response.content_part.added", **self._place(), part=part)

    def event(self, start: int, stop: int, finish_reason: str | None) -> bytes:
        if start >= stop:
            return b""
        text = output_bytes(self._offset, start, stop).decode("ascii")
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def ending(self, delivery: Delivery) -> bytes:
        text = self._text(delivery)
        done: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
        item = {**self._item("completed"), "content": [done]}
        return (
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place(), part=done)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event("response.completed", response=self._finished(delivery, item))
        )

    def failure(self, error: ApiError) -> bytes:
        details = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response={**self._head, "status": "failed", "error": details})

    def whole(self, delivery: Delivery) -> bytes:
        done: dict[str, Any] = {
            "type": "output_text",
            "text": self._text(delivery),
            "annotations": [],
            "logprobs": None,
        }
        return msgspec.json.encode(self._finished(delivery, {**self._item("completed"), "content": [done]}))

    def _finished(self, delivery: Delivery, item: dict[str, Any]) -> dict[str, Any]:
        """The response at its end, which is stored unless the request forbids it."""
        cut = delivery.finish_reason == "length"
        prompt, output = self._call.request.prompt_tokens, delivery.sent
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": delivery.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        }
        response = {
            **self._head,
            "output": [item],
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": usage,
        }
        if self._fields.store is not False:
            said = {"role": "assistant", "content": self._text(delivery)}
            self._api.keep(str(self._head["id"]), msgspec.json.encode(response), [*self._messages, said])
        return response

    def _text(self, delivery: Delivery) -> str:
        return output_bytes(self._offset, 0, delivery.sent).decode("ascii")

    def _item(self, status: str) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._events, **fields}
        self._events += 1
        return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
