"""An OTLP/HTTP receiver that decodes what it is sent with OpenTelemetry's own protobuf classes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

AnyAttribute = str | bool | int | float | list[Any]


@dataclass
class ReceivedSpan:
    """One decoded span."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    state: str
    flags: int
    failed: bool
    message: str
    attributes: dict[str, AnyAttribute]


@dataclass
class TraceReceiver:
    """Answers ``status`` and keeps the spans of the requests that it accepts."""

    status: int = 200
    hangs: bool = False
    posts: int = 0
    spans: list[ReceivedSpan] = field(default_factory=list)
    resources: list[dict[str, AnyAttribute]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def root(self) -> ReceivedSpan:
        """The only span of kind server."""
        [root] = [span for span in self.spans if span.kind == 2]
        return root

    async def got(self, roots: int = 1) -> None:
        """Wait for this many traces."""
        for _ in range(1000):
            if sum(span.kind == 2 for span in self.spans) >= roots:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"received {[span.name for span in self.spans]} within 20 s")

    async def _receive(self, request: web.Request) -> web.Response:
        self.posts += 1
        raw = await request.read()
        if self.hangs:
            await asyncio.sleep(3600)
        if self.status == 200:
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self._decode(ExportTraceServiceRequest.FromString(raw))
        content = ExportTraceServiceResponse().SerializeToString()
        return web.Response(status=self.status, body=content, content_type="application/x-protobuf")

    def _decode(self, export: ExportTraceServiceRequest) -> None:
        for of_resource in export.resource_spans:
            self.resources.append(attributes_of(of_resource.resource.attributes))
            for of_scope in of_resource.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        span.name,
                        span.kind,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.trace_state,
                        span.flags,
                        span.status.code == 2,
                        span.status.message,
                        attributes_of(span.attributes),
                    )
                    for span in of_scope.spans
                ]


def attributes_of(pairs: Any) -> dict[str, AnyAttribute]:
    """Attributes as a dict; a repeated key fails."""
    found = [(pair.key, value_of(pair.value)) for pair in pairs]
    assert len(dict(found)) == len(found), found
    return dict(found)


def value_of(value: Any) -> Any:
    """Value of an ``AnyValue`` message."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextlib.asynccontextmanager
async def trace_receiver(**settings: Any) -> AsyncIterator[TraceReceiver]:
    """A receiver on a free loopback port."""
    receiver = TraceReceiver(**settings)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/traces", receiver._receive)
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        receiver.url = f"http://127.0.0.1:{port}"
        yield receiver
    finally:
        await runner.cleanup()
