"""Reads the usage that an engine reports, from a whole answer or from a passing stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec

_MARKS = (b'"usage":{', b'"usage": {')
_OBJECT = (b":{", b": {")
_NULL_AT_END, _END = b',"usage":null}\n\n', b"}\n\n"
"""The end of vLLM's events. JSON holds neither line breaks nor, inside its strings, unescaped quotes."""
_NULL = re.compile(rb',\s*"usage"\s*:\s*null(?=\s*[,}])')
_ANY_NULL = re.compile(rb'"usage"\s*:\s*null')
"""Begins with a literal, so that looking for it costs little."""
_GAPS = re.compile(rb"(\r\n\r\n|\n\n)")
_MAX_HELD_BYTES = 1024 * 1024
"""Bound on an incomplete event; an answer with more than this before the first blank line is not an event stream."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
"""A plausible number of tokens; a usage with another one, or with a boolean, counts as none."""


class PromptDetails(msgspec.Struct):
    """``usage.prompt_tokens_details``."""

    cached_tokens: _Count | None = None


class Usage(msgspec.Struct):
    """``usage`` of an OpenAI answer."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the engine took from its cache.

        vLLM 0.18 omits the details if there was no hit, so a missing value beside a token count means 0; an engine that
        never reports details cannot be distinguished from that.
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


_LARGE_BYTES = 1024 * 1024
"""Decoding a larger answer would hold the event loop for over 5 ms."""
_USAGE_NAME = re.compile(rb'"usage"\s*:\s*')
_USAGE_OBJECT = re.compile(rb"\{(?:[^{}]++|\{[^{}]*+\})*+\}")

_decode_usage = msgspec.json.Decoder(Usage).decode


class _NullUsage(msgspec.Struct):
    usage: None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_null = msgspec.json.Decoder(_NullUsage).decode


def usage_of_answer(body: bytes) -> Usage | None:
    """Usage of a whole (not streamed) answer; None if there is none or it is not an object."""
    try:
        if len(body) > _LARGE_BYTES:
            found = _last_usage(body)
            return _decode_usage(found[0]) if found else None
        return _decode_answer(body).usage
    except (msgspec.DecodeError, RecursionError):
        return None


def _is_usage(decoded: _Event | None) -> bool:
    """True if an event only carries the usage, without choices."""
    return decoded is not None and not decoded.choices and decoded.usage is not None


def _decoded(event: bytes) -> _Event | None:
    """An event with a usage; None if it has none, or is not JSON."""
    start = event.find(b"{")
    if start < 0 or b'"usage"' not in event:
        return None
    try:
        return _decode_event(event[start:])
    except (msgspec.DecodeError, RecursionError):
        return None


def with_cached_tokens(answer: bytes, cached_tokens: int) -> bytes:
    """An answer (or the JSON of an event) with ``cached_tokens`` in its usage; unchanged if it has no usage."""
    if len(answer) > _LARGE_BYTES:
        found = _last_usage(answer)
        if found is None:
            return answer
        changed = with_cached_tokens(b'{"usage":' + found[0] + b"}", cached_tokens)
        return b"".join((answer[: found.start()], changed[len(b'{"usage":') : -1], answer[found.end() :]))
    try:
        content = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return answer
    if not isinstance(content, dict) or not isinstance(content.get("usage"), dict):
        return answer
    content["usage"]["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return msgspec.json.encode(content)


def _last_usage(answer: bytes) -> re.Match[bytes] | None:
    """The usage of a large answer, without decoding the rest: a JSON string cannot contain the name unescaped."""
    at = answer.rfind(b'"usage"')
    name = _USAGE_NAME.match(answer, at) if at >= 0 else None
    return _USAGE_OBJECT.match(answer, name.end()) if name else None


class UsageFilter:
    """Forwards a stream event by event, records its usage, and corrects that event where needed.

    The usage event, and the ``"usage": null`` of the other events, are removed for clients that did not request them
    (``drop``). The event is corrected after a hand-off, where D counts all pulled tokens as cached (``cached_tokens``:
    tokens that P reused). All other bytes pass unchanged. An incomplete event is held back, so that a stream that
    breaks off inside one is cut at its last complete event.
    """

    __slots__ = ("_cached_tokens", "_decoded", "_usage_event", "drop", "events", "held")

    def __init__(self, *, drop: bool = False, cached_tokens: int | None = None) -> None:
        self.drop = drop
        """True if usage is removed."""
        self._cached_tokens = cached_tokens
        self.held = b""
        """The incomplete event at the end of what was fed."""
        self._usage_event = b""
        self._decoded: _Event | None = None
        """The usage event, if it had to be decoded already."""
        self.events = 0
        """Number of events fed so far, including ``[DONE]``."""

    @property
    def usage(self) -> Usage | None:
        """Usage of the last event that has one."""
        decoded = self._decoded or _decoded(self._usage_event)
        return None if decoded is None else decoded.usage

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to send for one piece of the stream; may be empty."""
        data = self.held + chunk if self.held else chunk
        if data.endswith(b"\n\n"):
            self.held = b""
        else:
            end = max(_after(data, b"\n\n"), _after(data, b"\r\n\r\n"))
            if not end and len(data) > _MAX_HELD_BYTES:  # not made of events
                end = len(data)
            self.held = data[end:]
            data = data[:end]
        events = data.count(b"data: ")
        self.events += events
        if self.drop:
            if events != 1:
                data = data.replace(_NULL_AT_END, _END)
            elif data.endswith(_NULL_AT_END):
                return data[: -len(_NULL_AT_END)] + _END
        at = data.rfind(b'"usage"')  # at the end of an event, where it is found at once
        if at >= 0:
            if self.drop and _ANY_NULL.search(data):
                data = _without_nulls(data)
            # Engines may write "usage": null on every event; only an object is a usage.
            if events > 1 or data.startswith(_OBJECT, at + 7):
                return b"".join(self._corrected(data))
        return data

    def _corrected(self, data: bytes) -> Iterator[bytes]:
        """``data`` with its usage events corrected; only those are decoded."""
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
            yield self._correct(data[begin:end], gap)
            start = end

    def _correct(self, event: bytes, gap: bytes) -> bytes:
        self._usage_event, self._decoded = event, None
        if not self.drop and self._cached_tokens is None:
            return event
        self._decoded = _decoded(event)
        if not _is_usage(self._decoded):
            return event
        if self.drop:
            return b""
        start = event.find(b"{")
        assert self._cached_tokens is not None
        return event[:start] + with_cached_tokens(event[start:].removesuffix(gap), self._cached_tokens) + gap

    def flush(self) -> bytes:
        """The incomplete event left at the end of the stream."""
        held, self.held = self.held, b""
        return held


def _without_nulls(data: bytes) -> bytes:
    """Whole events without a null usage that is not vLLM's: spaced, followed by other fields, or framed by CRLF."""
    return b"".join([_without_null(event) for event in _GAPS.split(data)])


def _without_null(event: bytes) -> bytes:
    shortened, found = _NULL.subn(b"", event)
    start = event.find(b"{")
    if found != 1 or start < 0:
        return event
    try:
        _decode_null(event[start:])  # else the field belongs to an inner object
    except (msgspec.DecodeError, RecursionError):
        return event
    return shortened


def _after(data: bytes, gap: bytes) -> int:
    """Position after the last ``gap``; 0 if there is none."""
    at = data.rfind(gap)
    return 0 if at < 0 else at + len(gap)
