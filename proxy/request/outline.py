"""Members of a large JSON object or list, found in slices, since one decoder call would hold the event loop.

Only the structure is read: quotes, escapes and the depth of brackets. For valid JSON the members are exact; JSON that
is invalid inside a member is left to the engine, which refuses it.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from proxy.errors import RequestError
from proxy.request.steps import Steps

SLICE_BYTES = 64 * 1024
"""Bytes per step, about 1 ms. In one call msgspec holds the event loop for up to 180 ms (32 MiB of ``[1],``)."""
_MAX_FIELDS = 1000
_MAX_DEPTH = 1000
"""Python's own decoder, and with it the engine, refuses deeper nesting."""
_BLANK = b" \t\r\n"
_QUOTE, _COMMA = ord('"'), ord(",")
_KEY = re.compile(rb'[ \t\r\n]*("(?:[^"\\]|\\.){0,256}")[ \t\r\n]*:[ \t\r\n]*')

_DEPTH: NDArray[np.int8] = np.zeros(256, np.int8)
_DEPTH[list(b"[{")] = 1
_DEPTH[list(b"]}")] = -1

_decode_key = msgspec.json.Decoder(str).decode


class TooManyMembersError(ValueError):
    """More members than the caller allows."""


def fields_of(body: bytes) -> Steps[dict[str, msgspec.Raw]]:
    """Fields of a JSON object; of a repeated name the last, as engines read it.

    Raises:
        RequestError: 400, not an object, or not JSON.
    """
    try:
        found = yield from members_of(memoryview(body), _MAX_FIELDS, "{")
    except TooManyMembersError as error:
        raise RequestError(400, f"the body has more than {_MAX_FIELDS} fields") from error
    fields = {}
    for member in found:
        match = _KEY.match(member)
        if match is None or match.end() == len(member):
            raise _invalid("a field has no name or no value")
        try:
            fields[_decode_key(match[1])] = msgspec.Raw(member[match.end() :])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _invalid(str(error)) from error
    return fields


def members_of(text: memoryview, limit: int, opening: str = "[") -> Steps[list[memoryview]]:
    """The texts of a list's items, or of an object's pairs, without blanks around them.

    Raises:
        TooManyMembersError: more than ``limit``; raised before they are collected.
        RequestError: 400, not JSON.
    """
    ends: list[int] = []
    depth, in_string, start = 0, False, -1
    at = 0
    while at < len(text):
        piece = bytes(text[at : at + SLICE_BYTES])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape must not be split
            piece = bytes(text[at : at + SLICE_BYTES + 1])
        # Escapes become harmless pairs of the same length; every quote left is the beginning or end of a string.
        plain = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        if not (in_string and plain.find(b'"') < 0):
            chars = np.frombuffer(plain, np.uint8)
            inside = np.bitwise_xor.accumulate(chars == _QUOTE) ^ in_string
            in_string = bool(inside[-1])
            change = _DEPTH.take(chars) * ~inside
            depths = np.cumsum(change, dtype=np.int32)
            depths += depth
            if start < 0 and piece.strip(_BLANK):
                start = _start(piece, opening) + at
            if depths.max() > _MAX_DEPTH:
                raise _invalid("nested too deeply")
            cuts = np.flatnonzero((depths == 1) & (chars == _COMMA) & ~inside)
            closed = np.flatnonzero((depths == 0) & (change < 0))
            depth = int(depths[-1])
            if closed.size:
                end = int(closed[0])
                ends += [at + int(cut) for cut in cuts[cuts < end][: limit + 1]]
                return _split(text, start + 1, [*ends, at + end], limit)
            ends += [at + int(cut) for cut in cuts[: limit + 1]]
            if len(ends) >= limit:
                raise TooManyMembersError
        at += len(piece)
        yield
    raise _invalid("it ends early")


def _split(text: memoryview, start: int, ends: list[int], limit: int) -> list[memoryview]:
    if len(ends) > limit:
        raise TooManyMembersError
    if bytes(text[ends[-1] + 1 :]).strip(_BLANK):
        raise _invalid("characters after its end")
    found = []
    for end in ends:
        member = text[start:end]
        if member and (member[0] in _BLANK or member[-1] in _BLANK):
            whole = bytes(member)
            blanks = len(whole) - len(whole.lstrip(_BLANK))
            member = member[blanks : len(whole.rstrip(_BLANK))]
        found.append(member)
        start = end + 1
    if len(found) == 1 and not found[0]:
        return []
    if not all(found):
        raise _invalid("a comma without a value")
    return found


def _start(piece: bytes, opening: str) -> int:
    stripped = piece.lstrip(_BLANK)
    if not stripped.startswith(opening.encode()):
        raise _invalid(f"it does not begin with {opening}")
    return len(piece) - len(stripped)


def _invalid(problem: str) -> RequestError:
    return RequestError(400, f"the body is not valid JSON: {problem}", code="invalid_json")
