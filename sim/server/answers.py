"""Response bodies of the API: completion and chat objects, stream events, usage, model lists."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from sim.core.content import TOKEN_BYTES, output_bytes
from sim.server.driver import Delivery
from sim.server.parsing import ApiError, GenerationCall, parse_chat, parse_completion
from sim.server.settings import ServerSettings

DONE = b"data: [DONE]\n\n"
_LOGPROB_STEP = 0.125
"""Difference between the log probabilities of two alternatives; a power of two, so that it is exact in JSON."""


def usage(call: GenerationCall, deliveries: Sequence[Delivery]) -> dict[str, object]:
    """Token counts of all choices, each prompt counted once; as in vLLM 0.18.1 the details are null for no hit."""
    cached = sum(delivery.cached_tokens for delivery in deliveries[:: call.choices])
    prompt = sum(request.prompt_tokens for request in call.requests[:: call.choices])
    sent = sum(delivery.sent for delivery in deliveries)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sent,
        "total_tokens": prompt + sent,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
    }


class Answers(Protocol):
    """Builds the answer to one call in the shape of its API."""

    def before_prefill(self) -> bytes:
        """The events that begin a stream before anything is computed."""
        ...

    def opening(self, delivery: Delivery) -> bytes:
        """The events that come with the first token, before it."""
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
        self._offsets = [request.output_offset for request in call.requests]
        self._created = int(time.time())
        self._model = model
        kind = "chat.completion" if call.chat else "text_completion"
        self._head = {"id": call.public_id, "object": kind, "created": self._created, "model": model}
        stream_head = {**self._head, "object": "chat.completion.chunk"} if call.chat else self._head
        self._event_head = b"data: " + msgspec.json.encode(stream_head)[:-1]

    def before_prefill(self) -> bytes:
        """No events: vLLM begins these streams with the first token."""
        return b""

    def opening(self, _: Delivery, index: int = 0) -> bytes:
        """The event that opens a chat's choice; nothing for completions."""
        if not self._call.chat:
            return b""
        choice = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._event_head + b',"choices":[{"index":%d,' % index + choice + b"]}\n\n"

    def event(self, start: int, stop: int, finish_reason: str | None, index: int = 0) -> bytes:
        """The stream event with generated tokens ``start`` to ``stop``."""
        text = output_bytes(self._offsets[index], start, stop)
        reason = b"null" if finish_reason is None else b'"' + finish_reason.encode() + b'"'
        body = b'"delta":{"content":"' + text + b'"}' if self._call.chat else b'"text":"' + text + b'"'
        logged = b"null" if self._call.logprobs is None else msgspec.json.encode(self._logprobs(index, start, stop))
        tail = b',"logprobs":' + logged + b',"finish_reason":' + reason + b',"stop_reason":null}]}\n\n'
        return self._event_head + b',"choices":[{"index":%d,' % index + body + tail

    def ending(self, delivery: Delivery) -> bytes:
        """The usage, if the request set ``include_usage``, and the end mark."""
        return self.ending_of((delivery,))

    def ending_of(self, deliveries: Sequence[Delivery]) -> bytes:
        """As ``ending``, of all choices."""
        return (self._usage_event(deliveries) if self._call.include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error and the end mark."""
        return b"data: " + error.body + b"\n\n" + DONE

    def _usage_event(self, deliveries: Sequence[Delivery]) -> bytes:
        used = msgspec.json.encode(usage(self._call, deliveries))
        return self._event_head + b',"choices":[],"usage":' + used + b"}\n\n"

    def whole(self, delivery: Delivery) -> bytes:
        """The answer without streaming."""
        return self.whole_of((delivery,))

    def whole_of(self, deliveries: Sequence[Delivery]) -> bytes:
        """As ``whole``, with all choices."""
        choices = [self._choice(index, delivery) for index, delivery in enumerate(deliveries)]
        return msgspec.json.encode(
            {**self._head, "choices": choices, "usage": usage(self._call, deliveries), "kv_transfer_params": None}
        )

    def _choice(self, index: int, delivery: Delivery) -> dict[str, object]:
        text = output_bytes(self._offsets[index], 0, delivery.sent).decode("ascii")
        choice: dict[str, object] = {"index": index}
        if self._call.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        logged = None if self._call.logprobs is None else self._logprobs(index, 0, delivery.sent)
        return choice | {"logprobs": logged, "finish_reason": delivery.finish_reason, "stop_reason": None}

    def _logprobs(self, index: int, start: int, stop: int) -> dict[str, Any]:
        return logprobs(self._offsets[index], start, stop, self._call.logprobs or 0, chat=self._call.chat)


def logprobs(offset: int, start: int, stop: int, count: int, *, chat: bool) -> dict[str, Any]:
    """Log probabilities of output tokens ``start`` to ``stop``, in a chat's shape or in a completion's."""
    tokens = [output_bytes(offset, at, at + 1).decode("ascii") for at in range(start, stop)]
    found = [_alternatives(offset, start + number, count) for number in range(len(tokens))]
    if not chat:
        return {
            "text_offset": [TOKEN_BYTES * at for at in range(start, stop)],
            "token_logprobs": [-_LOGPROB_STEP] * len(tokens),
            "tokens": tokens,
            "top_logprobs": [dict(each) or {token: -_LOGPROB_STEP} for token, each in zip(tokens, found, strict=True)],
        }
    return {
        "content": [
            {**_entry(token, -_LOGPROB_STEP), "top_logprobs": [_entry(*each) for each in top]}
            for token, top in zip(tokens, found, strict=True)
        ]
    }


def _alternatives(offset: int, at: int, count: int) -> list[tuple[str, float]]:
    """The generated token first, then the ones that would follow it."""
    words = dict.fromkeys(
        output_bytes(offset, at + number, at + number + 1).decode("ascii") for number in range(4 * count + 1)
    )
    return [(word, -_LOGPROB_STEP * (number + 1)) for number, word in enumerate(list(words)[:count])]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


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
