"""Destination and resource of traces: the settings, then OpenTelemetry's environment variables, then defaults.

Read are ``OTEL_EXPORTER_OTLP_[TRACES_]ENDPOINT``, ``…_HEADERS``, ``…_PROTOCOL`` (``http/protobuf`` only),
``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_SERVICE_NAME`` and ``OTEL_SDK_DISABLED``. Others are reported if they are set.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote

from proxy.settings import SettingsError, TracingSettings
from proxy.settings.observation.tracing import checked_base_url, is_header

_PATH = "/v1/traces"
_DEFAULT = "http://127.0.0.1:4318"
_PROTOCOLS = frozenset({"", "http/protobuf"})
_IGNORED = MappingProxyType(
    {
        "OTEL_EXPORTER_OTLP_COMPRESSION": "exports are not compressed",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": "set SSL_CERT_FILE",
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": "client certificates are not supported, send to a collector nearby",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "set tracing.timeout_s",
        "OTEL_TRACES_SAMPLER": "set tracing.sample_ratio",
    }
)
"""Variables that are not followed -> what applies instead."""

log = logging.getLogger("warmroute.tracing")


class Destination(NamedTuple):
    """Address of the exports and the description of this process in them."""

    url: str
    headers: Mapping[str, str]
    resource: Mapping[str, str]
    version: str


def tracing_enabled(settings: TracingSettings, environment: Mapping[str, str] = os.environ) -> bool:
    """True if traces are made: ``tracing.enabled``, unless ``OTEL_SDK_DISABLED`` is true."""
    return settings.enabled and environment.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"


def destination(settings: TracingSettings, environment: Mapping[str, str] = os.environ) -> Destination:
    """The destination of all exports of this process.

    Raises:
        SettingsError: a variable of the environment has an invalid URL, a protocol other than ``http/protobuf``, or a
            header that no request can carry.
    """

    def of_signal(what: str) -> str:
        specific = environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{what}", "").strip()
        return specific or environment.get(f"OTEL_EXPORTER_OTLP_{what}", "").strip()

    if of_signal("PROTOCOL") not in _PROTOCOLS:
        raise SettingsError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {of_signal('PROTOCOL')!r}: traces are sent as http/protobuf only, "
            "to the collector's port for OTLP/HTTP (4318)"
        )
    for variable, instead in _IGNORED.items():
        if environment.get(variable) or environment.get(variable.replace("_OTLP_", "_OTLP_TRACES_")):
            log.warning("%s has no effect: %s", variable, instead)
    headers = _pairs(of_signal("HEADERS"), "OTEL_EXPORTER_OTLP_HEADERS")
    for name, value in headers.items():
        if not is_header(name, value):
            raise SettingsError(
                "OTEL_EXPORTER_OTLP_HEADERS has an entry whose name is no header name, or whose value is not printable "
                "ASCII after percent-decoding"
            )
    headers |= {name.lower(): value.get_secret_value() for name, value in settings.headers.items()}
    own_version = _version()
    named = settings.service_name or environment.get("OTEL_SERVICE_NAME", "").strip()
    resource = {"service.name": "warmroute", "service.version": own_version, "host.name": socket.gethostname()}
    resource |= _pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", ""), "OTEL_RESOURCE_ATTRIBUTES", lower=False)
    if named:
        resource["service.name"] = named
    return Destination(_url(settings, environment), headers, resource, own_version)


def _url(settings: TracingSettings, environment: Mapping[str, str]) -> str:
    if settings.endpoint is not None:
        return settings.endpoint.removesuffix(_PATH) + _PATH
    for name, suffix in (("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""), ("OTEL_EXPORTER_OTLP_ENDPOINT", _PATH)):
        if given := environment.get(name, "").strip():
            try:
                return checked_base_url(given) + suffix
            except ValueError as error:
                raise SettingsError(f"{name}: {error}") from error
    return _DEFAULT + _PATH


def _pairs(text: str, variable: str, *, lower: bool = True) -> dict[str, str]:
    """``a=1,b=2`` with percent encoding, as in OpenTelemetry's variables; others are left out, with a warning."""
    pairs = {}
    for number, entry in enumerate(text.split(","), 1):
        name, equals, value = entry.partition("=")
        if equals and name.strip():
            pairs[unquote(name.strip().lower() if lower else name.strip())] = unquote(value.strip())
        elif entry.strip():
            # Its text stays out of the log: it may be a key.
            log.warning("%s: entry %d is left out: give NAME=VALUE,NAME=VALUE", variable, number)
    return pairs


def _version() -> str:
    try:
        return version("warmroute")
    except PackageNotFoundError:
        return "0"
