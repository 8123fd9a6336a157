"""Response bodies of the API: completion and chat objects, stream events, usage, model lists."""

from __future__ import annotations

import time

import msgspec

from sim.core.content import output_bytes
from sim.server.driver import Delivery
from sim.server.parsing import GenerationCall

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

    def opening(self) -> bytes:
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
