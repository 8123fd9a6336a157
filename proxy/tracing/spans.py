"""Spans of one finished request, made of its row and of the notes taken while it was served.

| span | kind | from | to |
| --- | --- | --- | --- |
| operation and model, e.g. ``chat qwen`` | server | arrival | last byte |
| ``hold`` | internal | end of parsing | sent by admission |
| ``queue`` | internal | end of holding | a place was free |
| ``route`` | internal | lookup | decision; one for each attempt |
| ``prefill leg``, ``decode leg``, ``co-located leg``, ``short leg`` | client | sent to the engine | the leg's end |
| ``first token`` | internal, child of the last leg | sent to the engine | first byte of the answer |

Attribute names are those of OpenTelemetry's semantic conventions for GenAI and HTTP where these have one, else they
begin with ``warmroute.``. Prompts and answers are never part of a span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from urllib.parse import urlsplit

import msgspec

from policies.row import RequestOutcome, Row
from policies.types import CandidateScore, Decision
from proxy.breakdown import plain
from proxy.clip import clip
from proxy.tracing.request_trace import LegNote, RequestTrace, RoutedNote, span_id
from proxy.tracing.wire import AttributeValue, SpanKind, TraceSpan

_SHOWN_SCORES = 16
"""Candidates with the lowest scores in a ``route`` span: its size does not grow with the fleet."""
_OPERATIONS = MappingProxyType(
    {
        "/v1/completions": "text_completion",
        "/v1/chat/completions": "chat",
        "/v1/messages": "chat",
        "/v1/responses": "chat",
        "/v1/embeddings": "embeddings",
    }
)
_NO_ERROR = frozenset(
    {RequestOutcome.OK, RequestOutcome.REJECTED, RequestOutcome.ENGINE_REFUSED, RequestOutcome.CLIENT_GONE}
)
"""Outcomes that are no error of the server: its span's status stays unset."""
_encode = msgspec.json.Encoder().encode


def spans_of(row: Row, trace: RequestTrace) -> list[TraceSpan]:
    """All spans of a request whose answer has ended; the first one is the root."""
    return list(_Spans(row, trace).all())


class _Spans:
    def __init__(self, row: Row, trace: RequestTrace) -> None:
        self._row = row
        self._trace = trace
        self._offset_ns = int((row.arrived_unix_s - trace.arrived_s) * 1e9)

    def all(self) -> Iterator[TraceSpan]:
        yield self._root()
        yield from self._waits()
        for note in self._trace.routed_notes:
            yield self._route(note)
        legs = self._trace.legs
        for leg in legs:
            yield self._leg(leg)
        first_byte_ms = self._row.stages_ms.get("first_byte")
        if legs and first_byte_ms is not None:
            at_s = self._trace.arrived_s + first_byte_ms / 1e3
            sent = [leg for leg in legs if leg.began_s <= at_s]
            if sent:
                yield self._child("first token", sent[-1].began_s, at_s, {}, parent_id=sent[-1].span_id)

    def _ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._offset_ns

    def _child(
        self, name: str, start_s: float, end_s: float, attributes: Mapping[str, AttributeValue], parent_id: bytes
    ) -> TraceSpan:
        start_ns, end_ns = self._ns(start_s), self._ns(end_s)
        return TraceSpan(span_id(), parent_id, name, SpanKind.INTERNAL, start_ns, end_ns, attributes)

    def _root(self) -> TraceSpan:
        row, trace = self._row, self._trace
        parent = trace.parent
        operation = _OPERATIONS.get(row.endpoint)
        name = f"{operation} {trace.model}" if operation and trace.model else f"{operation or row.endpoint}"
        return TraceSpan(
            trace.root_id,
            parent.span_id if parent else None,
            clip(name, 200),
            SpanKind.SERVER,
            self._ns(trace.arrived_s),
            self._ns(trace.ended_s),
            _request_attributes(row, trace, operation),
            None if row.outcome in _NO_ERROR else clip(row.error or row.outcome.value, 500),
            remote_parent=parent is not None,
        )

    def _waits(self) -> Iterator[TraceSpan]:
        stages, root_id = self._row.stages_ms, self._trace.root_id
        at_s = self._trace.arrived_s + stages.get("parse", 0.0) / 1e3
        for name, stage in (("hold", "held"), ("queue", "queued")):
            took_ms = stages.get(stage)
            if took_ms is None:
                continue
            reason = self._row.admission
            attributes = {"warmroute.admission.reason": reason.value} if name == "hold" and reason is not None else {}
            yield self._child(name, at_s, at_s + took_ms / 1e3, attributes, root_id)
            at_s += took_ms / 1e3

    def _route(self, note: RoutedNote) -> TraceSpan:
        attributes = _decision_attributes(note.decision)
        return self._child("route", note.at_s - note.took_s, note.at_s, attributes, self._trace.root_id)

    def _leg(self, leg: LegNote) -> TraceSpan:
        attributes: dict[str, AttributeValue] = {"warmroute.instance": leg.instance, "warmroute.leg": leg.kind}
        try:
            url = urlsplit(leg.url)
            attributes["server.address"] = url.hostname or ""
            attributes["server.port"] = url.port or (443 if url.scheme == "https" else 80)
        except ValueError:
            attributes["server.address"] = leg.url
        if self._trace.model is not None:
            attributes["gen_ai.request.model"] = clip(self._trace.model, 200)
        if leg.error is not None:
            attributes["error.type"] = "leg_failed"
        return TraceSpan(
            leg.span_id,
            self._trace.root_id,
            f"{leg.kind} leg",
            SpanKind.CLIENT,
            self._ns(leg.began_s),
            self._ns(self._trace.ended_s if leg.ended_s is None else leg.ended_s),
            attributes,
            None if leg.error is None else clip(leg.error, 500),
        )


