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

from functools import lru_cache
from types import MappingProxyType
from urllib.parse import urlsplit

import msgspec

from policies.row import RequestOutcome, Row
from policies.types import CandidateScore, Decision
from proxy.breakdown import plain
from proxy.clip import clip
from proxy.tracing.request_trace import LegNote, RequestTrace, span_id
from proxy.tracing.wire import (
    AttributeValue,
    SpanKind,
    TraceSpan,
    doubles,
    encoded_attribute,
    encoded_attributes,
    integers,
    texts,
)

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
_KEPT = 1024
"""Kept encodings of the attributes that are equal in many requests: names, classes, reasons."""
_encode = msgspec.json.Encoder().encode

_input_tokens = integers("gen_ai.usage.input_tokens")
_output_tokens = integers("gen_ai.usage.output_tokens")
_cache_read_tokens = integers("gen_ai.usage.cache_read.input_tokens")
_time_to_first_chunk = doubles("gen_ai.response.time_to_first_chunk")
_held_seconds = doubles("warmroute.held_seconds")
_prompt_tokens = integers("warmroute.prompt_tokens")
_predicted_cached_tokens = integers("warmroute.predicted_cached_tokens")
_new_tokens = integers("warmroute.new_tokens")
_request_id = texts("warmroute.request_id")
_conversation_id = texts("gen_ai.conversation.id")
_scores = texts("warmroute.scores")


def spans_of(row: Row, trace: RequestTrace) -> list[TraceSpan]:
    """All spans of a request whose answer has ended; the first one is the root."""
    offset_ns = int((row.arrived_unix_s - trace.arrived_s) * 1e9)
    root_id, ended_s = trace.root_id, trace.ended_s
    spans = [_root(row, trace, offset_ns)]
    stages = row.stages_ms
    if "held" in stages or "queued" in stages:
        spans += _waits(row, trace, offset_ns)
    last = len(trace.routed_notes)
    for number, (at_s, took_s, decision) in enumerate(trace.routed_notes, 1):
        end_ns = int(at_s * 1e9) + offset_ns
        start_ns = int((at_s - took_s) * 1e9) + offset_ns
        attributes = _decision_attributes(decision, trace.scores if number == last else b"")
        spans.append(TraceSpan(span_id(), root_id, "route", SpanKind.INTERNAL, start_ns, end_ns, attributes))
    first_byte_ms = stages.get("first_byte")
    first_byte_s = None if first_byte_ms is None else trace.arrived_s + first_byte_ms / 1e3
    brought: LegNote | None = None
    for leg in trace.legs:
        end_ns = int((ended_s if leg.ended_s is None else leg.ended_s) * 1e9) + offset_ns
        spans.append(_leg(leg, trace, int(leg.began_s * 1e9) + offset_ns, end_ns))
        if first_byte_s is not None and leg.began_s <= first_byte_s:
            brought = leg
    if brought is not None and first_byte_s is not None:
        start_ns, end_ns = int(brought.began_s * 1e9) + offset_ns, int(first_byte_s * 1e9) + offset_ns
        spans.append(TraceSpan(span_id(), brought.span_id, "first token", SpanKind.INTERNAL, start_ns, end_ns))
    return spans


def _root(row: Row, trace: RequestTrace, offset_ns: int) -> TraceSpan:
    parent = trace.parent
    operation = _OPERATIONS.get(row.endpoint)
    name = f"{operation} {trace.model}" if operation and trace.model else f"{operation or row.endpoint}"
    return TraceSpan(
        trace.root_id,
        parent.span_id if parent else None,
        clip(name, 200),
        SpanKind.SERVER,
        int(trace.arrived_s * 1e9) + offset_ns,
        int(trace.ended_s * 1e9) + offset_ns,
        _request_attributes(row, trace),
        None if row.outcome in _NO_ERROR else clip(row.error or row.outcome.value, 500),
        parent is not None,
    )


def _waits(row: Row, trace: RequestTrace, offset_ns: int) -> list[TraceSpan]:
    spans, stages = [], row.stages_ms
    at_s = trace.arrived_s + stages.get("parse", 0.0) / 1e3
    for name, stage in (("hold", "held"), ("queue", "queued")):
        took_ms = stages.get(stage)
        if took_ms is None:
            continue
        reason = row.admission
        known = b""
        if name == "hold" and reason is not None:
            known = encoded_attribute("warmroute.admission.reason", reason.value)
        start_ns, at_s = int(at_s * 1e9) + offset_ns, at_s + took_ms / 1e3
        end_ns = int(at_s * 1e9) + offset_ns
        spans.append(TraceSpan(span_id(), trace.root_id, name, SpanKind.INTERNAL, start_ns, end_ns, known))
    return spans


def _leg(leg: LegNote, trace: RequestTrace, start_ns: int, end_ns: int) -> TraceSpan:
    error = leg.error
    attributes = _leg_attributes(leg.instance, leg.kind, leg.url, trace.model, error is not None)
    name, failed = f"{leg.kind} leg", None if error is None else clip(error, 500)
    return TraceSpan(leg.span_id, trace.root_id, name, SpanKind.CLIENT, start_ns, end_ns, attributes, failed)


