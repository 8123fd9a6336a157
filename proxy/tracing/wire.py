"""OTLP spans as protobuf bytes, without a protobuf library.

Source: opentelemetry-proto 1.x, ``trace.proto`` and ``common.proto``, whose field numbers are stable. A span takes a
fraction of the time that the OpenTelemetry SDK's encoder takes (docs/decisions/0016-traces-written-directly.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

AttributeValue = str | bool | int | float | Sequence[str]
"""Value of an attribute."""

_fixed32 = struct.Struct("<I").pack
_double = struct.Struct("<d").pack
_times = struct.Struct("<BQBQ").pack
"""Tag and value of start and end."""
_START, _END = 0x39, 0x41

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
    attributes: bytes = b""
    """Encoded by the functions below, whose results may be joined."""
    error: str | None = None
    """Message of its error status; None: the status is unset."""
    remote_parent: bool = False


def encoded_spans(trace_id: bytes, trace_flags: int, trace_state: str, spans: Iterable[TraceSpan]) -> bytes:
    """Spans of one trace as the ``spans`` fields of a ``ScopeSpans`` message; results may be joined."""
    head = b"\x0a\x10" + trace_id + (_text(b"\x1a", trace_state) if trace_state else b"") + b"\x12\x08"
    flags = trace_flags | _PARENT_KNOWN
    pieces: list[bytes] = []
    for span_id, parent_id, name, kind, start_ns, end_ns, attributes, error, remote_parent in spans:
        body = b"".join(
            (
                head,
                span_id,
                b"" if parent_id is None else b"\x22\x08" + parent_id,
                _named(name, kind),
                _times(_START, start_ns, _END, end_ns if end_ns > start_ns else start_ns),
                attributes,
                b"" if error is None else _sized(b"\x7a", _text(b"\x12", error) + b"\x18\x02"),
                _flags(flags | _PARENT_REMOTE if remote_parent else flags),
            )
        )
        pieces += (b"\x12", _varint(len(body)), body)
    return b"".join(pieces)


@lru_cache(maxsize=512)
def _named(name: str, kind: SpanKind) -> bytes:
    return _text(b"\x2a", name) + b"\x30" + bytes((kind,))


@lru_cache(maxsize=256)
def _flags(flags: int) -> bytes:
    return b"\x85\x01" + _fixed32(flags)


def export_request(resource: Mapping[str, AttributeValue], version: str, spans: Sequence[bytes]) -> bytes:
    """An ``ExportTraceServiceRequest`` with one resource and one scope, ``warmroute``.

    Args:
        resource: attributes of the resource.
        version: of the scope.
        spans: results of ``encoded_spans``.
    """
    described = b"".join(_pair(_OF_RESOURCE, key, value) for key, value in resource.items())
    scope = _sized(b"\x0a", _text(b"\x0a", "warmroute") + _text(b"\x12", version))
    of_scope = _sized(b"\x12", b"".join((scope, *spans)))
    return _sized(b"\x0a", _sized(b"\x0a", described) + of_scope)


_OF_SPAN, _OF_RESOURCE = b"\x4a", b"\x0a"
"""Tags of attributes."""
_UNSIGNED = 0xFFFFFFFFFFFFFFFF
_LONGEST_NUMBER = 10
"""Bytes of the longest number."""


def encoded_attribute(key: str, value: AttributeValue) -> bytes:
    """One attribute of a span."""
    return _pair(_OF_SPAN, key, value)


def encoded_attributes(values: Mapping[str, AttributeValue | None]) -> bytes:
    """Attributes of a span; those that are None are left out."""
    return b"".join([_pair(_OF_SPAN, key, value) for key, value in values.items() if value is not None])


def integers(key: str) -> Callable[[int], bytes]:
    """Encoder of the attribute of that name, whose values are integers."""
    named = _text(b"\x0a", key)
    heads = []
    for size in range(_LONGEST_NUMBER + 1):  # all but the number itself depends on its size only
        begun = named + b"\x12" + _varint(size + 1) + b"\x18"
        heads.append(_OF_SPAN + _varint(len(begun) + size) + begun)

    def encoded(value: int) -> bytes:
        number = _varint(value & _UNSIGNED)
        return heads[len(number)] + number

    return encoded


def texts(key: str) -> Callable[[bytes], bytes]:
    """Encoder of the attribute of that name, whose values are texts, given in UTF-8."""
    named = _text(b"\x0a", key) + b"\x12"

    def encoded(value: bytes) -> bytes:
        size = _varint(len(value))
        text = b"\x0a" + size + value
        body = named + _varint(len(text)) + text
        return _OF_SPAN + _varint(len(body)) + body

    return encoded


def doubles(key: str) -> Callable[[float], bytes]:
    """Encoder of the attribute of that name, whose values are floating-point numbers."""
    head = encoded_attribute(key, 0.0)[:-8]
    return lambda value: head + _double(value)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _ONE_BYTE[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


_ONE_BYTE = tuple(bytes((number,)) for number in range(0x80))


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + _varint(len(body)) + body


def _text(tag: bytes, text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return tag + _varint(len(raw)) + raw


@lru_cache(maxsize=512)
def _key(key: str) -> bytes:
    return _text(b"\x0a", key)


def _pair(tag: bytes, key: str, value: AttributeValue) -> bytes:
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
