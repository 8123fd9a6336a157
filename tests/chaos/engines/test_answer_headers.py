"""Headers of an engine's answer: all but withheld ones reach the client, and a compressed answer is decodable."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from proxy.engines.headers import AnswerHeaders
from tests.chaos.conftest import BODY, HEAVY, StartChaos
from tests.chaos.rig.client import RawClient, post
from tests.chaos.rig.engine import ChaosEngine, Talk
from tests.chaos.rig.faults import also, answers, preceded_by
from tests.chaos.rig.wire import EVENTS, LAST_CHUNK, chunk, good_body, head, whole

PASSED = {
    "retry-after": "7",
    "retry-after-ms": "7000",
    "openai-processing-ms": "12",
    "x-ratelimit-remaining-requests": "3",
    "ratelimit-policy": "10;w=1",
    "server-timing": "prefill;dur=3",
    "content-language": "en",
    "x-should-retry": "false",
    "x-of-the-engine": "any",
    "metadata": '{"shape": [1, 2]}',
    "cache-control": "no-cache",
}
DROPPED = {
    "set-cookie": "a=b",
    "location": "http://127.0.0.1:9/",
    "x-request-id": "the engine's",
    "x-warmroute-instance": "forged",
    "content-digest": "sha-256=:x:",
    "clear-site-data": "*",
    "access-control-allow-origin": "*",
    "keep-alive": "timeout=9",
    "proxy-authenticate": "Basic",
    "trailer": "x",
    "upgrade": "h2c",
    "strict-transport-security": "max-age=1",
    "alt-svc": "h3",
}


def lines(headers: dict[str, str]) -> list[str]:
    return [f"{name}: {value}" for name, value in headers.items()]


@pytest.mark.parametrize("stream", [True, False])
async def test_headers_reach_the_client_except_withheld_ones(start_chaos: StartChaos, stream: bool) -> None:
    proxy = await start_chaos(ChaosEngine(also(*lines(PASSED), *lines(DROPPED), "server: engine", "date: long ago")))
    answer = await proxy.client.post(
        "/v1/completions", json={**BODY, "stream": stream}, headers={"x-request-id": "mine"}
    )
    assert answer.content == (b"".join(EVENTS) if stream else good_body())
    assert {name: answer.headers.get(name) for name in PASSED} == PASSED
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-warmroute-instance"] == "inst-0"
    assert set(DROPPED) & set(answer.headers) == {"x-request-id", "x-warmroute-instance"}
    assert "engine" not in answer.headers.get("server", "")
    assert answer.headers.get("date") != "long ago"


async def test_a_refusal_keeps_its_retry_after(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(answers("429 Too Many Requests", "Retry-After: 7")))
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize(
    "line",
    [
        "openai-x: " + "a" * 5000,
        "connection: retry-after\r\nretry-after: 7",
        "retry-after: 7\r\nconnection: close, Retry-After",
    ],
)
async def test_a_header_that_is_long_or_about_the_connection_is_dropped(start_chaos: StartChaos, line: str) -> None:
    async def fault(talk: Talk) -> None:
        await talk.send(head("200 OK", f"content-length: {len(good_body())}", line) + good_body())
        await talk.close()

    proxy = await start_chaos(ChaosEngine(fault))
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert "retry-after" not in answer.headers
    assert "openai-x" not in answer.headers


@pytest.mark.parametrize("line", ["retry-after: 7\x01", "retry-after: \x7f", "content-type: text/\x02x"])
async def test_an_answer_with_control_characters_in_its_headers_is_a_failed_attempt(
    start_chaos: StartChaos, line: str
) -> None:
    proxy = await start_chaos(ChaosEngine(also(line)))
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")


def test_control_characters_would_not_pass() -> None:
    headers = AnswerHeaders()
    for name in (b"retry-after", b"content-type", b"openai-x"):
        headers.add(name, b"7\x01")
        headers.add(name, b"7\r\nset-cookie: a=b")
    headers.end()
    assert (headers.passed, headers.content_type) == ([], "application/json")


async def test_headers_of_an_interim_answer_and_trailers_are_not_the_answers(start_chaos: StartChaos) -> None:
    early = preceded_by("103 Early Hints", "retry-after: 1", "content-type: text/early", "openai-early: 1")
    proxy = await start_chaos(ChaosEngine(early))
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert answer.headers["content-type"] == "application/json"
    assert not {"retry-after", "openai-early"} & set(answer.headers)

    async def trailing(talk: Talk) -> None:
        await talk.send(head("200 OK", "content-type: application/json", "transfer-encoding: chunked"))
        await talk.send(chunk(good_body()) + b"0\r\nretry-after: 5\r\ncontent-type: text/late\r\n\r\n")

    proxy.engines[0].fault = trailing
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert answer.content == good_body()
    assert (answer.headers["content-type"], answer.headers.get("retry-after")) == ("application/json", None)


async def test_many_headers_are_bounded(start_chaos: StartChaos) -> None:
    many = [f"openai-{number}: {'a' * 100}" for number in range(1000)]
    proxy = await start_chaos(ChaosEngine(also(*many)))
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert sum(name.startswith("openai-") for name in answer.headers) == 64


async def test_engines_are_asked_for_uncompressed_answers_whatever_the_client_accepts(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    await proxy.client.post("/v1/completions", json=BODY, headers={"accept-encoding": "gzip, br"})
    assert proxy.engines[0].posts[0].headers["accept-encoding"] == "identity"


def compressed(*, pieces: int = 3, end: bytes = LAST_CHUNK) -> Any:
    """A good answer that is compressed anyway."""

    async def fault(talk: Talk) -> None:
        answer = talk.answer("length")
        body = gzip.compress(b"".join(answer.parts))
        if not talk.request.fields.get("stream"):
            await talk.send(whole("200 OK", body, "content-encoding: gzip"))
            return
        kind = "content-type: text/event-stream"
        await talk.send(head("200 OK", kind, "transfer-encoding: chunked", "content-encoding: gzip"))
        size = -(-len(body) // 3)
        for number in range(pieces):
            await talk.send(chunk(body[number * size : (number + 1) * size]))
        await (talk.send(end) if end else talk.close())

    return fault


@pytest.mark.parametrize("resume", ["never", "always"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_compressed_anyway_is_decodable(
    start_chaos: StartChaos, stream: bool, resume: str
) -> None:
    proxy = await start_chaos(ChaosEngine(compressed()), resume={"enabled": resume}, inject_usage=False)
    asked = {**BODY, "stream": stream, "temperature": 0}
    answer = await proxy.client.post("/v1/completions", json=asked)
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content == (b"".join(EVENTS) if stream else good_body())
    [row] = await proxy.rows()
    assert (row["outcome"], row["attempts"], row["completion_tokens"]) == ("ok", [], None)
    await proxy.nothing_left()


async def test_a_compressed_stream_that_breaks_is_cut_off(start_chaos: StartChaos) -> None:
    """An error event in it could not be read, and a clean end would make it look complete."""
    proxy = await start_chaos(ChaosEngine(compressed(pieces=2, end=b"")))
    async with RawClient(proxy.port) as client:
        await client.send(post(json.dumps({**BODY, "stream": True}).encode()))
        got = b""
        while part := await client.reader.read(65536):
            got += part
    assert b"content-encoding: gzip" in got
    assert b"stream_broken" not in got
    assert not got.endswith(LAST_CHUNK)
    [row] = await proxy.rows()
    assert row["outcome"] == "stream_broken"
    await proxy.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_legs_of_a_hand_off_may_be_compressed(start_chaos: StartChaos, stream: bool) -> None:
    proxy = await start_chaos(
        *(ChaosEngine(compressed()) for _ in range(2)),
        role="kv_both",
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
        classes={"medium_tokens": 50, "heavy_tokens": 100},
        inject_usage=False,
    )
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert answer.content == (b"".join(EVENTS) if stream else good_body())
    assert (await proxy.rows())[0]["offload_reason"] == "chosen"
    await proxy.nothing_left()


def test_the_first_content_type_is_the_engines() -> None:
    headers = AnswerHeaders()
    for value in (b"text/event-stream", b"text/plain"):
        headers.add(b"content-type", value)
    assert headers.content_type == "text/event-stream"
    headers.clear()
    headers.add(b"content-type", b"bad\0")
    headers.add(b"content-type", b"text/x")
    assert headers.content_type == "text/x"
