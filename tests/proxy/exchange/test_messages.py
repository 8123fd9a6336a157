"""Anthropic's Messages API through the proxy: bytes in, bytes out, usage, errors, counting."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import httpx
import pytest

from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.passing_engine import PassingEngine
from tests.proxy.typed_engine import MESSAGE, WHOLE_MESSAGE, TypedEngine, error_event

STREAM = b"".join(MESSAGE)


def message(**more: Any) -> dict[str, Any]:
    system = [{"type": "text", "text": "be brief " * 400}]
    return {
        "model": "stub",
        "max_tokens": 8,
        "system": system,
        "messages": [{"role": "user", "content": "hi"}],
        **more,
    }


async def start(start_proxy: StartProxy, count: int = 1, **settings: Any) -> Running:
    return await start_proxy(engines=[TypedEngine() for _ in range(count)], **settings)


def typed(proxy: Running) -> list[TypedEngine]:
    return [engine for engine in proxy.engines if isinstance(engine, TypedEngine)]


@pytest.mark.parametrize("piece_bytes", [0, 1, 7, 64, 100_000])
async def test_stream_is_byte_for_byte_the_engines_however_it_is_cut(start_proxy: StartProxy, piece_bytes: int) -> None:
    proxy = await start(start_proxy)
    [engine] = typed(proxy)
    engine.piece_bytes = piece_bytes
    body = message(stream=True)
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        direct = await client.post(f"{engine.url}/v1/messages", json=body)
    relayed = await proxy.client.post("/v1/messages?beta=true", json=body)
    assert relayed.content == direct.content == STREAM
    assert relayed.headers["content-type"] == direct.headers["content-type"]
    assert engine.raw_bodies[0] == engine.raw_bodies[1]
    [row] = await proxy.rows()
    assert (row["outcome"], row["prompt_tokens"], row["actual_cached_tokens"]) == ("ok", 90, 64)
    assert (row["completion_tokens"], row["endpoint"], row["stream"]) == (4, "/v1/messages", True)


async def test_whole_message_is_the_engines_and_is_learned_from(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    answer = await proxy.client.post("/v1/messages", json=message())
    assert answer.json() == WHOLE_MESSAGE
    assert answer.headers["x-warmroute-instance"] == "inst-0"
    [row] = await proxy.rows()
    assert (row["prompt_tokens"], row["actual_cached_tokens"], row["completion_tokens"]) == (90, 64, 4)


async def test_the_requests_id_is_in_the_header_that_anthropics_clients_read(start_proxy: StartProxy) -> None:
    engine = PassingEngine(answer_headers={"request-id": "of-the-engine"})
    proxy, headers = await start_proxy(engines=[engine], limits={"max_attempts": 1}), {"x-request-id": "mine"}
    for path, mode, status in itertools.product(
        ("/v1/messages", "/v1/messages/count_tokens"), ("ok", "error"), (200, 400)
    ):
        engine.mode = mode
        body = message() if status == 200 else {"messages": "none"}
        answer = await proxy.client.post(path, json=body, headers=headers)
        assert answer.status_code == (502 if (mode, status) == ("error", 200) else status), (path, answer.text)
        assert answer.headers.get_list("request-id") == answer.headers.get_list("x-request-id") == ["mine"], path
    engine.mode = "ok"
    answer = await proxy.client.post("/v1/embeddings", json={"model": "stub"}, headers=headers)
    assert (answer.headers["x-request-id"], "request-id" in answer.headers) == ("mine", False)


async def test_a_streamed_message_has_the_id_as_well(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    answer = await proxy.client.post("/v1/messages", json=message(stream=True))
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_the_next_turn_follows_the_cache(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 4)
    said = [{"role": "user", "content": "x" * 5000}]
    first = await proxy.client.post("/v1/messages", json=message(messages=said))
    said += [{"role": "assistant", "content": "y"}, {"role": "user", "content": "z" * 3000}]
    second = await proxy.client.post("/v1/messages", json=message(messages=said))
    assert second.headers["x-warmroute-instance"] == first.headers["x-warmroute-instance"]
    assert int(second.headers["x-warmroute-predicted-cached-tokens"]) > 0


async def test_an_engine_that_fails_before_the_first_byte_is_replaced(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 2)
    typed(proxy)[0].mode = typed(proxy)[1].mode = "error"
    failed = await proxy.client.post("/v1/messages", json=message())
    assert failed.status_code == 502
    assert set(failed.json()) == {"type", "error"}
    assert failed.json()["error"]["type"] == "api_error"
    typed(proxy)[1].mode = "ok"
    answer = await proxy.client.post("/v1/messages", json=message(stream=True))
    assert answer.content == STREAM


TOO_LONG = "This model's maximum context length is 65536 tokens. However, " + "you requested more. " * 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_what_vllm_refuses_with_500_is_passed_on_and_no_failure(
    start_proxy: StartProxy, path: str, stream: bool
) -> None:
    """vLLM 0.18 answers so if a prompt is too long: retries of one client would open every breaker."""
    proxy = await start(start_proxy, 2)
    for engine in typed(proxy):
        engine.caught = TOO_LONG
    for _ in range(5):
        answer = await proxy.client.post(path, json=message(stream=stream))
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, TOO_LONG)
    assert sum(len(engine.seen) for engine in proxy.engines) == 5
    assert {row["outcome"] for row in await proxy.rows()} == {"engine_refused"}
    rows = (await proxy.client.get("/instances")).json()["instances"]
    assert [(row["breaker"]["state"], row["breaker"]["failures_in_a_row"]) for row in rows] == [("closed", 0)] * 2


@pytest.mark.parametrize("caught", ["EngineCore encountered an issue. See stack trace.", "Internal server error"])
async def test_an_engine_that_reports_its_own_failure_is_replaced(start_proxy: StartProxy, caught: str) -> None:
    proxy = await start(start_proxy, 2)
    broken = typed(proxy)[0]
    broken.caught = caught
    answers = [await proxy.client.post("/v1/messages", json=message(system=str(number))) for number in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert broken.seen


async def test_a_broken_stream_ends_with_anthropics_error_event(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    typed(proxy)[0].mode = "break_stream"
    answer = await proxy.client.post("/v1/messages", json=message(stream=True))
    assert answer.content.startswith(b"".join(MESSAGE[:2]))
    last = answer.text.rstrip().rpartition("\n\n")[2]
    assert last.startswith("event: error\ndata: ")
    error = json.loads(last.partition("data: ")[2])
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert "broke off" in error["error"]["message"]
    [row] = await proxy.rows()
    assert row["outcome"] == "stream_broken"


async def test_hit_rates_leave_out_engines_that_report_no_cached_tokens(start_proxy: StartProxy) -> None:
    """vLLM 0.18 reports none for messages: their prompts must not count as missed."""
    proxy = await start(start_proxy)
    typed(proxy)[0].mode = "no_cache_counts"
    await proxy.client.post("/v1/messages", json=message(stream=True))
    typed(proxy)[0].mode = "ok"
    await proxy.client.post("/v1/messages", json=message(stream=True))
    lines = set((await proxy.client.get("/metrics")).text.splitlines())
    assert {
        'warmroute_prompt_tokens_total{instance="inst-0"} 180.0',
        'warmroute_reported_prompt_tokens_total{instance="inst-0"} 90.0',
        'warmroute_cached_tokens_total{instance="inst-0",kind="actual"} 64.0',
    } <= lines


async def test_an_error_event_of_the_engine_is_relayed_and_recorded(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    typed(proxy)[0].mode = "report_error"
    answer = await proxy.client.post("/v1/messages", json=message(stream=True))
    assert answer.content == b"".join((*MESSAGE[:2], error_event("internal_error")))
    [row] = await proxy.rows()
    assert (row["outcome"], row["error"]) == ("stream_broken", "reported an error: as reported")


async def test_a_stream_without_its_last_event_is_reported_as_truncated(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    typed(proxy)[0].mode = "truncate_stream"
    answer = await proxy.client.post("/v1/messages", json=message(stream=True))
    assert b"event: error\n" in answer.content
    [row] = await proxy.rows()
    assert (row["outcome"], row["error"]) == ("stream_broken", "ended its stream without its last event")


async def test_a_connection_lost_after_the_last_event_is_no_failure(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    typed(proxy)[0].mode = "break_after_end"
    answer = await proxy.client.post("/v1/messages", json=message(stream=True))
    assert answer.content == STREAM
    [row] = await proxy.rows()
    assert row["outcome"] == "ok"


async def test_a_client_that_leaves_aborts_the_request(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    [engine] = typed(proxy)
    engine.mode = "stall_stream"
    async with proxy.client.stream("POST", "/v1/messages", json=message(stream=True)) as answer:
        async for _ in answer.aiter_bytes():
            break
    await proxy.until(lambda: engine.aborted == 1)
    assert ledger_is_zero(await proxy.settled())
    [row] = await proxy.rows()
    assert row["outcome"] == "client_gone"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (b'{"model":"stub","max_tokens":1}', 400, "invalid_request_error"),
        (b'{"model":"other","max_tokens":1,"messages":[{"role":"user","content":"x"}]}', 404, "not_found_error"),
    ],
)
async def test_errors_of_the_proxy_have_anthropics_shape(
    start_proxy: StartProxy, body: bytes, status: int, kind: str
) -> None:
    proxy = await start(start_proxy)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = await proxy.client.post(path, content=body)
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
        assert set(answer.json()["error"]) == {"type", "message"}
        assert answer.json()["error"]["type"] == kind
    assert typed(proxy)[0].paths == []


async def test_the_key_may_be_sent_as_anthropics_clients_send_it(start_proxy: StartProxy) -> None:
    keys = {"client": [{"name": "me", "sha256": hashlib.sha256(b"wr-secret").hexdigest()}]}
    proxy = await start(start_proxy, keys=keys)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = await proxy.client.post(path, json=message(), headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert (await proxy.client.post(path, json=message())).status_code == 401
        answer = await proxy.client.post(path, json=message(), headers={"x-api-key": "wr-secret"})
        assert answer.status_code == 200
    assert all("x-api-key" not in headers for headers in typed(proxy)[0].seen_headers)


async def test_tokens_are_counted_by_the_least_loaded_instance(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 2)
    first, second = typed(proxy)
    first.mode = "stall_stream"
    async with proxy.client.stream("POST", "/v1/messages", json=message(stream=True)) as held:
        busy = held.headers["x-warmroute-instance"]
        idle = second if busy == "inst-0" else first
        answer = await proxy.client.post("/v1/messages/count_tokens", json=message())
        assert answer.json() == {"input_tokens": 90, "port": idle.port}
    idle.mode = "error"
    first.mode = "ok" if idle is second else first.mode
    second.mode = "ok" if idle is first else second.mode
    retried = await proxy.client.post("/v1/messages/count_tokens", json=message())
    assert retried.status_code == 200
    assert retried.json()["port"] != idle.port
    await proxy.settled()


async def test_a_model_that_only_one_engine_serves_is_counted_there(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[TypedEngine(), TypedEngine(model="other")])
    answer = await proxy.client.post("/v1/messages/count_tokens", json=message(model="other"))
    assert answer.headers["x-warmroute-instance"] == "inst-1"


async def test_hand_offs_and_resumption_are_left_out(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 2, role="kv_both", offload={"planner": "threshold"}, resume={"enabled": "always"})
    for engine in typed(proxy):
        engine.mode = "break_stream"
    answer = await proxy.client.post("/v1/messages", json=message(stream=True, temperature=0))
    assert b"event: error\n" in answer.content
    [row] = await proxy.rows()
    assert (row["offload_reason"], row["resume"]) == ("request_shape", "shape")
    assert json.loads(typed(proxy)[int(row["instance"][-1])].raw_bodies[0]) == message(stream=True, temperature=0)


async def test_a_message_is_explained_as_one(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 2)
    served = await proxy.client.post("/v1/messages", json=message())
    explained = await proxy.client.post("/explain", params={"endpoint": "/v1/messages"}, json=message())
    assert explained.json()["request"]["endpoint"] == "/v1/messages"
    [decision] = [each for name, each in explained.json()["decisions"].items() if name == "warm"]
    assert decision["instance"] == served.headers["x-warmroute-instance"]
    assert decision["predicted_cached_tokens"] > 0


async def test_a_head_that_is_too_large_is_refused_in_the_shape_of_its_api(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, limits={"header_bytes": 4096})
    large = {"x-large": "y" * 5000}
    answer = await proxy.client.post("/v1/messages?beta=true", json=message(), headers=large)
    assert (answer.status_code, answer.json()["type"]) == (431, "error")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    other = await proxy.client.post("/v1/chat/completions", json=message(), headers=large)
    assert (other.status_code, other.json()["error"]["code"]) == (431, "headers_too_large")
