"""OTLP spans as protobuf bytes, without a protobuf library.

Source: opentelemetry-proto 1.x, ``trace.proto`` and ``common.proto``, whose field numbers are stable. A span takes a
fraction of the time that the OpenTelemetry SDK's encoder takes (docs/decisions/0016-traces-written-directly.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

AttributeValue = str | bool | int | float | Sequence[str]
"""Value of an attribute."""

_fixed64 = struct.Struct("<Q").pack
_fixed32 = struct.Struct("<I").pack
_double = struct.Struct("<d").pack

# Bits of a span's flags besides the 8 of the W3C trace flags: "is_remote" of the parent is known, and is true.
_PARENT_KNOWN = 0x100
_PARENT_REMOTE = 0x200


class SpanKind(IntEnum):
    """Kinds of spans, numbered as in OTLP."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class TraceSpan(NamedTuple):
    """One span. Times are in Unix nanoseconds, ids are raw bytes (8)."""

    span_id: bytes
    parent_id: bytes | None
    name: str
    kind: SpanKind
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    error: str | None = None
    """Message of its error status; None: the status is unset."""
    remote_parent: bool = False


def encoded_spans(trace_id: bytes, trace_flags: int, trace_state: str, spans: Iterable[TraceSpan]) -> bytes:
    """Spans of one trace as the ``spans`` fields of a ``ScopeSpans`` message; results may be joined."""
    head = b"\x0a\x10" + trace_id
    state = _text(b"\x1a", trace_state) if trace_state else b""
    pieces = []
    for span in spans:
        body = [head, b"\x12\x08", span.span_id, state]
        flags = trace_flags | _PARENT_KNOWN
        if span.parent_id is not None:
            body += (b"\x22\x08", span.parent_id)
        if span.remote_parent:
            flags |= _PARENT_REMOTE
        body += (
            _text(b"\x2a", span.name),
            b"\x30" + bytes((span.kind,)) + b"\x39",
            _fixed64(span.start_ns),
            b"\x41",
            _fixed64(max(span.start_ns, span.end_ns)),
        )
        body += [_attribute(b"\x4a", key, value) for key, value in span.attributes.items()]
        if span.error is not None:
            body.append(_sized(b"\x7a", _text(b"\x12", span.error) + b"\x18\x02"))
        body += (b"\x85\x01", _fixed32(flags))
        pieces.append(_sized(b"\x12", b"".join(body)))
    return b"".join(pieces)


def export_request(resource: Mapping[str, AttributeValue], version: str, spans: Sequence[bytes]) -> bytes:
    """An ``ExportTraceServiceRequest`` with one resource and one scope, ``warmroute``.

    Args:
        resource: attributes of the resource.
        version: of the scope.
        spans: results of ``encoded_spans``.
    """
    described = b"".join(_attribute(b"\x0a", key, value) for key, value in resource.items())
    scope = _sized(b"\x0a", _text(b"\x0a", "warmroute") + _text(b"\x12", version))
    of_scope = _sized(b"\x12", b"".join((scope, *spans)))
    return _sized(b"\x0a", _sized(b"\x0a", described) + of_scope)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _ONE_BYTE[number]
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


_ONE_BYTE = tuple(bytes((number,)) for number in range(0x80))
_UNSIGNED = 0xFFFFFFFFFFFFFFFF
_REPEATED_CHARACTERS = 24
"""Longest text whose attribute is kept: names, classes and reasons repeat, ids do not."""


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + _varint(len(body)) + body


def _text(tag: bytes, text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return tag + _varint(len(raw)) + raw


@lru_cache(maxsize=512)
def _key(key: str) -> bytes:
    return _text(b"\x0a", key)


def _attribute(tag: bytes, key: str, value: AttributeValue) -> bytes:
    if type(value) is int:  # the most frequent kind that does not repeat
        number = _varint(value & _UNSIGNED)
        body = _key(key) + b"\x12" + _ONE_BYTE[len(number) + 1] + b"\x18" + number
        return tag + _varint(len(body)) + body
    if isinstance(value, str) and len(value) <= _REPEATED_CHARACTERS:
        return _repeated(tag, key, value)
    return _sized(tag, _key(key) + _sized(b"\x12", _any_value(value)))


@lru_cache(maxsize=2048)
def _repeated(tag: bytes, key: str, value: str) -> bytes:
    return _sized(tag, _key(key) + _sized(b"\x12", _any_value(value)))


def _any_value(value: AttributeValue) -> bytes:
    if isinstance(value, str):
        return _text(b"\x0a", value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & _UNSIGNED)
    if isinstance(value, float):
        return b"\x21" + _double(value)
    return _sized(b"\x2a", b"".join(_sized(b"\x0a", _any_value(each)) for each in value))
