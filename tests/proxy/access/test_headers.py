"""Request headers that reach an engine, and redirects of engines, which are not followed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from proxy.access.forwarding import Forwarding, request_id_of
from proxy.access.keys import Keys
from proxy.settings import Settings, load_settings
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.stub_engine import StubEngine

BODY = json.dumps({"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}).encode()

# Not forwarded by default: secrets of the browser or of a gateway, routing tricks, hop-by-hop headers, oddities.
ODD = [
    b"accept: */*",
    b"accept-encoding: gzip, br",
    b"accept-language: tlh",
    b"alt-used: evil",
    b"cache-control: no-cache",
    b"client-ip: 1.2.3.4",
    b"connection: x-session-id",
    b"connection: close, traceparent",
    b"content-encoding: identity",
    b"content-language: en",
    b"content-location: /etc/passwd",
    b"cookie: session=secret",
    b"cookie2: $Version=1",
    b"date: Thu, 01 Jan 1970 00:00:00 GMT",
    b"dnt: 1",
    b"expires: 0",
    b"forwarded: for=1.2.3.4;host=evil",
    b"from: a@b",
    b"front-end-https: on",
    b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"if-none-match: *",
    b"keep-alive: timeout=1",
    b"max-forwards: 0",
    b"openai-organization: org-secret",
    b"openai-project: proj-secret",
    b"origin: https://evil.example.com",
    b"pragma: no-cache",
    b"priority: u=0",
    b"proxy-authorization: Basic c2VjcmV0",
    b"proxy-connection: keep-alive",
    b"range: bytes=0-1",
    b"referer: https://evil.example.com/",
    b"sec-fetch-site: cross-site",
    b"sec-websocket-key: x",
    b"te: trailers",
    b"trailer: x-evil",
    b"true-client-ip: 1.2.3.4",
    b"user-agent: curl/8 () { :; }; echo",
    b"via: 1.1 evil",
    b"warning: 199",
    b"x-api-key: secret",
    b"api-key: secret",
    b"x-goog-api-key: secret",
    b"x-forwarded-port: 1",
    b"x-warmroute-no-retry: 0",
    b"x-stainless-lang: python",
    b"if-match: *",
    b"x-forwarded-for: 127.0.0.1",
    b"x-forwarded-host: evil",
    b"x-forwarded-proto: https",
    b"x-http-method-override: DELETE",
    b"x-original-url: /admin",
    b"x-real-ip: 127.0.0.1",
    b"x-rewrite-url: /admin",
    b"x-warmroute-instance: inst-1",
]
OF_THE_PROXY = {"host", "content-type", "content-length", "x-request-id", "connection", "accept-encoding"}


async def ask(proxy: Running, *lines: bytes, path: bytes = b"/v1/completions") -> tuple[int, bytes]:
    """Status and whole answer of a request with these header lines, sent verbatim on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
    try:
        head = [b"POST " + path + b" HTTP/1.1", b"host: proxy", b"content-length: %d" % len(BODY), *lines]
        writer.write(b"\r\n".join(head) + b"\r\n\r\n" + BODY)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        return int(answer.split(b" ", 2)[1]), answer
    finally:
        writer.close()


async def test_fifty_odd_headers_stay_here(start_proxy: StartProxy) -> None:
    assert len(ODD) > 50
    proxy = await start_proxy(1)
    engine = proxy.engines[0]
    for line in ODD:
        status, _ = await ask(proxy, line)
        assert status == 200, line
    together = [line for line in ODD if not line.startswith((b"connection", b"sec-websocket"))]
    assert (await ask(proxy, b"x-session-id: kept", *together))[0] == 200
    assert len(engine.seen_headers) == len(ODD) + 1
    for seen in engine.seen_headers:
        assert set(seen) - OF_THE_PROXY - {"x-session-id"} == set()
        assert "secret" not in str(seen)
        assert "evil" not in str(seen)
        assert seen["host"] == f"127.0.0.1:{engine.port}"
    assert engine.seen_headers[-1]["x-session-id"] == "kept"


FORWARDED = {
    "baggage": "user=1",
    "x-data-parallel-rank": "1",
    "traceparent": "t",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "b",
    "x-of-a-gateway": "g",
    "session_id": "s",
}


