"""CPU time of traces for one request, in microseconds: ``python -m tests.proxy.tracing.cost``.

One co-located request among 8 instances. "while served" is added to the request's own latency, "afterwards" is spent
when it has ended, by the export.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from policies.admission.base import AdmissionReason
from policies.row import RequestOutcome, Row
from policies.types import CandidateScore, Decision, OffloadPlan, OffloadReason, Reason, RequestClass
from proxy.breakdown import Breakdown
from proxy.settings import TracingSettings
from proxy.tracing.request_trace import RequestTrace
from proxy.tracing.spans import spans_of
from proxy.tracing.tracing import NoTracing, Tracing
from proxy.tracing.wire import encoded_spans, export_request
from tests.proxy.tracing.receiver import attributes_of

_TIMES = 5_000
_SCORES = tuple(
    CandidateScore(f"e{i}", 0.1 * i, {"prefill_s": 0.1, "queue_s": 0.2, "decode_s": 0.3}, False, 512) for i in range(8)
)
_DECISION = Decision(
    "r",
    "e0",
    None,
    RequestClass.WARM,
    Reason.LOWEST_SCORE,
    OffloadPlan(None, OffloadReason.PLANNER_NEVER),
    _SCORES,
    "warm",
    600,
    512,
)


def best_us(step: Callable[[], object]) -> float:
    """Best of 5 means of the processor time, in microseconds."""
    means = []
    for _ in range(5):
        began_s = time.process_time()
        for _ in range(_TIMES):
            step()
        means.append((time.process_time() - began_s) / _TIMES * 1e6)
    return min(means)


def serve(tracing: NoTracing) -> Row:
    """The calls of one co-located request."""
    row = Row("req-0123456789abcdef0123456789abcdef", "/v1/completions", 1e9, session_id="s1", decision=_DECISION)
    row.trace = trace = tracing.begin({}, time.perf_counter())
    if trace is not None:
        trace.named("model")
    if row.trace is not None:
        row.trace.routed(_DECISION, 1e-4)
    if row.trace is not None:
        row.trace.leg("co-located", "e0", "http://127.0.0.1:8000", {})
    if row.trace is not None:
        tracing.finished(row, time.perf_counter())
    return row


def sdk_spans(spans: bytes) -> Callable[[], list[ReadableSpan]]:
    """Maker of the same spans as objects of OpenTelemetry's SDK."""
    resource = Resource({})
    [of_resource] = ExportTraceServiceRequest.FromString(export_request({}, "", [spans])).resource_spans
    known = [
        (
            span.name,
            SpanContext(1, int.from_bytes(span.span_id, "big"), False, TraceFlags(1)),
            attributes_of(span.attributes),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
        )
        for span in of_resource.scope_spans[0].spans
    ]
    return lambda: [
        ReadableSpan(name, context=context, resource=resource, attributes=attributes, start_time=start, end_time=end)
        for name, context, attributes, start, end in known
    ]


def main() -> None:
    """Print the table."""
    on = Tracing(TracingSettings(enabled=True, sample_ratio=1, queue_size=1_000_000_000))
    unsampled = Tracing(TracingSettings(enabled=True, sample_ratio=0))
    breakdown = Breakdown(10)
    row = serve(on)
    row.outcome, row.admission, row.status = RequestOutcome.OK, AdmissionReason.NEVER_HOLDS, 200
    row.prompt_tokens = row.predicted_cached_tokens = row.actual_cached_tokens = row.completion_tokens = 600
    row.stages_ms = {"parse": 0.1, "decide": 0.1, "first_byte": 50.0, "total": 500.0}
    trace = row.trace
    assert isinstance(trace, RequestTrace)
    line_us = best_us(lambda: breakdown.close_row(row))
    spans = spans_of(row, trace)
    sdk = sdk_spans(encoded_spans(trace.trace_id, 1, "", spans))
    row.trace = None
    plain_line_us = best_us(lambda: breakdown.close_row(row))
    row.trace = trace
    off_us = best_us(lambda: serve(NoTracing()))
    table = {
        "while served, off (the row itself)": off_us,
        "while served, not sampled: added": best_us(lambda: serve(unsampled)) - off_us,
        "while served, sampled: added": best_us(lambda: serve(on)) - off_us,
        "afterwards, its record: added": line_us - plain_line_us,
        f"afterwards, {len(spans)} spans made": best_us(lambda: spans_of(row, trace)),
        "afterwards, encoded here": best_us(lambda: encoded_spans(trace.trace_id, 1, "", spans)),
        "instead, encoded by the SDK": best_us(lambda: encode_spans(sdk()).SerializeToString()),
    }
    for what, cost_us in table.items():
        print(f"{what:36}{cost_us:7.2f} µs")


if __name__ == "__main__":
    main()
