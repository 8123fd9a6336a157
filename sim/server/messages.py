"""Anthropic's Messages API, with vLLM's events and its report of the cache as Anthropic defines it."""

from __future__ import annotations

from typing import Any

import msgspec

from sim.core.content import output_bytes, text_token_bytes
from sim.server.answers import Answers
from sim.server.driver import Delivery
from sim.server.fields import GenerationFields
from sim.server.parsing import ApiError, GenerationCall, call_of, check_model, decode_body, render_chat
from sim.server.settings import ServerSettings

_BILLING = "x-anthropic-billing-header"
"""Beginning of a block of the system prompt that vLLM leaves out: it differs in every request of Claude Code."""
_STOP_REASONS = (("stop", "end_turn"), ("length", "max_tokens"))


class MessageFields(GenerationFields, kw_only=True):
    """Body of POST /v1/messages, and of /v1/messages/count_tokens: the fields that the simulator reads."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    output_config: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(MessageFields, strict=False)


class MessagesApi:
    """POST /v1/messages."""

    def begin(self, body: bytes, settings: ServerSettings, request_id: str | None) -> tuple[GenerationCall, Answers]:
        fields = decode_body(_decoder, body)
        if fields.max_tokens is None:
            raise ApiError(400, "invalid request: Object missing required field `max_tokens`", param="max_tokens")
        _refuse_unsupported(fields)
        fields.stop = fields.stop_sequences
        call = call_of(fields, _tokens(fields), fields.max_tokens, settings, request_id, chat=True)
        return call, _MessageBuilder(call, settings.model)

    def error(self, error: ApiError) -> bytes:
        return msgspec.json.encode({"type": "error", "error": {"type": error.kind, "message": str(error)}})


def count_tokens(body: bytes, settings: ServerSettings) -> bytes:
    """The answer to POST /v1/messages/count_tokens. Raises ApiError."""
    fields = decode_body(_decoder, body)
    check_model(fields.model, settings)
    count = len(_tokens(fields)) // 4
    return msgspec.json.encode({"input_tokens": count, "context_management": {"original_input_tokens": count}})


def _refuse_unsupported(fields: MessageFields) -> None:
    choice = (fields.tool_choice or {}).get("type", "auto")
    if choice not in {"auto", "none"}:
        raise ApiError(
            400, f"the simulator calls no tools: tool_choice {choice!r} is not supported", param="tool_choice"
        )
    if (fields.output_config or {}).get("format") is not None:
        raise ApiError(400, "the simulator supports no structured outputs", param="output_config")


def _tokens(fields: MessageFields) -> bytes:
    messages = [{**each, "content": _unmarked(each.get("content"))} for each in fields.messages]
    if fields.system:
        messages.insert(0, {"role": "system", "content": _system(fields.system)})
    return text_token_bytes(render_chat(messages, fields.tools and [_unmarked(tool) for tool in fields.tools]))


def _system(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    texts = [block.get("text") for block in system]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(_BILLING))


def _unmarked(content: Any) -> Any:
    """Content without ``cache_control``, which no prompt has."""
    if isinstance(content, list):
        return [_unmarked(each) for each in content]
    if isinstance(content, dict):
        return {key: _unmarked(value) for key, value in content.items() if key != "cache_control"}
    return content


class _MessageBuilder:
    """Builds one message. Generated text is ASCII letters and spaces, so it needs no JSON escaping."""

    def __init__(self, call: GenerationCall, model: str) -> None:
        self._call = call
        self._offset = call.request.output_offset
        self._head = {"id": call.public_id, "type": "message", "role": "assistant", "model": model}

    def before_prefill(self) -> bytes:
        return b""

    def opening(self, delivery: Delivery) -> bytes:
        message: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        start = {"type": "message_start", "message": {**message, "usage": self._usage(delivery, 0)}}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return _event(start) + _event(block)

    def event(self, start: int, stop: int, finish_reason: str | None) -> bytes:
        if start >= stop:
            return b""
        text = output_bytes(self._offset, start, stop)
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"' + text + b'"}}\n\n'
        )

    def ending(self, delivery: Delivery) -> bytes:
        delta = {"stop_reason": _stop_reason(delivery), "stop_sequence": None}
        usage = self._usage(delivery, delivery.sent)
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({"type": "message_delta", "delta": delta, "usage": usage})
            + _event({"type": "message_stop"})
        )

    def failure(self, error: ApiError) -> bytes:
        return _event({"type": "error", "error": {"type": error.kind, "message": str(error)}})

    def whole(self, delivery: Delivery) -> bytes:
        text = output_bytes(self._offset, 0, delivery.sent).decode("ascii")
        return msgspec.json.encode(
            {
                **self._head,
                "content": [{"type": "text", "text": text}],
                "stop_reason": _stop_reason(delivery),
                "stop_sequence": None,
                "usage": self._usage(delivery, delivery.sent),
            }
        )

    def _usage(self, delivery: Delivery, output_tokens: int) -> dict[str, int]:
        return {
            "input_tokens": self._call.request.prompt_tokens - delivery.cached_tokens,
            "output_tokens": output_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": delivery.cached_tokens,
        }


def _stop_reason(delivery: Delivery) -> str | None:
    return dict(_STOP_REASONS).get(delivery.finish_reason or "")


def _event(event: dict[str, Any]) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
