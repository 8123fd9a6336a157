"""Heads of requests that are unusual but valid: encodings, whole URLs, HEAD, two slashes."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from typing import Any

import httpx
import pytest

from tests.proxy.access.test_keys import KEY, KEYS, bearer
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.passing_engine import PassingEngine
from tests.proxy.typed_engine import TypedEngine

OK: dict[str, Any] = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/explain"])
async def test_a_compressed_body_is_refused_by_its_encoding(start_proxy: StartProxy, path: str) -> None:
    proxy = await start_proxy(1)
    body = gzip.compress(json.dumps(OK).encode())
    for encoding in ("gzip", "identity, zstd"):
        answer = await proxy.client.post(path, content=body, headers={"content-encoding": encoding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "encoding_unsupported")
        assert "compressed request bodies are not supported" in answer.json()["error"]["message"]
    assert not proxy.engines[0].raw_bodies


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_json_in_another_encoding_reaches_the_engine_as_utf8(start_proxy: StartProxy, encoding: str) -> None:
    engine = PassingEngine()
    proxy = await start_proxy(engines=[engine], pass_through={"paths": ["/v1/other"]})
    text = '{"model": "stub", "messages": [{"role": "user", "content": "é水🙂"}], "prompt": "é水🙂", "max_tokens": 4}'
    headers = {"content-type": f"application/json; charset={encoding}"}
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/other")
    for path in paths:
        answer = await proxy.client.post(path, content=text.encode(encoding), headers=headers)
        assert answer.status_code == 200, answer.text
    assert [*engine.raw_bodies, *(each.body for each in engine.arrived)] == [text.encode()] * len(paths)
    assert {each.headers["content-type"] for each in engine.arrived} == {"application/json"}
    explained = await proxy.client.post("/explain", content=text.encode(encoding), headers=headers)
    assert explained.json()["request"]["endpoint"] == "/v1/chat/completions"


async def test_a_body_that_is_not_in_the_encoding_it_begins_in_is_refused(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path in ("/v1/completions", "/v1/embeddings", "/explain"):
        answer = await proxy.client.post(path, content='{"model": "stub", "prompt": "x"}'.encode("utf-16")[:-1])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        assert "the body is not valid UTF-16" in answer.json()["error"]["message"]
    assert {row["outcome"] for row in await proxy.rows()} == {"rejected"}


async def test_the_encoding_identity_is_none(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path in ("/v1/completions", "/explain"):
        answer = await proxy.client.post(path, json=OK, headers={"content-encoding": "Identity"})
        assert answer.status_code == 200


async def test_a_missing_key_is_refused_before_the_encoding(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, keys=KEYS)
    for path in ("/v1/completions", "/explain"):
        answer = await proxy.client.post(path, json=OK, headers={"content-encoding": "gzip"})
        assert answer.status_code == 401


async def test_requests_with_a_whole_url_are_served(start_proxy: StartProxy) -> None:
    """Clients with ``http_proxy`` send them."""
    engine = TypedEngine()
    proxy = await start_proxy(engines=[engine], keys=KEYS)
    body = {"model": "stub", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(proxy=str(proxy.client.base_url), headers=bearer(KEY)) as client:
        answer = await client.post("http://engines.example/v1/messages?a=http://b/c", json=body)
        assert (answer.status_code, answer.headers["x-warmroute-instance"]) == (200, "inst-0")
        assert (await client.get("http://engines.example/v1/models")).status_code == 200
        assert (await client.get("http://engines.example/v1/unknown")).status_code == 404
    assert engine.paths == ["POST /v1/messages?a=http://b/c"]


async def status_of(proxy: Running, head: str) -> int:
    """Status of the answer to a request without a body."""
    reader, writer = await asyncio.open_connection(proxy.client.base_url.host, proxy.client.base_url.port)
    async with asyncio.timeout(10):
        writer.write(head.encode())
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_the_host_of_a_whole_url_replaces_the_header(start_proxy: StartProxy) -> None:
    """Without keys, the admin side accepts loopback names only, against DNS rebinding."""
    proxy = await start_proxy(1)
    for url, host, status in (
        ("http://rebound.example/stats", "localhost", 403),
        ("http://localhost@rebound.example/stats", "localhost", 403),
        ("http://localhost/stats", "rebound.example", 200),
        ("HTTP://localhost:1?verbose", "localhost", 404),
        ("http://[::1]:1/stats", "localhost", 200),
    ):
        assert await status_of(proxy, f"GET {url} HTTP/1.1\r\nhost: {host}\r\n\r\n") == status, url
    assert await status_of(proxy, "GET http://localhost/stats HTTP/1.1\r\n\r\n") == 400


async def test_head_of_probes_is_answered_as_get_without_a_body(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    without_engine = await start_proxy(1, each=[{"url": "http://127.0.0.1:9"}])
    for path in ("/health", "/ready", "/ready?verbose"):
        for each in (proxy, without_engine):
            answer, same = await each.client.head(path), await each.client.get(path)
            assert (answer.status_code, answer.content) == (same.status_code, b""), path
    assert (await without_engine.client.head("/ready")).status_code == 503
    assert (await proxy.client.options("/ready")).headers["allow"] == "GET, HEAD, OPTIONS"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        *(("//v1/completions", "the path here is /v1/completions,"), ("//v1/models", "the path here is /v1/models,")),
        *((path, "no path here begins with two slashes") for path in ("//health", "//stats", "//")),
    ],
)
async def test_a_path_with_two_slashes_at_its_beginning_is_not_found(
    start_proxy: StartProxy, path: str, says: str
) -> None:
    proxy = await start_proxy(1)
    for host in ("localhost", "engines.example"):  # the answer has nothing to do with the access rules
        answer = await proxy.client.get(f"{proxy.client.base_url}{path}", headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
        assert says in answer.json()["error"]["message"]


MISTAKEN = [
    ("/chat/completions", "the path here is /v1/chat/completions: the client's base URL lacks /v1"),
    ("/messages", "the path here is /v1/messages: the client's base URL lacks /v1"),
    ("/responses", "the path here is /v1/responses: the client's base URL lacks /v1"),
    ("/models", "the path here is /v1/models: the client's base URL lacks /v1"),
    ("/models/stub", "the path here is /v1/models/stub: the client's base URL lacks /v1"),
    ("/v1/v1/models/stub", "the path here is /v1/models/stub: the client adds /v1 itself"),
    ("/v1/v1/messages", "the path here is /v1/messages: the client adds /v1 itself"),
    ("/v1/v1/messages/count_tokens", "the path here is /v1/messages/count_tokens: the client adds /v1 itself"),
    ("/V1/chat/completions", "paths are case-sensitive, the one here is /v1/chat/completions"),
    ("/v1/Chat/completions", "paths are case-sensitive, the one here is /v1/chat/completions"),
    ("/V1/models/stub", "paths are case-sensitive, the API of the engines begins with /v1/"),
    ("/v1/chat/completions/", "the path here is /v1/chat/completions, without doubled slashes or one at its end"),
    ("/v1//chat//completions", "the path here is /v1/chat/completions, without doubled slashes or one at its end"),
    ("/v1/embeddings//", "the path here is /v1/embeddings, without"),
    ("/v1/responses/resp_1/cancel/", "the path here is /v1/responses/resp_1/cancel, without"),
    ("/v1/responses/resp_1/", "the path here is /v1/responses/resp_1, without"),
    ("/tokenize/", "the path here is /tokenize, without"),
    ("/chat/completions/", "the path here is /v1/chat/completions: the client's base URL lacks /v1"),
    ("/v1/v1//messages", "the path here is /v1/messages: the client adds /v1 itself"),
    ("/V1/Chat/Completions/", "paths are case-sensitive, the one here is /v1/chat/completions"),
]


async def test_slashes_are_left_to_redirects_where_there_is_one_and_no_id_is_made_up(start_proxy: StartProxy) -> None:
    proxy = await start_proxy()
    for path in ("/health/", "/version/"):
        assert (await proxy.client.get(path)).status_code == 307, path
    answer = await proxy.client.post("/v1/responses//cancel")
    assert "/v1/responses/cancel" not in answer.json()["error"]["message"]


async def test_other_case_slashes_and_a_base_url_with_or_without_v1_are_named_as_the_mistake(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy()
    for (path, says), method in itertools.product(MISTAKEN, ("GET", "POST")):
        answer = await proxy.client.request(method, path, json={"model": "stub"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path"), (method, path)
        assert says in answer.json()["error"]["message"], (method, path)
