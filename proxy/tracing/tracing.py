"""Tracing of one proxy, and the object that stands in for it when traces are off."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from policies.row import Row, TraceNotes
from proxy.settings import TracingSettings
from proxy.tracing.context import NEW_TRACE, SAMPLED, parent_of
from proxy.tracing.destination import destination, tracing_enabled
from proxy.tracing.exporter import TraceExporter, TraceResult
from proxy.tracing.request_trace import PassedTrace, RequestTrace, trace_id


class NoTracing:
    """Traces are off: nothing is noted, and clients' trace headers reach engines as any other header does."""

    @property
    def results(self) -> Mapping[TraceResult, int]:
        """Requests by the end of their traces."""
        return dict.fromkeys(TraceResult, 0)

    def open(self) -> None:
        """Start; needs a running event loop."""

    async def close(self) -> None:
        """Export what waits, and stop."""

    def begin(self, headers: dict[bytes, bytes], arrived_s: float) -> TraceNotes | None:
        """Notes for a new request; None: it is not traced.

        Args:
            headers: the client's, names in lower case.
            arrived_s: on the clock of ``time.perf_counter``.
        """
        return None

    def finished(self, row: Row, ended_s: float) -> None:
        """Accept a request whose answer has ended, at ``ended_s`` on the clock of ``time.perf_counter``."""


class Tracing(NoTracing):
    """Traces are on: every request's context is passed on, and recorded ones are exported.

    A client's ``traceparent`` decides if its request is recorded; without one, ``tracing.sample_ratio`` does.

    Raises:
        SettingsError: OpenTelemetry's variables in the environment are invalid.
    """

    def __init__(self, settings: TracingSettings) -> None:
        self._ratio = settings.sample_ratio
        self._random = Random()
        self._exporter = TraceExporter(settings, destination(settings))

    @property
    def results(self) -> Mapping[TraceResult, int]:
        return self._exporter.results

    def open(self) -> None:
        self._exporter.open()

    async def close(self) -> None:
        await self._exporter.close()

    def begin(self, headers: dict[bytes, bytes], arrived_s: float) -> TraceNotes | None:
        parent = parent_of(headers) if b"traceparent" in headers else None
        if parent is not None:
            if parent.sampled:
                return RequestTrace(parent.trace_id, parent.flags, parent, arrived_s)
            return PassedTrace(parent.flags, parent)
        if self._random.random() < self._ratio:
            return RequestTrace(trace_id(), NEW_TRACE | SAMPLED, None, arrived_s)
        return PassedTrace(NEW_TRACE)

    def finished(self, row: Row, ended_s: float) -> None:
        trace = row.trace
        if isinstance(trace, RequestTrace):
            trace.end(ended_s)
            self._exporter.put(row, trace)


def tracing_of(settings: TracingSettings) -> NoTracing:
    """Tracing as configured. Raises SettingsError."""
    return Tracing(settings) if tracing_enabled(settings) else NoTracing()
