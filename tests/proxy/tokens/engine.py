"""A scripted engine with tokens: it streams ids and text as vLLM does, and breaks off on demand.

A token is a byte, so that characters are spread over tokens and text is held back. The next token depends on every
token before it, and with a seed also on the number of tokens sampled in this request, because vLLM's generator is
seeded again for each request.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.proxy.stub_engine import StubEngine

ALPHABET = [c.encode() for c in 'abc {"\n\\é水🙂']
"""Characters of one to four bytes, and those that JSON escapes."""
_BYTES = b"".join(ALPHABET)


def characters(context: list[int], salt: str) -> Iterator[int]:
    """The endless text that follows a prompt, byte by byte; an unfinished character is completed first."""
    for drawn in itertools.count():
        begun = _unfinished(context)
        if begun:
            token = next(c[len(begun)] for c in ALPHABET if c.startswith(begun) and len(c) > len(begun))
        else:
            digest = hashlib.sha256(f"{context}{salt}{drawn if salt else ''}".encode()).digest()
            token = ALPHABET[digest[0] % len(ALPHABET)][0]
        context = [*context, token]
        yield token


def _unfinished(context: list[int]) -> bytes:
    """Bytes of an unfinished character at the end of the context."""
    tail = bytes(token for token in context[-3:] if token in _BYTES)
    for length in (3, 2, 1):
        begun = tail[-length:]
        if len(begun) == length and any(c.startswith(begun) and len(c) > length for c in ALPHABET):
            return begun
    return b""


@dataclass
class TokenEngine(StubEngine):
    """``break_after`` events of the answer, in the manner of ``break_by``; None: never."""

    break_after: int | None = None
    break_by: str = "reset"
    """Manner of breaking.

    ``reset``, ``stall``, ``error_event``, ``end`` (without the end mark), ``torn`` (in the middle of an event) or
    ``after_done`` (with more data after the end mark).
    """
    breaks: int = 1_000_000
    """Number of streams that break."""
    per_event: int = 1
    """Tokens of one event."""
    reports_ids: bool = True
    max_model_len: int | None = 4096
    thinks: int = 0
    """Events of a chat that are reasoning."""
    tool_after: int | None = None
    """Event of a chat that calls a tool."""
    salt: str = ""
    """Engines with different salts generate different text."""
    framing: bytes = b"\n\n"
    status: int = 200

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        """The prompt's tokens; a chat's are produced by a template."""
        prompt = body.get("prompt")
        if prompt is None:
            text = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
            prompt = text + "<assistant>"
        return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All parts of the answer: ``ids``, ``text``, ``finish_reason``."""
        prompt = self.prompt_of(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit is None:
            limit = 16 if "prompt" in body else (self.max_model_len or 4096) - len(prompt)
        salt = self.salt
        if body.get("temperature") != 0:
            salt += f"seed {body['seed']}" if body.get("seed") is not None else f"drawn {random.random()}"
        stop = body.get("stop") or ""
        stop = stop[0] if isinstance(stop, list) else stop
        held = len(stop) - 1 if stop else 0
        parts: list[dict[str, Any]] = []
        ids: list[int] = []
        shown = 0
        whole = 0
        for token in itertools.islice(characters(prompt, salt), limit):
            ids.append(token)
            text = bytes(ids).decode("utf-8", "ignore")
            end = None
            if len(text) > whole and stop and stop in text and len(ids) > body.get("min_tokens", 0):
                text, end = text[: text.index(stop)], "stop"
            elif len(ids) >= limit:
                end = "length"
            whole = len(text)
            upto = len(text) if end else max(shown, len(text) - held)
            parts.append({"ids": [token], "text": text[shown:upto], "finish_reason": end})
            shown = upto
            if end:
                break
        return [self._merged(parts[at : at + self.per_event]) for at in range(0, len(parts), self.per_event)]

    @staticmethod
    def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "ids": [token for part in parts for token in part["ids"]],
            "text": "".join(part["text"] for part in parts),
            "finish_reason": parts[-1]["finish_reason"],
        }

    def events(self, body: dict[str, Any], request_id: str) -> list[bytes]:
        """Every event of the stream, the end mark too."""
        chat, ids = "messages" in body, bool(body.get("return_token_ids")) and self.reports_ids
        options = body.get("stream_options") or {}
        prompt, parts = self.prompt_of(body), self.answer(body)
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}-{self.port}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self.port,
            "model": self.model,
        }
        said: list[dict[str, Any]] = []
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            said.append({**head, "choices": [role], "prompt_token_ids": prompt if ids else None})
        done = 0
        for number, part in enumerate(parts):
            done += len(part["ids"])
            choice: dict[str, Any] = {"index": 0, "finish_reason": part["finish_reason"]}
            choice["token_ids"] = part["ids"] if ids else None
            if not chat:
                choice |= {"text": part["text"], "prompt_token_ids": prompt if ids and not number else None}
            elif number < self.thinks:
                choice["delta"] = {"reasoning": part["text"]}
            elif self.tool_after is not None and number >= self.tool_after:
                choice["delta"] = {"tool_calls": [{"index": 0, "function": {"arguments": part["text"]}}]}
            else:
                choice["delta"] = {"content": part["text"]}
            event: dict[str, Any] = {**head, "choices": [choice]}
            if options.get("continuous_usage_stats"):
                event["usage"] = self._used(len(prompt), done)
            said.append(event)
        if options.get("include_usage"):
            said.append({**head, "choices": [], "usage": self._used(len(prompt), done)})
        return [b"data: " + json.dumps(event, separators=(",", ":")).encode() for event in said] + [b"data: [DONE]"]

    def _used(self, prompt: int, completion: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": prompt - 1},
        }

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        return await super()._answer(request, body)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        events = self.events(body, request.headers["x-request-id"])
        breaks = self.break_after is not None and self.breaks > 0
        self.breaks -= breaks
        for number, event in enumerate(events):
            if breaks and number == self.break_after:
                return await self._break(request, response, event)
            await response.write(event + self.framing)
            await asyncio.sleep(self.token_delay_s)
        await response.write_eof()
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse, event: bytes) -> web.StreamResponse:
        if self.break_by == "stall":
            await asyncio.sleep(3600)
        if self.break_by == "error_event":
            failure = {"error": {"message": "EngineCore encountered an issue", "code": 500}}
            await response.write(b"data: " + json.dumps(failure).encode() + b"\n\ndata: [DONE]\n\n")
        if self.break_by == "after_done":
            await response.write(event + b"\n\n: and more\n\n")
        if self.break_by in {"error_event", "end"}:
            await response.write_eof()
            return response
        if self.break_by == "torn":
            await response.write(event[: len(event) // 2])
        # The bytes written must arrive before the connection is cut.
        await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort()
        return response
