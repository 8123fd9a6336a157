"""Response bodies of the API: completion and chat objects, stream events, usage, model lists."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from sim.core.content import output_bytes
from sim.server.driver import Delivery
from sim.server.parsing import ApiError, GenerationCall, parse_chat, parse_completion
from sim.server.settings import ServerSettings

DONE = b"data: [DONE]\n\n"


def usage(call: GenerationCall, delivery: Delivery) -> dict[str, object]:
    """Token counts; as in vLLM 0.18.1 the details are null when nothing was cached."""
    cached = delivery.cached_tokens
    prompt = call.request.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": delivery.sent,
        "total_tokens": prompt + delivery.sent,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
    }


class Answers(Protocol):
    """Builds the answer to one call in the shape of its API."""

    def opening(self, delivery: Delivery) -> bytes:
        """The events that begin a stream; sent with the first token."""
        ...

    def event(self, start: int, stop: int, finish_reason: str | None) -> bytes:
        """The stream event with generated tokens ``start`` to ``stop``."""
        ...

    def ending(self, delivery: Delivery) -> bytes:
        """The events that end a complete stream."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream which failed."""
        ...

    def whole(self, delivery: Delivery) -> bytes:
        """The answer without streaming."""
        ...


class Api(Protocol):
    """One generation API."""

    def begin(self, body: bytes, settings: ServerSettings, request_id: str | None) -> tuple[GenerationCall, Answers]:
        """The call of one body, and the builder of its answer. Raises ApiError."""
        ...

    def error(self, error: ApiError) -> bytes:
        """An error answer's body."""
        ...


class OpenAiApi:
    """Completions, or with ``chat`` chat completions."""

    def __init__(self, *, chat: bool) -> None:
        self._parse = parse_chat if chat else parse_completion

    def begin(self, body: bytes, settings: ServerSettings, request_id: str | None) -> tuple[GenerationCall, Answers]:
        call = self._parse(body, settings, request_id)
        return call, AnswerBuilder(call, settings.model)

    def error(self, error: ApiError) -> bytes:
        return error.body


class AnswerBuilder:
    """Builds the answer to one call. Generated text is ASCII letters and spaces, so it needs no JSON escaping."""

    def __init__(self, call: GenerationCall, model: str) -> None:
        self._call = call
        self._offset = call.request.output_offset
        self._created = int(time.time())
        self._model = model
        kind = "chat.completion" if call.chat else "text_completion"
        self._head = {"id": call.public_id, "object": kind, "created": self._created, "model": model}
        stream_head = {**self._head, "object": "chat.completion.chunk"} if call.chat else self._head
        self._event_head = b"data: " + msgspec.json.encode(stream_head)[:-1]

    def opening(self, _: Delivery) -> bytes:
        """The event that opens a chat stream; nothing for completions."""
        if not self._call.chat:
            return b""
        choice = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._event_head + b',"choices":[' + choice + b"]}\n\n"

    def event(self, start: int, stop: int, finish_reason: str | None) -> bytes:
        """The stream event with generated tokens ``start`` to ``stop``."""
        text = output_bytes(self._offset, start, stop)
        reason = b"null" if finish_reason is None else b'"' + finish_reason.encode() + b'"'
        body = b'"delta":{"content":"' + text + b'"}' if self._call.chat else b'"text":"' + text + b'"'
        tail = b',"logprobs":null,"finish_reason":' + reason + b',"stop_reason":null}]}\n\n'
        return self._event_head + b',"choices":[{"index":0,' + body + tail

    def ending(self, delivery: Delivery) -> bytes:
        """The usage, if the request set ``include_usage``, and the end mark."""
        return (self.usage_event(delivery) if self._call.include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error and the end mark."""
        return b"data: " + error.body + b"\n\n" + DONE

    def usage_event(self, delivery: Delivery) -> bytes:
        """The last event of a stream whose request set ``include_usage``."""
        return (
            self._event_head + b',"choices":[],"usage":' + msgspec.json.encode(usage(self._call, delivery)) + b"}\n\n"
        )

    def whole(self, delivery: Delivery) -> bytes:
        """The answer without streaming."""
        text = output_bytes(self._offset, 0, delivery.sent).decode("ascii")
        choice: dict[str, object] = {"index": 0}
        if self._call.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": delivery.finish_reason, "stop_reason": None}
        return msgspec.json.encode(
            {**self._head, "choices": [choice], "usage": usage(self._call, delivery), "kv_transfer_params": None}
        )


def models(model: str, max_model_len: int, started_unix_s: float) -> bytes:
    """The answer to GET /v1/models."""
    entry = {
        "id": model,
        "object": "model",
        "created": int(started_unix_s),
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
    return msgspec.json.encode({"object": "list", "data": [entry]})
