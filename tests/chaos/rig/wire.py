"""Hand-written HTTP/1.1 and server-sent events, so that they can be written incorrectly."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

TOKENS = 6
"""Tokens, and events, of every good answer."""

MODEL = "stub"


@dataclass
class Request:
    """A request as the engine received it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON body."""
        decoded: dict[str, Any] = json.loads(self.body)
        return decoded


async def read_head(reader: asyncio.StreamReader) -> Request | None:
    """The head of the next request of a connection; None if the peer closed it instead."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(method, path, headers)


async def read_body(reader: asyncio.StreamReader, request: Request) -> bool:
    """Read the body into the request; False if the peer closed the connection instead."""
    try:
        request.body = await reader.readexactly(int(request.headers.get("content-length", "0")))
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    return True


def head(status: str = "200 OK", *lines: str) -> bytes:
    """Status line and header lines exactly as given."""
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1")


def whole(status: str, body: bytes, *lines: str) -> bytes:
    """A JSON answer with a content length."""
    return head(status, "content-type: application/json", f"content-length: {len(body)}", *lines) + body


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def event(number: int) -> bytes:
    """Server-sent event with one token."""
    choice = {"index": 0, "text": f"w{number} ", "delta": {"content": f"w{number} "}, "finish_reason": None}
    return sse({"id": "x", "object": "text_completion", "model": MODEL, "choices": [choice]})


def null_usage(word: bytes) -> bytes:
    """The event as vLLM writes it once usage is requested."""
    return word.removesuffix(b"}\n\n") + b',"usage":null}\n\n'


def usage_event(prompt_tokens: int = 100) -> bytes:
    """The event an engine adds when usage is requested."""
    return sse({"id": "x", "object": "text_completion", "model": MODEL, "choices": [], "usage": usage(prompt_tokens)})


def usage(prompt_tokens: int = 100) -> dict[str, int]:
    """Token counts of a good answer."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": TOKENS, "total_tokens": prompt_tokens + TOKENS}


def sse(content: Any) -> bytes:
    """One ``data:`` event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
EVENTS = [*(event(number) for number in range(TOKENS)), DONE]
"""The part of a good stream for a client that did not request usage."""


def good_body(**more: Any) -> bytes:
    """JSON of a whole answer."""
    text = "".join(f"w{number} " for number in range(TOKENS))
    choice = {
        "index": 0,
        "text": text,
        "finish_reason": "length",
        "message": {"role": "assistant", "content": text},
    }
    answer = {"id": "x", "object": "text_completion", "model": MODEL, "usage": usage(), "choices": [choice], **more}
    return json.dumps(answer).encode()


@dataclass
class Answer:
    """A good answer as its parts in sending order; faults stop somewhere or alter a part."""

    head: bytes
    parts: list[bytes] = field(default_factory=list)
    end: bytes = b""

    @classmethod
    def to(cls, request: Request, framing: str = "") -> Answer:
        """``framing``: ``chunked``, ``length`` or ``close`` (HTTP/1.0); by default as vLLM does."""
        fields = request.fields
        if fields.get("stream"):
            pieces = EVENTS[:-1]
            if (fields.get("stream_options") or {}).get("include_usage"):
                pieces = [*map(null_usage, pieces), usage_event()]
            pieces, kind = [*pieces, DONE], "content-type: text/event-stream; charset=utf-8"
            framing = framing or "chunked"
        else:
            body, kind = good_body(), "content-type: application/json"
            pieces, framing = [body[:50], body[50:]], framing or "length"
        if framing == "close":
            return cls(head("200 OK", kind).replace(b"HTTP/1.1", b"HTTP/1.0", 1), pieces)
        if framing == "length":
            return cls(head("200 OK", kind, f"content-length: {sum(map(len, pieces))}"), pieces)
        return cls(head("200 OK", kind, "transfer-encoding: chunked"), [chunk(piece) for piece in pieces], LAST_CHUNK)

    @property
    def bytes(self) -> bytes:
        """All bytes of the answer."""
        return b"".join([self.head, *self.parts, self.end])


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN; unsent bytes are dropped."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
