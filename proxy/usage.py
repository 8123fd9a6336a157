"""Reads what an engine says it used, from a whole answer or from the end of a stream."""

from __future__ import annotations

import msgspec


class PromptDetails(msgspec.Struct):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """``usage`` of an OpenAI answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens the engine took from its cache.

        vLLM 0.18 leaves the details out when there was no hit, so a missing value beside a token count means 0; an
        engine that never reports details cannot be told from that.
        """
        if self.prompt_tokens is None:
            return None
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class _Answer(msgspec.Struct):
    usage: Usage | None = None


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def usage_of_answer(body: bytes) -> Usage | None:
    """Usage of a whole (not streamed) answer; None when there is none or it is not an object."""
    try:
        return _decode_answer(body).usage
    except msgspec.DecodeError:
        return None


def usage_of_stream(tail: bytes) -> Usage | None:
    """Usage from the last event that carries one; ``tail`` may begin in the middle of an event."""
    for event in reversed(tail.split(b"\n\n")):
        usage = _usage_of_event(event)
        if usage is not None:
            return usage
    return None


def is_usage_event(event: bytes) -> bool:
    """Whether a server-sent event is the one that only carries the usage: no choices."""
    if b'"usage"' not in event:
        return False
    start = event.find(b"{")
    try:
        decoded = _decode_event(event[start:]) if start >= 0 else None
    except msgspec.DecodeError:
        return False
    return decoded is not None and not decoded.choices and decoded.usage is not None


def _usage_of_event(event: bytes) -> Usage | None:
    start = event.find(b"{")
    if start < 0 or b'"usage"' not in event:
        return None
    try:
        return _decode_event(event[start:]).usage
    except msgspec.DecodeError:
        return None


def with_cached_tokens(answer: bytes, cached_tokens: int) -> bytes:
    """An answer (or the JSON of an event) whose usage says ``cached_tokens``; unchanged if it has no usage."""
    try:
        content = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return answer
    if not isinstance(content, dict) or not isinstance(content.get("usage"), dict):
        return answer
    content["usage"]["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return msgspec.json.encode(content)


class UsageFilter:
    """Passes a stream on event by event; takes out the usage event, or corrects its cached tokens.

    Taken out for clients that did not ask for it. Corrected after a hand-off, where D counts all it pulled as cached
    (``cached_tokens``: what P reused). Every other byte passes unchanged. Holds back at most one incomplete event.
    """

    def __init__(self, *, drop: bool, cached_tokens: int | None = None) -> None:
        self._drop = drop
        self._cached_tokens = cached_tokens
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to send on for one piece of the stream; may be empty."""
        data = self._held + chunk if self._held else chunk
        if b"\r\n" in data:
            # Framed with CRLF, which JSON never holds unescaped: not vLLM's framing, so nothing is held back or mended.
            self._held = b""
            return data
        # Engines may write "usage": null on every event; only an object can be the event to mend.
        if b'"usage":{' in data or b'"usage": {' in data:
            *events, self._held = data.split(b"\n\n")
            return b"".join(self._mend(event) for event in events)
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._held = data
            return b""
        self._held = data[end:]
        return data[:end]

    def _mend(self, event: bytes) -> bytes:
        if not is_usage_event(event):
            return event + b"\n\n"
        if self._drop:
            return b""
        if self._cached_tokens is None:
            return event + b"\n\n"
        start = event.find(b"{")
        return event[:start] + with_cached_tokens(event[start:], self._cached_tokens) + b"\n\n"

    def flush(self) -> bytes:
        """What is left when the stream ends in the middle of an event."""
        held, self._held = self._held, b""
        return held
