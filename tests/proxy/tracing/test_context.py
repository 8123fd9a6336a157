"""W3C trace context of clients, and the destination read from settings and environment."""

from __future__ import annotations

import re

import pytest

from proxy.settings import SettingsError, TracingSettings, load_settings
from proxy.tracing.context import SAMPLED, ParentContext, parent_of, traceparent
from proxy.tracing.destination import destination, tracing_enabled
from proxy.tracing.request_trace import PassedTrace

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_valid_context_is_taken_with_its_state() -> None:
    headers = {b"traceparent": f"00-{TRACE}-{SPAN}-01".encode(), b"tracestate": b"vendor=1,other=2"}
    parent = parent_of(headers)
    assert parent is not None
    assert (parent.trace_id.hex(), parent.span_id.hex(), parent.sampled) == (TRACE, SPAN, True)
    assert parent.state == "vendor=1,other=2"
    assert traceparent(parent.trace_id, parent.span_id, parent.flags) == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_an_invalid_context_is_no_context(given: str) -> None:
    assert parent_of({b"traceparent": given.encode()}) is None


def test_a_later_version_may_have_more_fields_and_unknown_flags_are_not_passed_on() -> None:
    parent = parent_of({b"traceparent": f"01-{TRACE}-{SPAN}-ff-more".encode()})
    assert parent is not None
    assert parent.flags == 3
    assert parent_of({}) is None


@pytest.mark.parametrize("state", [b"x" * 513, b"a=\xff", b"a\nb"])
def test_a_state_that_is_too_long_or_not_ascii_is_dropped(state: bytes) -> None:
    parent = parent_of({b"traceparent": f"00-{TRACE}-{SPAN}-00".encode(), b"tracestate": state})
    assert parent is not None
    assert (parent.state, parent.sampled) == ("", False)


def test_the_settings_precede_the_environment_which_precedes_the_default() -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/",
        "OTEL_EXPORTER_OTLP_HEADERS": "Api-Key=a%20b,x=1,,nonsense",
        "OTEL_SERVICE_NAME": "router",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=prod,service.name=other",
    }
    found = destination(TracingSettings(), environment)
    assert found.url == "http://collector:4318/v1/traces"
    assert found.headers == {"api-key": "a b", "x": "1"}
    assert found.resource["service.name"] == "router"
    assert found.resource["deployment.environment.name"] == "prod"
    own = TracingSettings.model_validate({"endpoint": "http://other:1/", "headers": {"X": "2"}, "service_name": "mine"})
    found = destination(own, environment)
    assert (found.url, found.headers["x"]) == ("http://other:1/v1/traces", "2")
    assert found.resource["service.name"] == "mine"
    of_signal = {**environment, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:9/any/path"}
    assert destination(TracingSettings(), of_signal).url == "http://traces:9/any/path"
    assert destination(TracingSettings(), {}).url == "http://127.0.0.1:4318/v1/traces"
    assert destination(TracingSettings(), {}).resource["service.name"] == "warmroute"


def test_the_environment_may_switch_traces_off() -> None:
    on = TracingSettings(enabled=True)
    assert tracing_enabled(on, {})
    assert not tracing_enabled(on, {"OTEL_SDK_DISABLED": "TRUE"})
    assert not tracing_enabled(TracingSettings(), {})


def test_variables_without_effect_are_reported_with_what_applies_instead(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"OTEL_TRACES_SAMPLER": "always_on", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip"}
    destination(TracingSettings(enabled=True), environment)
    assert [record.getMessage() for record in caplog.records] == [
        "OTEL_EXPORTER_OTLP_COMPRESSION has no effect: exports are not compressed",
        "OTEL_TRACES_SAMPLER has no effect: set tracing.sample_ratio",
    ]


def test_entries_without_a_name_and_value_are_reported_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_HEADERS": "Authorization: Bearer abcdef,x=1,",
        "OTEL_RESOURCE_ATTRIBUTES": "a=b,prod",
    }
    found = destination(TracingSettings(enabled=True), environment)
    assert (found.headers, found.resource["a"]) == ({"x": "1"}, "b")
    assert [record.getMessage() for record in caplog.records] == [
        "OTEL_EXPORTER_OTLP_HEADERS: entry 1 is left out: give NAME=VALUE,NAME=VALUE",
        "OTEL_RESOURCE_ATTRIBUTES: entry 2 is left out: give NAME=VALUE,NAME=VALUE",
    ]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf only"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "x=1,key=%E2%82%AC"}, "OTEL_EXPORTER_OTLP_HEADERS has an entry"),
        ({"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "key=a%0D%0Ab"}, "OTEL_EXPORTER_OTLP_HEADERS has an entry"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "Authorization: Bearer=x"}, "OTEL_EXPORTER_OTLP_HEADERS has an entry"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT: 'collector:4317'"),
    ],
)
def test_an_environment_that_cannot_be_followed_is_an_error_that_names_it(
    environment: dict[str, str], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        destination(TracingSettings(enabled=True), environment)


@pytest.mark.parametrize(
    "section",
    [
        {"endpoint": "collector:4317"},
        {"endpoint": "http://collector:4318/?x=1"},
        {"endpoint": "http://user:secret@collector:4318"},
        {"headers": {"a b": "1"}},
        {"headers": {"a": "line\r\nend"}},
        {"sample_ratio": 1.5},
    ],
)
def test_invalid_settings_are_refused_without_showing_secrets(section: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, instances=[{"url": "http://127.0.0.1:1"}], tracing=section)
    assert "line" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_each_leg_passes_a_new_span_of_its_requests_trace() -> None:
    client = ParentContext(bytes(range(16)), bytes(range(8)), SAMPLED, "vendor=1")
    passed = [PassedTrace(2) for _ in range(200)]
    legs = [header for trace in passed for header in (leg_of(trace), leg_of(trace))]
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-02", header) for header in legs)
    assert len({header.split("-")[2] for header in legs}) == 400
    assert [first.split("-")[1] for first in legs[::2]] == [second.split("-")[1] for second in legs[1::2]]
    assert len({header.split("-")[1] for header in legs}) == 200
    continued = PassedTrace(1, client)
    first, second = leg_of(continued), leg_of(continued)
    assert first != second
    for header in (first, second):
        assert header.startswith(f"00-{client.trace_id.hex()}-")
        assert header.endswith("-01")


def leg_of(trace: PassedTrace) -> str:
    headers: dict[str, str] = {}
    trace.leg("co-located", "e0", "http://e0", headers)
    return headers["traceparent"]
