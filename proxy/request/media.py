"""Media in a prompt: not text, so they enter the prefix chain as a stand-in of constant length."""

from __future__ import annotations

import re
from itertools import repeat

import msgspec
from xxhash import xxh3_128_digest

from proxy.request.steps import Steps

STAND_IN_BYTES = 4096
"""Bytes that stand for one medium: 1,024 tokens at 4 bytes each, of the order of a 1-megapixel image (Qwen2-VL: 1,340;
LLaVA-1.5: 576).
"""
MIN_MEDIA_BYTES = 8192
"""Smaller media count as text: at most 2,048 tokens at 4 bytes each."""
_MAX_FOUND = 4096
"""Places looked at in one request; media beyond them count as text."""
_WINDOW = MIN_MEDIA_BYTES // 2
_KEYS = (b'_url"', b'"input_audio"', b'_embeds"', b'"file_data"', b'"source"')
"""Ends of the names of content parts' fields that hold media. Inside a text their quote would be escaped."""
_VALUE = re.compile(
    rb'[ \t\r\n]*:[ \t\r\n]*(?:\{[ \t\r\n]*(?:"[a-z_]{1,32}"[ \t\r\n]*:[ \t\r\n]*(?:"[^"\\]{0,256}"|[a-z0-9.]{1,32})'
    rb'[ \t\r\n]*,[ \t\r\n]*){0,8}"[a-z_]{1,32}"[ \t\r\n]*:[ \t\r\n]*)?"'
)
"""From a field's name to the beginning of its string, or of the first long one of its object."""


def stand_in(medium: bytes | msgspec.Raw, seed: int = 0) -> bytes:
    """Bytes in place of a medium, derived from its content."""
    return xxh3_128_digest(medium, seed) * (STAND_IN_BYTES // 16)


def may_have_media(body: bytes) -> bool:
    """False for almost every text: a medium is a long run without a space. Reads a few bytes of each 4 KB."""
    begins, ends = range(0, len(body) - _WINDOW, _WINDOW), range(_WINDOW, len(body), _WINDOW)
    return -1 in map(body.find, repeat(b" "), begins, ends)


def without_media(messages: bytes, seed: int = 0) -> Steps[tuple[bytes, int]]:
    """Messages with a stand-in for each medium, derived from its content, and the number of media."""
    spans: dict[int, int] = {}
    found = 0
    for key in _KEYS:
        yield  # each search of 32 MiB takes up to 20 ms
        at = messages.find(key)
        while at >= 0 and found < _MAX_FOUND:
            found += 1
            at += len(key)
            value = _VALUE.match(messages, at)
            if value is not None:
                end = messages.find(b'"', value.end())
                if end - value.end() >= MIN_MEDIA_BYTES:
                    spans[value.end()] = at = end
            at = messages.find(key, at)
            yield
    yield
    if not spans:
        return messages, 0
    parts: list[bytes] = []
    begin = 0
    for start, end in sorted(spans.items()):
        parts += (messages[begin:start], stand_in(messages[start:end], seed))
        begin = end
        yield
    return b"".join((*parts, messages[begin:])), len(spans)
