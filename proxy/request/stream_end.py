"""Recognition of a complete event stream by its last events."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_GAP = re.compile(rb"\r?\n\r?\n")


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def shows_end(tail: bytes) -> bool:
    """True if the last events of a stream show that its answer is complete.

    That is ``[DONE]``, an event with a finish reason (not every engine writes ``[DONE]``), the final usage, which
    OpenAI documents as missing from interrupted streams, or an error event, which the client has received. Of several
    choices (``n``) the last event's is the one that counts.
    """
    for event in reversed(_GAP.split(tail)):
        lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        data = b"\n".join(lines)
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
