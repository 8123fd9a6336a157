"""Notes on one traced request, taken while it is served; spans are made of them afterwards."""

from __future__ import annotations

import time
from random import Random
from typing import NamedTuple

from policies.types import Decision
from proxy.tracing.context import ParentContext, traceparent

_random = Random()


def span_id() -> bytes:
    """A new span id, 8 bytes, not zero."""
    return (_random.getrandbits(64) or 1).to_bytes(8, "big")


def trace_id() -> bytes:
    """A new trace id, 16 bytes."""
    return (_random.getrandbits(128) or 1).to_bytes(16, "big")


_DRAWN = 64
"""Contexts drawn at once: half the time of drawing each for its own request, with cold caches."""
_SPAN_AT = 36
"""Place of the span id in a ``traceparent``."""
_FLAGS = tuple(f"{flags:02x}" for flags in range(256))
_drawn: list[str] = []


def _new_context() -> str:
    """A ``traceparent`` with a new trace id and a new span id, up to its flags."""
    while not _drawn:
        digits = _random.randbytes(24 * _DRAWN).hex()
        pairs = [(digits[at : at + 32], digits[at + 32 : at + 48]) for at in range(0, 48 * _DRAWN, 48)]
        _drawn.extend([f"00-{trace}-{span}-" for trace, span in pairs if trace.strip("0") and span.strip("0")])
    return _drawn.pop()


class PassedTrace:
    """Context of a request whose trace is not recorded: passed to the engines, and nothing is noted.

    Implements ``policies.row.TraceNotes``. Most requests have one, and many end without a leg: ids are taken for that.

    Args:
        flags: W3C trace flags passed to engines.
        parent: the client's context; None: the trace begins here.
    """

    __slots__ = ("_context", "_flags", "_parent")

    recorded_id: str | None = None

    def __init__(self, flags: int, parent: ParentContext | None = None) -> None:
        self._flags = flags
        self._parent = parent
        self._context = ""
        """That of the last leg, without flags."""

    def named(self, model: str | None) -> None:
        """Nothing is noted."""

    def routed(self, decision: Decision, took_s: float) -> None:
        """Nothing is noted."""

    def leg(self, kind: str, instance: str, url: str, headers: dict[str, str]) -> None:
        """Set the headers with which an engine continues the trace."""
        parent, before, context = self._parent, self._context, _new_context()
        if before:
            context = before[:_SPAN_AT] + context[_SPAN_AT:]
        elif parent is not None:
            context = f"00-{parent.trace_id.hex()}-{context[_SPAN_AT:]}"
        self._context = context
        headers["traceparent"] = context + _FLAGS[self._flags]
        if parent is not None and parent.state:
            headers["tracestate"] = parent.state
        else:
            headers.pop("tracestate", None)

    def leg_ended(self, error: str | None = None) -> None:
        """Nothing is noted."""

    def recorded(self, scores: bytes) -> None:
        """Nothing is noted."""


class RoutedNote(NamedTuple):
    """One routing decision."""

    at_s: float
    """End of the decision, on the clock of ``time.perf_counter``."""
    took_s: float
    decision: Decision


class LegNote:
    """One request to an engine. Times are on the clock of ``time.perf_counter``; None: it has not ended."""

    __slots__ = ("began_s", "ended_s", "error", "instance", "kind", "span_id", "url")

    def __init__(self, kind: str, instance: str, url: str) -> None:
        self.kind = kind
        self.instance = instance
        self.url = url
        self.span_id = span_id()
        self.began_s = time.perf_counter()
        self.ended_s: float | None = None
        self.error: str | None = None

    def end(self, error: str | None = None) -> None:
        """End it, unless it has ended."""
        if self.ended_s is None:
            self.ended_s = time.perf_counter()
            self.error = error


class RequestTrace:
    """Ids of one recorded trace and the times of its parts. Implements ``policies.row.TraceNotes``.

    Args:
        trace_id: 16 bytes.
        flags: W3C trace flags passed to engines.
        parent: the client's context; None: the trace begins here.
    """

    __slots__ = (
        *("arrived_s", "ended_s", "flags", "legs", "model", "parent", "root_id", "routed_notes", "scores", "trace_id"),
    )

    def __init__(self, trace_id: bytes, flags: int, parent: ParentContext | None, arrived_s: float) -> None:
        self.trace_id = trace_id
        self.flags = flags
        self.parent = parent
        self.root_id = span_id()
        self.arrived_s = arrived_s
        self.ended_s = arrived_s
        self.model: str | None = None
        self.legs: list[LegNote] = []
        self.routed_notes: list[RoutedNote] = []
        self.scores = b""
        """JSON of the last decision's scores; empty until the record is written."""

    @property
    def recorded_id(self) -> str | None:
        """Trace id in hexadecimal digits."""
        return self.trace_id.hex()

    def named(self, model: str | None) -> None:
        """Note the request's model."""
        self.model = model

    def routed(self, decision: Decision, took_s: float) -> None:
        """Note a routing decision that has just been taken, within ``took_s`` seconds."""
        self.routed_notes.append(RoutedNote(time.perf_counter(), took_s, decision))

    def leg(self, kind: str, instance: str, url: str, headers: dict[str, str]) -> None:
        """Begin a leg, end the one before, and set the headers with which an engine continues the trace."""
        self.leg_ended()
        leg = LegNote(kind, instance, url)
        self.legs.append(leg)
        headers["traceparent"] = traceparent(self.trace_id, leg.span_id, self.flags)
        if self.parent is not None and self.parent.state:
            headers["tracestate"] = self.parent.state
        else:
            headers.pop("tracestate", None)

    def end(self, at_s: float) -> None:
        """Note the end of the answer."""
        self.ended_s = at_s

    def leg_ended(self, error: str | None = None) -> None:
        """End the last leg, with the reason if it failed; no effect if it has ended."""
        if self.legs:
            self.legs[-1].end(error)

    def recorded(self, scores: bytes) -> None:
        """Note the scores of the last decision, as the JSON of the record."""
        self.scores = scores