def _request_attributes(row: Row, trace: RequestTrace, operation: str | None) -> dict[str, AttributeValue]:
    decision = row.decision
    cached = row.actual_cached_tokens
    first_byte_ms = row.stages_ms.get("first_byte")
    given: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": None if trace.model is None else clip(trace.model, 200),
        "gen_ai.request.stream": row.stream,
        "gen_ai.conversation.id": row.session_id,
        "gen_ai.usage.input_tokens": row.prompt_tokens,
        "gen_ai.usage.output_tokens": row.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "gen_ai.response.time_to_first_chunk": None if first_byte_ms is None else first_byte_ms / 1e3,
        "http.response.status_code": row.status or None,
        "url.path": row.endpoint,
        "error.type": None if row.outcome in _NO_ERROR else row.outcome.value,
        "warmroute.request_id": row.request_id,
        "warmroute.outcome": row.outcome.value,
        "warmroute.tenant": row.tenant,
        "warmroute.held_seconds": row.held_s,
        "warmroute.admission.reason": row.admission.value if row.admission is not None else None,
        "warmroute.prefill_instance": row.prefill_instance,
        "warmroute.offload.reason": row.offload_reason,
        "warmroute.predicted_cached_tokens": row.predicted_cached_tokens,
        "warmroute.attempts_failed": len(row.attempts) or None,
        "warmroute.resume": row.resume,
    }
    if decision is not None:
        given["warmroute.instance"] = decision.decode_on
        given["warmroute.class"] = str(decision.request_class)
        given["warmroute.reason"] = str(decision.reason)
    if cached is not None and row.prompt_tokens is not None:
        given["warmroute.new_tokens"] = row.prompt_tokens - cached
    return {key: value for key, value in given.items() if value is not None}


def _decision_attributes(decision: Decision) -> dict[str, AttributeValue]:
    lowest = sorted(decision.scores, key=lambda score: score.score)[:_SHOWN_SCORES]
    attributes: dict[str, AttributeValue] = {
        "warmroute.policy": decision.policy,
        "warmroute.reason": str(decision.reason),
        "warmroute.class": str(decision.request_class),
        "warmroute.instance": decision.decode_on,
        "warmroute.prompt_tokens": decision.prompt_tokens,
        "warmroute.predicted_cached_tokens": decision.cached_tokens,
        "warmroute.new_tokens": decision.new_tokens,
        "warmroute.offload.reason": decision.offload.reason.value,
        "warmroute.candidates": len(decision.scores),
        "warmroute.scores": _as_json([_score(each) for each in lowest]),
    }
    if decision.prefill_on is not None:
        attributes["warmroute.prefill_instance"] = decision.prefill_on
    return attributes


def _score(candidate: CandidateScore) -> dict[str, object]:
    return {
        "instance": candidate.instance,
        "score": candidate.score,
        "cached_tokens": candidate.cached_tokens,
        "skipped": candidate.skipped,
        "inputs": candidate.inputs,
    }


def _as_json(value: object) -> str:
    try:
        return _encode(value).decode()
    except (TypeError, UnicodeEncodeError, RecursionError):  # a third-party policy's inputs
        return _encode(plain(value)).decode()
