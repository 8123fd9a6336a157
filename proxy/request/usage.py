"""Reads what an engine says it used, from a whole answer or from a stream as it passes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

_MARKS = (b'"usage":{', b'"usage": {')
_OBJECT = (b":{", b": {")
_MAX_HELD_BYTES = 1024 * 1024
"""Of an incomplete event; an answer with more than this before the first blank line is no event stream."""


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
    except (msgspec.DecodeError, RecursionError):
        return None


def is_usage_event(event: bytes) -> bool:
    """Whether a server-sent event is the one that only carries the usage: no choices."""
    if b'"usage"' not in event:
        return False
    start = event.find(b"{")
    try:
        decoded = _decode_event(event[start:]) if start >= 0 else None
    except (msgspec.DecodeError, RecursionError):
        return False
    return decoded is not None and not decoded.choices and decoded.usage is not None


def _usage_of_event(event: bytes) -> Usage | None:
    start = event.find(b"{")
    if start < 0 or b'"usage"' not in event:
        return None
    try:
        return _decode_event(event[start:]).usage
    except (msgspec.DecodeError, RecursionError):
        return None


def with_cached_tokens(answer: bytes, cached_tokens: int) -> bytes:
    """An answer (or the JSON of an event) whose usage says ``cached_tokens``; unchanged if it has no usage."""
    try:
        content = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return answer
    if not isinstance(content, dict) or not isinstance(content.get("usage"), dict):
        return answer
    content["usage"]["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return msgspec.json.encode(content)


class UsageFilter:
    """Passes a stream on event by event, remembers the usage it tells, and mends that event where needed.

    Taken out for clients that did not ask for it. Corrected after a hand-off, where D counts all it pulled as cached
    (``cached_tokens``: what P reused). Every other byte passes unchanged. An incomplete event is held back, so that a
    stream that breaks off inside one is cut at its last whole event.
    """

    __slots__ = ("_cached_tokens", "_drop", "_held", "_told", "events")

    def __init__(self, *, drop: bool = False, cached_tokens: int | None = None) -> None:
        self._drop = drop
        self._cached_tokens = cached_tokens
        self._held = b""
        self._told = b""
        self.events = 0
        """Events fed so far, with ``[DONE]``."""

    @property
    def usage(self) -> Usage | None:
        """What the last event that tells a usage says."""
        return _usage_of_event(self._told) if self._told else None

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to send on for one piece of the stream; may be empty."""
        data = self._held + chunk if self._held else chunk
        if data.endswith(b"\n\n"):
            self._held = b""
        else:
            end = max(_after(data, b"\n\n"), _after(data, b"\r\n\r\n"))
            if not end and len(data) > _MAX_HELD_BYTES:  # not made of events
                end = len(data)
            self._held = data[end:]
            data = data[:end]
        events = data.count(b"data: ")
        self.events += events
        at = data.rfind(b'"usage"')  # at the end of an event, where it is found at once
        if at >= 0 and (events > 1 or data.startswith(_OBJECT, at + 7)):
            # Engines may write "usage": null on every event; only an object tells a usage.
            return b"".join(self._mended(data))
        return data

    def _mended(self, data: bytes) -> Iterator[bytes]:
        """``data`` with the events mended that tell a usage; only those are looked at."""
        gap = b"\r\n\r\n" if b"\r\n" in data else b"\n\n"  # JSON holds neither unescaped
        start = 0
        while True:
            found = [at for mark in _MARKS if (at := data.find(mark, start)) >= 0]
            if not found:
                yield data[start:]
                return
            at = min(found)
            before, after = data.rfind(gap, start, at), data.find(gap, at)
            begin = start if before < 0 else before + len(gap)
            end = len(data) if after < 0 else after + len(gap)
            yield data[start:begin]
            yield self._mend(data[begin:end], gap)
            start = end

    def _mend(self, event: bytes, gap: bytes) -> bytes:
        self._told = event
        if not (self._drop or self._cached_tokens is not None) or not is_usage_event(event):
            return event
        if self._drop:
            return b""
        start = event.find(b"{")
        assert self._cached_tokens is not None
        return event[:start] + with_cached_tokens(event[start:].removesuffix(gap), self._cached_tokens) + gap

    def flush(self) -> bytes:
        """What is left when the stream ends in the middle of an event."""
        held, self._held = self._held, b""
        return held


def _after(data: bytes, gap: bytes) -> int:
    """Where the last ``gap`` ends; 0 where there is none."""
    at = data.rfind(gap)
    return 0 if at < 0 else at + len(gap)
