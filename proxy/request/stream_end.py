"""Recognition of a complete event stream, and of an engine's own error, by the last events."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from proxy.clip import clip

_GAP = re.compile(rb"\r?\n\r?\n")


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_MAX_MESSAGE = 200
_NO_MESSAGE = "no message"
_CLIENT_ERRORS = range(400, 500)
_REFUSALS = frozenset(("invalid_request_error", "not_found_error", "request_too_large", "invalid_prompt"))
"""Errors of the typed APIs that are the client's."""


class ReportedError(NamedTuple):
    """An error that an engine reported as an event of its stream."""

    message: str
    """As the engine gave it, cut if it is long; its type and code where it gave none."""
    refusal: bool
    """True if the engine refuses the request, as with a 4xx; False if it has failed."""

    @classmethod
    def of(cls, error: Any) -> ReportedError:
        """The error of an event: an object, or anything else that an engine writes there."""
        if not isinstance(error, dict):
            return cls(clip(str(error) or _NO_MESSAGE, _MAX_MESSAGE), False)
        code = error.get("code")
        refusal = code in _CLIENT_ERRORS if isinstance(code, int) else not _REFUSALS.isdisjoint(_names(error))
        return cls(clip(str(error.get("message") or _instead(error)), _MAX_MESSAGE), refusal)


def _instead(error: dict[str, Any]) -> str:
    """Text for an error without a message, as Python's exceptions can be."""
    kinds = [str(kind) for kind in (error.get("type"), error.get("code")) if kind]
    return f"{_NO_MESSAGE} ({', '.join(kinds)})" if kinds else _NO_MESSAGE


def _names(error: dict[str, Any]) -> set[str]:
    return {name for name in (error.get("type"), error.get("code")) if isinstance(name, str)}


def reported_error(tail: bytes) -> ReportedError | None:
    """The error that the last events of a stream report; None if they report none."""
    if b'"error"' not in tail:  # inside a text its quotes are escaped
        return None
    for event in reversed(_GAP.split(tail)):
        data = _data(event)
        if b'"error"' not in data:
            continue
        try:
            error = _decode(data).error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if error is not None:
            return ReportedError.of(error)
    return None


def _data(event: bytes) -> bytes:
    return b"\n".join([line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")])


def shows_end(tail: bytes) -> bool:
    """True if the last events of a stream show that its answer is complete.

    That is ``[DONE]``, an event with a finish reason (not every engine writes ``[DONE]``), the final usage, which
    OpenAI documents as missing from interrupted streams, or an error event, which the client has received. Of several
    choices (``n``) the last event's is the one that counts.
    """
    for event in reversed(_GAP.split(tail)):
        data = _data(event)
        if not data:
            continue  # a comment, or the end after the last blank line
        if data == b"[DONE]":
            return True
        try:
            decoded = _decode(data)
        except (msgspec.DecodeError, RecursionError):
            return False
        if decoded.choices:
            return any(choice.finish_reason is not None for choice in decoded.choices)
        if decoded.error is not None or decoded.usage is not None:
            return True
    return False
