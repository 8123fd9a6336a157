"""Spans of rows and notes made by hand, as OpenTelemetry's own protobuf classes decode them."""

from __future__ import annotations

import json
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from policies.row import RequestOutcome, Row
from policies.types import CandidateScore, Decision, OffloadPlan, OffloadReason, Reason, RequestClass
from proxy.breakdown import Breakdown
from proxy.tracing.request_trace import RequestTrace, trace_id
from proxy.tracing.spans import spans_of
from proxy.tracing.wire import encoded_spans, export_request
from tests.proxy.tracing.receiver import attributes_of


def decision_among(candidates: int, chosen: str = "inst-0") -> Decision:
    """Scores fall from the first candidate to the last."""
    scores = tuple(
        CandidateScore(f"inst-{at}", 1.0 - at / 100, {"queue_s": 0.5}, at == 0, at) for at in range(candidates)
    )
    plan = OffloadPlan(None, OffloadReason.PLANNER_NEVER)
    return Decision("r", chosen, None, RequestClass.WARM, Reason.LOWEST_SCORE, plan, scores, "warm", 600, 512)


def traced_row(*decisions: Decision, **fields: Any) -> tuple[Row, RequestTrace]:
    row = Row("r", "/v1/completions", 1e9, outcome=RequestOutcome.OK, status=200, **fields)
    row.trace = trace = RequestTrace(trace_id(), 1, None, 5.0)
    for decision in decisions:
        trace.routed(decision, 1e-4)
        row.decision = decision
    return row, trace


def decoded(row: Row, trace: RequestTrace) -> list[Any]:
    raw = export_request({}, "", [encoded_spans(trace.trace_id, trace.flags, "", spans_of(row, trace))])
    return list(ExportTraceServiceRequest.FromString(raw).resource_spans[0].scope_spans[0].spans)


def scores_of(spans: list[Any]) -> list[list[dict[str, Any]]]:
    """Scores of each ``route`` span."""
    return [
        json.loads(str(attributes_of(span.attributes)["warmroute.scores"])) for span in spans if span.name == "route"
    ]


def test_the_scores_of_a_trace_are_those_of_its_record() -> None:
    row, trace = traced_row(decision_among(8))
    breakdown = Breakdown(10)
    breakdown.close_row(breakdown.open_row(row))
    [recorded] = breakdown.select(1)
    assert len(recorded["scores"]) == 8
    assert scores_of(decoded(row, trace)) == [recorded["scores"]]


def test_a_trace_without_a_record_has_the_same_scores() -> None:
    row, trace = traced_row(decision_among(8))
    without = scores_of(decoded(row, trace))
    breakdown = Breakdown(10)
    breakdown.close_row(breakdown.open_row(row))
    [[*first]], [[*second]] = without, scores_of(decoded(row, trace))
    assert sorted(first, key=lambda each: each["instance"]) == sorted(second, key=lambda each: each["instance"])


def test_of_many_candidates_a_trace_has_the_lowest_scores_only() -> None:
    row, trace = traced_row(decision_among(20))
    breakdown = Breakdown(10)
    breakdown.close_row(breakdown.open_row(row))
    [scores] = scores_of(decoded(row, trace))
    assert [each["instance"] for each in scores] == [f"inst-{at}" for at in range(19, 3, -1)]


def test_each_attempt_has_the_scores_of_its_own_decision() -> None:
    row, trace = traced_row(decision_among(3), decision_among(2))
    breakdown = Breakdown(10)
    breakdown.close_row(breakdown.open_row(row))
    assert [len(scores) for scores in scores_of(decoded(row, trace))] == [3, 2]


def test_scores_that_json_does_not_know_are_in_record_and_trace_as_text() -> None:
    decision = decision_among(1)
    strange: Any = {"queue_s": 1 + 2j}
    row, trace = traced_row(decision._replace(scores=(decision.scores[0]._replace(inputs=strange),)))
    breakdown = Breakdown(10)
    breakdown.close_row(breakdown.open_row(row))
    [recorded] = breakdown.select(1)
    assert recorded["scores"][0]["inputs"] == {"queue_s": "(1+2j)"}
    assert scores_of(decoded(row, trace))[0][0]["inputs"] == {"queue_s": "(1+2j)"}


def test_equal_texts_of_two_requests_do_not_mix_their_values() -> None:
    first, first_trace = traced_row(decision_among(2), prompt_tokens=600, actual_cached_tokens=512, session_id="a")
    second, second_trace = traced_row(decision_among(2), prompt_tokens=70_000, actual_cached_tokens=0, session_id="b")
    first_trace.named("m")
    second_trace.named("n")
    one, two = (attributes_of(decoded(row, row.trace)[0].attributes) for row in (first, second))  # type: ignore[arg-type]
    assert (one["gen_ai.request.model"], one["gen_ai.conversation.id"], one["warmroute.new_tokens"]) == ("m", "a", 88)
    assert (two["gen_ai.request.model"], two["gen_ai.conversation.id"], two["warmroute.new_tokens"]) == (
        "n",
        "b",
        70_000,
    )
    assert one["gen_ai.usage.cache_read.input_tokens"] == 512
    assert two["gen_ai.usage.cache_read.input_tokens"] == 0
