"""Settings of traces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from proxy.settings.section import Seconds, Section

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")


class TracingSettings(Section):
    """Traces of requests, sent to an OpenTelemetry collector over OTLP/HTTP."""

    enabled: bool = Field(default=False, description="make traces, and pass the W3C trace context on to engines")
    endpoint: str | None = Field(
        default=None,
        description="collector's base URL, such as http://127.0.0.1:4318; /v1/traces is appended. none: the variables "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, else http://127.0.0.1:4318",
    )
    headers: Mapping[str, SecretStr] = Field(
        default_factory=dict,
        description="headers of every export, such as a key; besides those of OTEL_EXPORTER_OTLP_HEADERS",
    )
    sample_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of traces recorded of requests without a traceparent; with one its sampled flag decides",
    )
    service_name: str | None = Field(
        default=None, min_length=1, description="service.name of the traces; none: OTEL_SERVICE_NAME, else warmroute"
    )
    queue_size: int = Field(default=2048, ge=1, description="finished requests that may wait for export; more are lost")
    interval_s: Seconds = Field(default=1.0, description="longest time between two exports")
    timeout_s: Seconds = Field(default=5.0, description="bound on one export, and on the last one at the end")

    @field_validator("endpoint")
    @classmethod
    def _base_url(cls, value: str | None) -> str | None:
        return None if value is None else checked_base_url(value)

    @field_validator("headers")
    @classmethod
    def _header_lines(cls, value: Mapping[str, SecretStr]) -> Mapping[str, SecretStr]:
        for name, text in value.items():
            if not is_header(name, text.get_secret_value()):
                raise ValueError(f"{name!r} is no header name, or its value is not printable ASCII")
        return value


def is_header(name: str, value: str) -> bool:
    """True if an export can carry this header."""
    return _NAME.fullmatch(name) is not None and _VALUE.fullmatch(value) is not None


def checked_base_url(value: str) -> str:
    """A collector's URL without a slash at its end.

    Raises:
        ValueError: it is not http(s), has no host or a bad port, or has credentials, a query or a fragment.
    """
    parts = urlsplit(value)
    if "@" in parts.netloc:
        raise ValueError("a collector's URL must have no credentials: give them as tracing.headers")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{value!r} is not a collector's URL: give http://HOST:PORT or https://HOST:PORT")
    if parts.port == 0:
        raise ValueError(f"{value!r} has no usable port")
    return value.rstrip("/")
