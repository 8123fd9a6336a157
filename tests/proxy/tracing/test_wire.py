"""Encoded spans as OpenTelemetry's own protobuf classes decode them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from proxy.tracing.wire import (
    AttributeValue,
    SpanKind,
    TraceSpan,
    doubles,
    encoded_attribute,
    encoded_attributes,
    encoded_spans,
    export_request,
    integers,
    texts,
)
from tests.proxy.tracing.receiver import attributes_of

TRACE, OWN, PARENT = bytes(range(16)), bytes(range(8)), bytes(range(8, 16))
values = st.one_of(
    st.text(max_size=300),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(st.text(max_size=5), max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=150), values, max_size=6), st.text(max_size=200))
def test_every_attribute_is_decoded_as_it_was(attributes: dict[str, AttributeValue], name: str) -> None:
    span = TraceSpan(
        OWN, PARENT, name, SpanKind.CLIENT, 5, 7, encoded_attributes(attributes), "failed", remote_parent=True
    )
    alone = TraceSpan(PARENT, None, "root", SpanKind.SERVER, 9, 3)
    raw = export_request(
        attributes, "1.2", [encoded_spans(TRACE, 1, "a=b", [span]), encoded_spans(OWN * 2, 0, "", [alone])]
    )
    [of_resource] = ExportTraceServiceRequest.FromString(raw).resource_spans
    [of_scope] = of_resource.scope_spans
    first, second = of_scope.spans
    assert attributes_of(of_resource.resource.attributes) == attributes
    assert (of_scope.scope.name, of_scope.scope.version) == ("warmroute", "1.2")
    assert attributes_of(first.attributes) == attributes
    assert (first.trace_id, first.span_id, first.parent_span_id, first.name) == (TRACE, OWN, PARENT, name)
    assert (first.kind, first.start_time_unix_nano, first.end_time_unix_nano) == (3, 5, 7)
    assert (first.trace_state, first.flags) == ("a=b", 0x301)
    assert (first.status.code, first.status.message) == (2, "failed")
    assert (second.trace_id, second.parent_span_id, second.flags) == (OWN * 2, b"", 0x100)
    assert (second.start_time_unix_nano, second.end_time_unix_nano) == (9, 9)
    assert second.status.code == 0


def test_a_number_and_a_boolean_that_are_equal_keep_their_kinds() -> None:
    first: dict[str, AttributeValue] = {"flag": True, "count": 1, "share": 1.0, "text": "1"}
    span = TraceSpan(OWN, None, "x", SpanKind.INTERNAL, 1, 2, encoded_attributes(first))
    raw = export_request({}, "", [encoded_spans(TRACE, 1, "", [span])])
    [decoded] = ExportTraceServiceRequest.FromString(raw).resource_spans[0].scope_spans[0].spans
    kinds = [(pair.key, pair.value.WhichOneof("value")) for pair in decoded.attributes]
    assert kinds == [
        ("flag", "bool_value"),
        ("count", "int_value"),
        ("share", "double_value"),
        ("text", "string_value"),
    ]


def test_an_attribute_that_is_none_is_left_out() -> None:
    assert encoded_attributes({"a": None, "b": 1}) == encoded_attribute("b", 1)


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=150),
    st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 127, 128, 16_383, 16_384, 30_000]),
    st.floats(allow_nan=False),
    st.text(max_size=300),
)
def test_an_encoder_of_one_key_writes_what_the_general_one_writes(
    key: str, number: int, double: float, text: str
) -> None:
    assert integers(key)(number) == encoded_attribute(key, number)
    assert doubles(key)(double) == encoded_attribute(key, double)
    assert texts(key)(text.encode()) == encoded_attribute(key, text)