async def test_all_other_headers_reach_the_engine(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    await ask(proxy, *(f"{name}: {value}".encode() for name, value in FORWARDED.items()))
    [seen] = proxy.engines[0].seen_headers
    assert {name: value for name, value in seen.items() if name not in OF_THE_PROXY} == FORWARDED


async def test_a_named_header_is_forwarded_besides_all_others(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, forward_headers=["*", "x-forwarded-for", "OpenAI-Organization"])
    lines = (b"x-forwarded-for: 1.2.3.4", b"openai-organization: o", b"openai-project: p", b"x-mine: m")
    await ask(proxy, *lines, b"x-forwarded-host: h")
    [seen] = proxy.engines[0].seen_headers
    assert set(seen) - OF_THE_PROXY == {"x-forwarded-for", "openai-organization", "x-mine"}


async def test_a_header_that_connection_names_is_for_this_hop_only(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for value in (b"x-session-id", b"X-Session-Id, close", b"keep-alive,x-session-id"):
        await ask(proxy, b"connection: " + value, b"x-session-id: s", b"tracestate: a=b")
    for seen in proxy.engines[0].seen_headers:
        assert "x-session-id" not in seen
        assert seen["tracestate"] == "a=b"


async def test_one_value_of_a_repeated_header_is_forwarded(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    seen_raw: list[list[tuple[bytes, bytes]]] = []
    answer = proxy.engines[0]._answer

    async def watched(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen_raw.append(list(request.raw_headers))
        return await answer(request, body)

    proxy.engines[0]._answer = watched  # type: ignore[method-assign]
    await ask(proxy, b"x-session-id: one", b"X-Session-ID: two", b"authorization: Bearer a", b"Authorization: Bearer b")
    [headers] = seen_raw
    assert [value for name, value in headers if name.lower() == b"x-session-id"] == [b"two"]
    assert [value for name, value in headers if name.lower() == b"authorization"] == [b"Bearer b"]
    assert (await proxy.rows())[0]["session_id"] == "two"


async def test_no_header_can_be_smuggled_into_another(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    attempts = [
        b"x-session-id: a\r\n x-evil: 1",
        b"x-session-id: a\r\n\tx-evil: 1",
        b"x-session-id: a\nx-evil: 1",
        b"x-session-id: a\rx-evil: 1",
        b"x-session-id: a\x00x-evil: 1",
        b"x-session-id: a\x0bx-evil: 1",
        b"x-session-id: \x7f",
        b"x-session-id : spaced",
        b" x-session-id: folded-at-once",
        b"x-session-id\x00: a",
        b"traceparent: a\r\n  authorization: Bearer evil",
        b"transfer-encoding: chunked",
        b"content-length: 5",
        b"content-length: 0",
    ]
    for attempt in attempts:
        status, _ = await ask(proxy, attempt)
        assert status in {200, 400}, attempt
    for seen in proxy.engines[0].seen_headers:
        assert "x-evil" not in seen
        assert "authorization" not in seen
        for value in seen.values():
            assert all(character == "\t" or " " <= character != "\x7f" for character in value)
    for raw in proxy.engines[0].raw_bodies:
        assert raw == BODY
    # Nothing of it remains in a connection that is reused.
    assert (await ask(proxy, b"x-session-id: fine"))[0] == 200
    assert proxy.engines[0].seen_headers[-1]["x-session-id"] == "fine"


async def test_forwarded_headers_are_a_setting(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, forward_headers=["X-Tenant", "openai-organization"])
    await ask(proxy, b"x-tenant: blue", b"OpenAI-Organization: org", b"x-session-id: s", b"traceparent: t")
    seen = proxy.engines[0].seen_headers[0]
    assert (seen["x-tenant"], seen["openai-organization"]) == ("blue", "org")
    assert "x-session-id" not in seen
    assert "traceparent" not in seen


IDS = [
    (b"mine", True),
    (b"a" * 128, True),
    (b"req_1:2/3=4+5@6{7}~", True),
    (b"a" * 129, False),
    (b"", False),
    (b"two words", False),
    (b"tab\there", False),
    (b"\xc3\xa9t\xc3\xa9", False),
    (b"\xff", False),
]


async def test_a_request_id_is_short_and_printable_or_a_new_one(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for given, kept in IDS:
        status, answer = await ask(proxy, b"x-request-id: " + given)
        assert status == 200
        reported = answer.lower().partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
        if kept:
            assert reported == given.decode().lower()
        else:
            assert reported.startswith("req-")
            assert len(reported) == 36
        assert proxy.engines[0].seen_headers[-1]["x-request-id"].lower() == reported
        assert (await proxy.rows())[-1]["request_id"].lower() == reported
    for forged in (b"a\nb", b"a\x1b[31m", b"a\x00", b"a\x7f"):
        assert request_id_of({b"x-request-id": forged}).startswith("req-")
    assert request_id_of({}) != request_id_of({})


def forwarding(**settings: Any) -> tuple[Forwarding, Settings]:
    made = load_settings(None, **{"instances": [{"url": "http://a"}], **settings})
    return Forwarding(made, Keys(made.keys)), made


def test_a_value_with_a_line_break_is_dropped_even_if_a_parser_lets_it_pass() -> None:
    rules, settings = forwarding()
    for value in (b"a\r\nx-evil: 1", b"a\n", b"\x00", b"a\x7f", b"a\x0b"):
        got = rules.headers({b"x-session-id": value, b"authorization": value, b"tracestate": b"\tok"},
                            settings.instances[0])  # fmt: skip
        assert got == {"tracestate": "\tok"}


@pytest.mark.parametrize("status", [302, 307])
async def test_no_redirect_is_followed(start_proxy: StartProxy, status: int) -> None:
    """An engine that redirects the proxy: for a request, and for every kind of probe."""
    elsewhere = await StubEngine().start()
    reached: list[str] = []

    async def redirect(request: web.Request, *_: Any) -> web.Response:
        reached.append(request.path)
        return web.Response(status=status, headers={"location": f"http://127.0.0.1:{elsewhere.port}{request.path}"})

    try:
        engine = StubEngine()
        engine._answer = redirect  # type: ignore[method-assign, assignment]
        proxy = await start_proxy(engines=[engine], role="kv_both")
        for stream in (False, True):
            body = {"model": "stub", "prompt": [1], "stream": stream}
            answer = await proxy.client.post("/v1/completions", json=body)
            assert answer.status_code in {status, 502}
            assert "location" not in answer.headers
        assert len(reached) >= 2
        # Its control endpoints redirect too: the probes treat that as no answer.
        engine._health = engine._metrics = engine._models = engine._query = redirect  # type: ignore[method-assign, assignment]
        await engine.stop()
        await engine.start()
        await proxy.until(lambda: reached.count("/health") >= 3 and not proxy.core.instances.healthy())
        assert elsewhere.seen == []
        assert elsewhere.probes == 0
    finally:
        await elsewhere.stop()
