"""Helpers of the resume tests for bodies and streams."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from proxy.request.parse import Endpoint, Parsed
from proxy.resume.continuation import Cut, StreamSoFar
from proxy.resume.plan import ResumePlan, body_to_send, choose_cut, continuation_body, plan_resume
from proxy.resume.splice import Splice
from tests.proxy.request.parsing import parse_request
from tests.proxy.tokens.engine import TokenEngine

GREEDY = {"model": "stub", "prompt": "hello", "stream": True, "temperature": 0, "max_tokens": 30}
CHAT = {name: value for name, value in GREEDY.items() if name != "prompt"} | {
    "messages": [{"role": "user", "content": "hi 水"}]
}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
IDS = {"return_token_ids": True}
MODEL_TOKENS = 4096
MANY = 10_000


def parsed(body: dict[str, Any]) -> Parsed:
    endpoint = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS
    return parse_request(endpoint, json.dumps(body).encode(), 16, 1024)


def planned(body: dict[str, Any], *, sampled: bool = False) -> ResumePlan:
    plan = plan_resume(parsed(body), sampled=sampled)
    assert isinstance(plan, ResumePlan), plan
    return plan


def read(stream: bytes) -> dict[str, Any]:
    """Ids, text and finish reason of a stream, as a client reads it."""
    assert stream.endswith(b"\n\n")
    *events, last = stream[:-2].split(b"\n\n")
    assert last == b"data: [DONE]"
    assert b"[DONE]" not in b"".join(events)
    decoded = [json.loads(event.removeprefix(b"data: ")) for event in events]
    choices = [(event, choice) for event in decoded for choice in event["choices"]]
    parts = [{**choice, **choice.get("delta", {})} for _, choice in choices]
    usage = [event["usage"] for event in decoded if event.get("usage")]
    for each in usage:
        assert each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"]
        assert each["prompt_tokens_details"]["cached_tokens"] <= each["prompt_tokens"]
    made = [each["completion_tokens"] for each in usage]
    assert made == sorted(made)
    heads = {tuple(event[name] for name in ("id", "created", "model", "object")) for event in decoded}
    assert len(heads) == 1
    return {
        "text": "".join((part.get("text") or "") + (part.get("content") or "") for part in parts),
        "reasoning": "".join(part.get("reasoning") or "" for part in parts),
        "ids": list(itertools.chain.from_iterable(part["token_ids"] or [] for part in parts if "token_ids" in part)),
        "prompt_ids": [e["prompt_token_ids"] for e in decoded + parts if e.get("prompt_token_ids")],
        "roles": [part["role"] for part in parts if "role" in part],
        "finish": [part["finish_reason"] for part in parts if part["finish_reason"]],
        "object": decoded[0]["object"],
        "usage": [(each["prompt_tokens"], each["completion_tokens"]) for each in usage[-1:]],
    }


def pieces(stream: bytes, draw: random.Random) -> list[bytes]:
    edges = sorted({0, len(stream), *(draw.randrange(len(stream) + 1) for _ in range(6))})
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


def run(filter_: StreamSoFar | Splice, stream: bytes, draw: random.Random) -> bytes:
    return b"".join([filter_.feed(piece) for piece in pieces(stream, draw)] + [filter_.flush()])


class Life:
    """One client's stream over several engines."""

    def __init__(self, body: dict[str, Any], **engine: Any) -> None:
        self.body = body
        self.engine = engine
        self.plan = planned(body)
        self.client = json.dumps(body).encode()
        self.sent = body_to_send(self.client, self.plan, with_usage=False)
        self.so_far = StreamSoFar(keep_ids=self.plan.returns_ids)
        self.draw = random.Random(1)
        self.got = b""
        self.bodies: list[bytes] = [self.sent]

    def begin(self, upto: int | None) -> None:
        """Read the first engine up to an event, and a part of the next one."""
        self.got += run(self.so_far, self.stream(self.sent, 1, upto), self.draw)

    def continue_on(self, port: int, upto: int | None = None, **engine: Any) -> Cut:
        """Continue on another engine."""
        cut = choose_cut(self.plan, self.so_far, self.client, MANY, MODEL_TOKENS)
        assert isinstance(cut, Cut), cut
        _, body = continuation_body(self.plan, self.so_far, cut, self.sent, MODEL_TOKENS)
        self.bodies.append(body)
        splice = Splice(self.so_far, cut, keep_ids=self.plan.returns_ids)
        self.got += run(splice, self.stream(body, port, upto, **engine), self.draw)
        return cut

    def stream(self, body: bytes, port: int, upto: int | None, **engine: Any) -> bytes:
        events = TokenEngine(port=port, **{**self.engine, **engine}).events(json.loads(body), "r")
        if upto is None or upto >= len(events):
            return b"\n\n".join([*events, b""])
        torn = events[upto][: self.draw.randrange(len(events[upto]))]
        return b"\n\n".join([*events[:upto], torn])

    @property
    def whole(self) -> dict[str, Any]:
        """The answer without any break."""
        return read(b"\n\n".join([*TokenEngine(port=1, **self.engine).events(self.body, "r"), b""]))


def event(text: str, ids: list[int], prompt: list[int] | None = None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": ids, "prompt_token_ids": prompt, "finish_reason": finish}
    content = {"id": "a", "object": "text_completion", "created": 1, "model": "stub", "choices": [choice]}
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