@lru_cache(maxsize=_KEPT)
def _leg_attributes(instance: str, kind: str, engine_url: str, model: str | None, failed: bool) -> bytes:
    attributes: dict[str, AttributeValue] = {"warmroute.instance": instance, "warmroute.leg": kind}
    try:
        url = urlsplit(engine_url)
        attributes["server.address"] = url.hostname or ""
        attributes["server.port"] = url.port or (443 if url.scheme == "https" else 80)
    except ValueError:
        attributes["server.address"] = engine_url
    if model is not None:
        attributes["gen_ai.request.model"] = clip(model, 200)
    if failed:
        attributes["error.type"] = "leg_failed"
    return encoded_attributes(attributes)


def _request_attributes(row: Row, trace: RequestTrace) -> bytes:
    decision, admission = row.decision, row.admission
    prompt_tokens, cached = row.prompt_tokens, row.actual_cached_tokens
    first_byte_ms = row.stages_ms.get("first_byte")
    pieces = [
        _common_attributes(row.endpoint, trace.model, row.stream, row.status, row.outcome, row.tenant),
        _request_id(row.request_id.encode("utf-8", "replace")),
        _held_seconds(row.held_s),
    ]
    if row.session_id is not None:
        pieces.append(_conversation_id(row.session_id.encode("utf-8", "replace")))
    if prompt_tokens is not None:
        pieces.append(_input_tokens(prompt_tokens))
        if cached is not None:
            pieces.append(_new_tokens(prompt_tokens - cached))
    if cached is not None:
        pieces.append(_cache_read_tokens(cached))
    if row.completion_tokens is not None:
        pieces.append(_output_tokens(row.completion_tokens))
    if first_byte_ms is not None:
        pieces.append(_time_to_first_chunk(first_byte_ms / 1e3))
    if row.predicted_cached_tokens is not None:
        pieces.append(_predicted_cached_tokens(row.predicted_cached_tokens))
    if admission is not None:
        pieces.append(_text_attribute("warmroute.admission.reason", admission.value))
    if decision is not None:
        pieces.append(_chosen_attributes(decision.decode_on, decision.request_class, decision.reason))
    if row.offload_reason is not None:
        pieces.append(_text_attribute("warmroute.offload.reason", row.offload_reason))
    if row.prefill_instance is not None:
        pieces.append(_text_attribute("warmroute.prefill_instance", row.prefill_instance))
    if row.attempts:
        pieces.append(encoded_attribute("warmroute.attempts_failed", len(row.attempts)))
    if row.resume is not None:
        pieces.append(_text_attribute("warmroute.resume", row.resume))
    return b"".join(pieces)


@lru_cache(maxsize=_KEPT)
def _common_attributes(
    endpoint: str, model: str | None, stream: bool, status: int, outcome: RequestOutcome, tenant: str | None
) -> bytes:
    return encoded_attributes(
        {
            "gen_ai.operation.name": _OPERATIONS.get(endpoint),
            "gen_ai.request.model": None if model is None else clip(model, 200),
            "gen_ai.request.stream": stream,
            "http.response.status_code": status or None,
            "url.path": endpoint,
            "error.type": None if outcome in _NO_ERROR else outcome.value,
            "warmroute.outcome": outcome.value,
            "warmroute.tenant": tenant,
        }
    )


@lru_cache(maxsize=_KEPT)
def _chosen_attributes(instance: str, request_class: str, reason: str) -> bytes:
    return encoded_attributes(
        {"warmroute.instance": instance, "warmroute.class": str(request_class), "warmroute.reason": str(reason)}
    )


_text_attribute = lru_cache(maxsize=_KEPT)(encoded_attribute)
"""One attribute with one of few texts."""


def _decision_attributes(decision: Decision, recorded: bytes) -> bytes:
    """``recorded``: JSON of its scores in the record; empty: it is in none."""
    scores = decision.scores
    if not recorded or len(scores) > _SHOWN_SCORES:
        recorded = _as_json([_score(each) for each in sorted(scores, key=_score_of)[:_SHOWN_SCORES]])
    prefill_on = decision.prefill_on
    return b"".join(
        (
            _chosen_attributes(decision.decode_on, decision.request_class, decision.reason),
            _planned_attributes(decision.policy, decision.offload.reason, len(scores)),
            b"" if prefill_on is None else _text_attribute("warmroute.prefill_instance", prefill_on),
            _prompt_tokens(decision.prompt_tokens),
            _predicted_cached_tokens(decision.cached_tokens),
            _new_tokens(decision.prompt_tokens - decision.cached_tokens),
            _scores(recorded),
        )
    )


@lru_cache(maxsize=_KEPT)
def _planned_attributes(policy: str, offload_reason: str, candidates: int) -> bytes:
    return encoded_attributes(
        {
            "warmroute.policy": policy,
            "warmroute.offload.reason": str(offload_reason),
            "warmroute.candidates": candidates,
        }
    )


def _score_of(candidate: CandidateScore) -> float:
    return candidate.score


def _score(candidate: CandidateScore) -> dict[str, object]:
    return {
        "instance": candidate.instance,
        "score": candidate.score,
        "cached_tokens": candidate.cached_tokens,
        "skipped": candidate.skipped,
        "inputs": candidate.inputs,
    }


def _as_json(value: object) -> bytes:
    try:
        return _encode(value)
    except (TypeError, UnicodeEncodeError, RecursionError):  # a third-party policy's inputs
        return _encode(plain(value))
