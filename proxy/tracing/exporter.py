"""Export of finished requests' traces to a collector: a bounded queue, batches, one task with one owner.

Spans are made and encoded here, in slices between which the event loop serves others: not while a request is served,
and not in a thread, which would hold the interpreter's lock for up to 5 ms at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from enum import StrEnum

from policies.row import Row
from proxy.clip import clip
from proxy.engines.client import EngineClient
from proxy.engines.upstream import UpstreamError
from proxy.logs import LimitedLog
from proxy.settings import TracingSettings
from proxy.tracing.destination import Destination
from proxy.tracing.request_trace import RequestTrace
from proxy.tracing.spans import spans_of
from proxy.tracing.wire import encoded_spans, export_request

_BATCH = 256
"""Requests in one export."""
_SLICE = 32
"""Requests encoded before the event loop serves others: about half a millisecond."""
_BACKOFF_S = (0.5, 1.0)
"""Waits before the second and third attempt; the queue takes new requests meanwhile."""
_RETRYABLE = frozenset({429, 502, 503, 504})
"""Source: OTLP specification, "Retryable Response Codes"."""

log = logging.getLogger("warmroute.tracing")


class TraceResult(StrEnum):
    """End of a recorded request's trace: closed set used as a metric's label."""

    EXPORTED = "exported"
    QUEUE_FULL = "queue_full"
    """More requests than ``tracing.queue_size`` waited for export."""
    EXPORT_FAILED = "export_failed"
    """The collector did not accept them."""
    NOT_ENCODED = "not_encoded"
    """Its spans could not be made."""


class TraceExporter:
    """Queue and exporting task of one proxy. ``open`` and ``close`` bracket its lifetime."""

    def __init__(self, settings: TracingSettings, to: Destination) -> None:
        self._settings = settings
        self._to = to
        self._headers = {**to.headers, "content-type": "application/x-protobuf"}
        self._queue: deque[tuple[Row, RequestTrace]] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._log = LimitedLog(log, 30.0)
        self.results = dict.fromkeys(TraceResult, 0)
        """Requests by the end of their traces."""

    def open(self) -> None:
        """Start exporting; needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name="traces")

    async def close(self) -> None:
        """Export what waits, within ``tracing.timeout_s``, and stop; the rest is lost."""
        if self._task is None:
            return
        self._closing = True
        self._wake.set()
        try:
            await asyncio.wait({self._task}, timeout=self._settings.timeout_s)
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.results[TraceResult.EXPORT_FAILED] += len(self._queue)
            self._queue.clear()

    def put(self, row: Row, trace: RequestTrace) -> None:
        """Accept a finished request, or count it as lost."""
        queue = self._queue
        if len(queue) >= self._settings.queue_size:
            self.results[TraceResult.QUEUE_FULL] += 1
            return
        queue.append((row, trace))
        if len(queue) == _BATCH:
            self._wake.set()

    async def _run(self) -> None:
        client = EngineClient(self._settings.timeout_s)
        try:
            while not self._closing or self._queue:
                if not self._closing:
                    try:
                        async with asyncio.timeout(self._settings.interval_s):
                            await self._wake.wait()
                    except TimeoutError:
                        pass
                    self._wake.clear()
                while self._queue:
                    await self._export(client)
        finally:
            await client.close()

    async def _export(self, client: EngineClient) -> None:
        """Send one batch; counts its result, also if cancelled."""
        pieces: list[bytes] = []
        result = TraceResult.EXPORT_FAILED
        try:
            for taken in range(1, _BATCH + 1):
                if not self._queue:
                    break
                row, trace = self._queue.popleft()
                try:
                    spans = spans_of(row, trace)
                    state = trace.parent.state if trace.parent else ""
                    pieces.append(encoded_spans(trace.trace_id, trace.flags, state, spans))
                except Exception:
                    log.exception("the trace of request %s could not be encoded", row.request_id)
                    self.results[TraceResult.NOT_ENCODED] += 1
                if taken % _SLICE == 0:
                    await asyncio.sleep(0)
            if pieces and await self._send(client, export_request(self._to.resource, self._to.version, pieces)):
                result = TraceResult.EXPORTED
        finally:
            self.results[result] += len(pieces)

    async def _send(self, client: EngineClient, body: bytes) -> bool:
        for wait_s in (*_BACKOFF_S, None):
            problem, again = await self._attempt(client, body)
            if not problem:
                return True
            if wait_s is None or not again or self._closing:
                break
            await asyncio.sleep(wait_s)
        self._log.warning(
            "export", "traces were not accepted by %s, requests are not affected: %s", self._to.url, problem
        )
        return False

    async def _attempt(self, client: EngineClient, body: bytes) -> tuple[str, bool]:
        """Problem of one attempt, empty if there was none, and True if another attempt may succeed."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                answer = await client.post(self._to.url, body, self._headers)
                try:
                    content = await answer.read()
                finally:
                    answer.close()
        except TimeoutError:
            return f"no answer within {self._settings.timeout_s:g} s", True
        except (UpstreamError, OSError) as error:
            return clip(str(error), 300), True
        if 200 <= answer.status < 300:
            return "", False
        return f"answered {answer.status}: {content[:200].decode('utf-8', 'replace')}", answer.status in _RETRYABLE
