"""W3C trace context: ids, ``traceparent``, ``tracestate`` (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from typing import NamedTuple

SAMPLED = 1
_RANDOM_ID = 2
"""Flag of trace ids whose last 7 bytes are random (Trace Context Level 2)."""
NEW_TRACE = _RANDOM_ID

# Version ff is invalid; later versions may append fields, which are ignored.
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(rb"[\t\x20-\x7e]{1,512}")
_ZERO_TRACE, _ZERO_SPAN = b"0" * 32, b"0" * 16


class ParentContext(NamedTuple):
    """Context that a client sent; ids are raw bytes (16 and 8)."""

    trace_id: bytes
    span_id: bytes
    flags: int
    state: str

    @property
    def sampled(self) -> bool:
        """True if the client records this trace."""
        return bool(self.flags & SAMPLED)


def parent_of(headers: dict[bytes, bytes]) -> ParentContext | None:
    """The context in a request's headers (names in lower case); None if there is none, or an invalid one."""
    given = headers.get(b"traceparent")
    if given is None:
        return None
    found = _PARENT.fullmatch(given)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or trace_id == _ZERO_TRACE or span_id == _ZERO_SPAN:
        return None
    state = headers.get(b"tracestate", b"")
    kept = state.decode("ascii") if _STATE.fullmatch(state) else ""
    known_flags = int(flags, 16) & (SAMPLED | _RANDOM_ID)
    return ParentContext(bytes.fromhex(trace_id.decode()), bytes.fromhex(span_id.decode()), known_flags, kept)


def traceparent(trace_id: bytes, span_id: bytes, flags: int) -> str:
    """The header's value for a child of ``span_id``."""
    return f"00-{trace_id.hex()}-{span_id.hex()}-{flags:02x}"
