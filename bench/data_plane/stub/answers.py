"""Prebuilt answers of the engine stub: event streams, whole answers, renders, and the pages that routers request."""

from __future__ import annotations

import json
import time
from collections import OrderedDict

import msgspec
import numpy as np
import xxhash

MODEL = "bench-model"
DONE = b"data: [DONE]\n\n"
BLOCK_TOKENS = 16
POOL_BLOCKS = 62_500
"""A pool of 1,000,000 tokens: small enough that a long run evicts, as in production."""
BYTES_PER_TOKEN = 4
RENDERS_KEPT = 64


def chunk(payload: bytes) -> bytes:
    """One HTTP/1.1 chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


LAST_CHUNK = b"0\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 01 Jan 2028 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def whole(body: bytes, status: bytes = b"200 OK", content_type: bytes = b"application/json") -> bytes:
    """A whole answer with its length."""
    return (
        b"HTTP/1.1 %b\r\ndate: Sat, 01 Jan 2028 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: %b\r\n"
        b"content-length: %d\r\n\r\n%b" % (status, content_type, len(body), body)
    )


def usage_of(body_bytes: int, completion_tokens: int) -> dict[str, object]:
    """Token counts as vLLM reports them; the stub takes four bytes of body for a token and has no cache."""
    prompt_tokens = max(1, body_bytes // BYTES_PER_TOKEN)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def event(chat: bool, event_bytes: int, last: bool = False) -> bytes:
    """One server-sent event in vLLM's format, its text padded until it has ``event_bytes`` bytes."""

    def made(text: str) -> bytes:
        finish = "length" if last else None
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if chat else {"text": text, "stop_reason": None}
        body = {
            "id": ("chatcmpl-" if chat else "cmpl-") + "0" * 32,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1_830_000_000,
            "model": MODEL,
            "choices": [choice],
            "usage": None,
        }
        return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"

    return made(" " + "t" * max(0, event_bytes - len(made(" "))))


class Events:
    """The chunks of one endpoint's streams, ready to be written."""

    def __init__(self, chat: bool, event_bytes: int) -> None:
        self.each = chunk(event(chat, event_bytes))
        self.last = chunk(event(chat, event_bytes, last=True))
        self._chat = chat

    def burst(self, events: int) -> bytes:
        """``events`` (at least one) chunks, one event each."""
        return self.each * (events - 1) + self.last

    def end(self, body_bytes: int, events: int, with_usage: bool) -> bytes:
        """The bytes after the last event: the usage event if it was requested, ``[DONE]``, the last chunk."""
        end = chunk(DONE) + LAST_CHUNK
        if not with_usage:
            return end
        return chunk(b"data: " + self._usage(body_bytes, events) + b"\n\n") + end

    def _usage(self, body_bytes: int, events: int) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        body = {"id": "cmpl-0", "object": kind, "model": MODEL, "choices": [], "usage": usage_of(body_bytes, events)}
        return json.dumps(body, separators=(",", ":")).encode()


def completion(chat: bool, body_bytes: int, tokens: int) -> bytes:
    """A non-streamed answer in vLLM's format."""
    text = " token" * tokens
    choice: dict[str, object] = {"index": 0, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    body = {
        "id": "cmpl-0",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1_830_000_000,
        "model": MODEL,
        "choices": [choice],
        "usage": usage_of(body_bytes, tokens),
    }
    return whole(json.dumps(body, separators=(",", ":")).encode())


class _RenderBody(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")


class Renders:
    """Answers of ``/v1/…/render``: made-up token ids, so that prompts that share a prefix share their first ids.

    An id is made of four bytes of the prompt as it appears in the JSON. The newest answers are kept, because a router
    that queries every worker sends one body several times: only the first of them costs the stub about a millisecond
    (130 KB), far less than a real tokenizer (tens of milliseconds).
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def answer(self, path: bytes, body: bytes) -> bytes:
        """The whole HTTP answer. Raises ``msgspec.DecodeError`` for a body that is not a JSON object."""
        key = xxhash.xxh3_64_intdigest(body)
        answer = self._kept.get(key)
        if answer is None:
            answer = self._kept[key] = self._made(path, body)
            if len(self._kept) > RENDERS_KEPT:
                self._kept.popitem(last=False)
        return answer

    @staticmethod
    def _made(path: bytes, body: bytes) -> bytes:
        fields = msgspec.json.decode(body, type=_RenderBody)
        raw = bytes(fields.prompt) or bytes(fields.messages)
        given = raw[:1] == b"[" and raw[1:2].isdigit()
        ids = raw if given else b"[%b]" % token_ids(raw[1:-1])
        request = (
            b'{"request_id":"render-0","token_ids":%b,"features":null,"sampling_params":{"max_tokens":80},'
            b'"model":"%b","stream":false}' % (ids, MODEL.encode())
        )
        return whole(b"[%b]" % request if path == b"/v1/completions/render" else request)


def token_ids(text: bytes) -> bytes:
    """Comma-separated five-digit ids, one for every four bytes of ``text``."""
    words = np.frombuffer(text[: len(text) // 4 * 4], dtype=np.uint32)
    if not len(words):
        return b"10000"
    numbers = 10_000 + words % 90_000
    digits = np.empty((len(words), 6), dtype=np.uint8)
    for place in range(4, -1, -1):
        numbers, rest = np.divmod(numbers, 10)
        digits[:, place] = rest + ord("0")
    digits[:, 5] = ord(",")
    return digits.tobytes()[:-1]


def pages(started_unix_s: float | None = None) -> dict[bytes, bytes]:
    """Path -> whole answer, for all requests of the four routers to an engine besides generation."""
    started = time.time() if started_unix_s is None else started_unix_s
    models = {
        "object": "list",
        "data": [
            {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "root": MODEL, "max_model_len": 262_144}
        ],
    }
    model_info = {
        "model_path": MODEL,
        "tokenizer_path": MODEL,
        "served_model_name": MODEL,
        "is_generation": True,
        "preferred_sampling_params": None,
    }
    server_info = model_info | {"version": "0.0.0", "dp_size": 1, "tp_size": 1, "max_total_num_tokens": 1_000_000}
    metrics = (
        f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.1\n'
        f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{POOL_BLOCKS}",engine="0"}} 1.0\n'
        f"process_start_time_seconds {started}\n"
    )
    found = {
        b"/health": whole(b"", content_type=b"text/plain"),
        b"/v1/models": whole(json.dumps(models).encode()),
        b"/version": whole(b'{"version":"0.0.0"}'),
        b"/metrics": whole(metrics.encode(), content_type=b"text/plain; version=0.0.4; charset=utf-8"),
    }
    found |= dict.fromkeys((b"/get_model_info", b"/model_info"), whole(json.dumps(model_info).encode()))
    return found | dict.fromkeys((b"/get_server_info", b"/server_info"), whole(json.dumps(server_info).encode()))
