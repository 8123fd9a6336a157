"""Event streams of the Messages and Responses APIs: events with names, the last of which ends the answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from proxy.request.stream_end import ReportedError
from proxy.request.typed_usage import TypedAnswer, TypedUsage
from proxy.request.usage import Usage

_MAX_HELD_BYTES = 2 * 1024 * 1024
"""Bound on an incomplete event: the last one of a response repeats its instructions, tools and output."""


class EventNames(NamedTuple):
    """Events of one API that are read."""

    read: re.Pattern[bytes]
    """Their first lines. A text cannot contain one, since JSON escapes line breaks."""
    last: frozenset[bytes]
    """Those after which the answer is complete, or has failed."""
    output: re.Pattern[bytes] | None = None
    """First line of an event that comes after the prefill; None: every event does."""


MESSAGE_EVENTS = EventNames(
    re.compile(rb"^event: ?(message_start|message_delta|message_stop|error)\r?$", re.MULTILINE),
    frozenset((b"message_stop", b"error")),
)
RESPONSE_EVENTS = EventNames(
    re.compile(rb"^event: ?(response\.(?:created|completed|incomplete|failed|cancelled)|error)\r?$", re.MULTILINE),
    frozenset((b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled", b"error")),
    re.compile(rb"^event:(?! ?response\.(?:created|queued|in_progress)\r?$)", re.MULTILINE),
)


_FAILURES = frozenset((b"error", b"response.failed"))


class _Named(msgspec.Struct):
    """An event; the answer is in ``message`` or ``response``, or its usage stands alone."""

    message: TypedAnswer | None = None
    response: TypedAnswer | None = None
    usage: TypedUsage | None = None


class _FailedResponse(msgspec.Struct):
    error: Any = None


class _Failure(msgspec.Struct):
    """An event that reports an error: in ``error``, in the response's, or in its own fields."""

    error: Any = None
    response: _FailedResponse | None = None
    message: Any = None
    code: Any = None


_decode = msgspec.json.Decoder(_Named).decode
_decode_failure = msgspec.json.Decoder(_Failure).decode
_GAP = re.compile(rb"\r?\n\r?\n")


class TypedEvents:
    """Forwards a stream unchanged, whole events at a time, and records its usage, its id and its end.

    Args:
        names: events of the API.
        on_id: called once with the answer's id.
        on_output: called once, at the first event of the output, if some come before the prefill.
    """

    __slots__ = ("_held", "_names", "_on_id", "_on_output", "_usage", "ended", "ending", "events", "reported")

    def __init__(
        self,
        names: EventNames,
        on_id: Callable[[str], object] | None = None,
        on_output: Callable[[], object] | None = None,
    ) -> None:
        self._names = names
        self._on_id = on_id
        self._on_output = on_output if names.output is not None else None
        self._held = b""
        self._usage: TypedUsage | None = None
        self.events = 0
        """Number of events fed so far."""
        self.ending = self.ended = False
        """True once the last event has begun · was fed as a whole."""
        self.reported: ReportedError | None = None
        """The error that the engine reported as its last event."""

    @property
    def usage(self) -> Usage | None:
        """Usage as the events have reported it so far."""
        return self._usage.as_usage() if self._usage is not None else None

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that end in this piece; may be empty."""
        data = self._held + chunk if self._held else chunk
        self._held = b""
        if not data.endswith(b"\n\n"):
            lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
            end = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
            if not end and len(data) > _MAX_HELD_BYTES:
                end = len(data)
            self._held = data[end:]
            data = data[:end]
        self.events += data.count(b"data: ")
        if self._on_output is not None and self._names.output is not None and self._names.output.search(data):
            on_output, self._on_output = self._on_output, None
            on_output()
        for found in self._names.read.finditer(data):
            self._read(found[1], data, found.end())
        return data

    def flush(self) -> bytes:
        """The incomplete event left at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _read(self, name: bytes, data: bytes, at: int) -> None:
        last = name in self._names.last
        self.ending = self.ending or last
        gap = _GAP.search(data, at)
        if gap is None:  # an event longer than the bound
            return
        self.ended = self.ended or last
        start = data.find(b"{", at)
        if name in _FAILURES:
            self.reported = _reported(data[start : gap.start()] if 0 <= start < gap.start() else b"")
        if not 0 <= start < gap.start():
            return
        try:
            event = _decode(data[start : gap.start()])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        answer = event.message or event.response
        if answer is not None and answer.id and self._on_id is not None:
            on_id, self._on_id = self._on_id, None
            on_id(answer.id)
        usage = event.usage or (answer and answer.usage)
        if usage:
            self._usage = usage if self._usage is None else self._usage.updated(usage)


def _reported(data: bytes) -> ReportedError:
    try:
        event = _decode_failure(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ReportedError("an unreadable error", False)
    error = event.error or (event.response and event.response.error)
    return ReportedError.of(error or {"message": event.message, "code": event.code})
