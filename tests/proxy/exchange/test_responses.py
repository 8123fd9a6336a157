"""OpenAI's Responses API through the proxy: streams, usage, and the engine that stored a response."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from policies.state import Commitment
from proxy.console.account import account_of
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.typed_engine import TypedEngine, response, response_events


def request(**more: Any) -> dict[str, Any]:
    return {"model": "stub", "input": "hello " * 300, "max_output_tokens": 8, **more}


async def start(start_proxy: StartProxy, count: int = 4, **settings: Any) -> Running:
    settings = {"policy": {"name": "round_robin"}, **settings}
    return await start_proxy(engines=[TypedEngine() for _ in range(count)], **settings)


def typed(proxy: Running) -> list[TypedEngine]:
    return [engine for engine in proxy.engines if isinstance(engine, TypedEngine)]


async def create(proxy: Running, **more: Any) -> tuple[str, str]:
    """Id of a new response, and the instance that answered."""
    answer = await proxy.client.post("/v1/responses", json=request(**more))
    assert answer.status_code == 200, answer.text
    return answer.json()["id"], answer.headers["x-warmroute-instance"]


@pytest.mark.parametrize("empty", ["", []])
async def test_empty_input_is_left_to_the_engine(start_proxy: StartProxy, empty: Any) -> None:
    proxy = await start(start_proxy, 1)
    response_id, _ = await create(proxy)
    for more in ({"instructions": "say hello"}, {"previous_response_id": response_id}):
        assert (await proxy.client.post("/v1/responses", json=request(input=empty, **more))).status_code == 200
    assert [body["input"] for body in typed(proxy)[0].seen[1:]] == [empty, empty]


@pytest.mark.parametrize("piece_bytes", [0, 1, 64, 100_000])
async def test_stream_is_byte_for_byte_the_engines_however_it_is_cut(start_proxy: StartProxy, piece_bytes: int) -> None:
    proxy = await start(start_proxy, 1)
    [engine] = typed(proxy)
    engine.piece_bytes = piece_bytes
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        direct = await client.post(f"{engine.url}/v1/responses", json=request(stream=True))
    relayed = await proxy.client.post("/v1/responses", json=request(stream=True))
    assert direct.content == b"".join(response_events(f"resp_{engine.port}_1"))
    assert relayed.content == b"".join(response_events(f"resp_{engine.port}_2"))
    assert engine.raw_bodies[0] == engine.raw_bodies[1]
    [row] = await proxy.rows()
    assert (row["outcome"], row["prompt_tokens"], row["actual_cached_tokens"]) == ("ok", 90, 64)
    assert (row["completion_tokens"], row["endpoint"]) == (4, "/v1/responses")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_follow_up_goes_to_the_engine_of_four_that_stored_the_response(
    start_proxy: StartProxy, stream: bool
) -> None:
    proxy = await start(start_proxy)
    begun = [await create(proxy) for _ in range(4)]
    assert len({instance for _, instance in begun}) == 4
    for response_id, instance in [*begun, *reversed(begun)]:
        body = request(previous_response_id=response_id, stream=stream)
        answer = await proxy.client.post("/v1/responses", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-warmroute-instance"] == instance
        assert int(answer.headers["x-warmroute-predicted-cached-tokens"]) > 0


@pytest.mark.parametrize(("path", "last"), [("/v1/responses", "response.completed"), ("/v1/messages", "message_stop")])
async def test_a_client_that_leaves_at_the_last_event_has_its_answer(
    start_proxy: StartProxy, path: str, last: str
) -> None:
    proxy = await start(start_proxy, 1)
    [engine] = typed(proxy)
    engine.mode = "stall_after_end"
    body = request(stream=True, max_tokens=8, messages=[{"role": "user", "content": "hello"}])
    async with proxy.client.stream("POST", path, json=body) as held:
        async for line in held.aiter_lines():
            if line == f"event: {last}":
                break
    assert ledger_is_zero(await proxy.settled())
    [row] = await proxy.rows()
    assert (row["outcome"], row["completion_tokens"], row["actual_cached_tokens"]) == ("ok", 4, 64)


async def test_the_id_of_a_stream_is_known_before_the_stream_ends(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    for engine in typed(proxy):
        engine.mode = "stall_stream"
    async with proxy.client.stream("POST", "/v1/responses", json=request(stream=True)) as held:
        instance = held.headers["x-warmroute-instance"]
        engine = typed(proxy)[int(instance[-1])]
        answer = await proxy.client.post(f"/v1/responses/resp_{engine.port}_1/cancel")
        assert answer.status_code == 200
        assert answer.headers["x-warmroute-instance"] == instance
    await proxy.until(lambda: engine.aborted == 1)
    assert ledger_is_zero(await proxy.settled())


async def test_a_stored_response_is_read_and_cancelled_where_it_is(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    begun = [await create(proxy) for _ in range(4)]
    for response_id, instance in reversed(begun):
        read = await proxy.client.get(f"/v1/responses/{response_id}")
        assert (read.status_code, read.json()) == (200, response(response_id, "completed"))
        streamed = await proxy.client.get(f"/v1/responses/{response_id}?stream=true&starting_after=1")
        assert streamed.content == b"".join(response_events(response_id))
        cancelled = await proxy.client.post(f"/v1/responses/{response_id}/cancel")
        assert cancelled.status_code == 200
        engine = typed(proxy)[int(instance[-1])]
        assert engine.paths[-3:] == [
            f"GET /v1/responses/{response_id}",
            f"GET /v1/responses/{response_id}?stream=true&starting_after=1",
            f"POST /v1/responses/{response_id}/cancel",
        ]
        assert {each.headers["x-warmroute-instance"] for each in (read, streamed, cancelled)} == {instance}
    rows = await proxy.rows()
    assert {row["endpoint"] for row in rows} == {
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
    }
    passed_on = rows[4:]
    assert [row["instance"] for row in passed_on] == [instance for _, instance in reversed(begun) for _ in range(3)]
    for row in passed_on:
        [where] = [each.sentences for each in account_of(row).parts if each.subject == "instance"]
        assert where[0].endswith("to the instance that has the stored response.")
    assert ledger_is_zero(await proxy.settled())


async def test_a_stored_response_that_the_engine_cannot_stream_is_refused(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 1)
    [engine] = typed(proxy)
    response_id, _ = await create(proxy)
    engine.mode = "no_events"
    for _ in range(4):
        answer = await proxy.client.get(f"/v1/responses/{response_id}?stream=true")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "response_not_streamed", "stream")
        assert "created with 'background' and 'stream'" in error["message"]
    assert {row["outcome"] for row in (await proxy.rows())[1:]} == {"engine_refused"}
    assert (await proxy.client.get(f"/v1/responses/{response_id}")).status_code == 200
    engine.mode = "dying"
    answer = await proxy.client.get(f"/v1/responses/{response_id}?stream=true")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")


async def test_an_unknown_id_is_refused_without_an_engine(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 2)
    not_stored, _ = await create(proxy, store=False)
    for response_id in ("resp_made_up", not_stored):
        follow_up = await proxy.client.post("/v1/responses", json=request(previous_response_id=response_id))
        read = await proxy.client.get(f"/v1/responses/{response_id}")
        cancelled = await proxy.client.post(f"/v1/responses/{response_id}/cancel")
        for answer, param in ((follow_up, "previous_response_id"), (read, "response_id"), (cancelled, "response_id")):
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("response_not_found", param)
            assert response_id in error["message"]
    assert sum(len(engine.paths) for engine in typed(proxy)) == 1


async def test_a_follow_up_with_a_model_of_another_engine_is_refused_as_such(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[TypedEngine(model="alpha"), TypedEngine(model="beta")])
    response_id, _ = await create(proxy, model="alpha")
    answer = await proxy.client.post("/v1/responses", json=request(model="beta", previous_response_id=response_id))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "response_of_other_model", "model")
    assert "continue it with a model of that engine (alpha), or send the whole conversation" in error["message"]
    assert (await proxy.rows())[-1]["outcome"] == "rejected"
    assert len(typed(proxy)[1].seen) == 0
    await create(proxy, model="alpha", previous_response_id=response_id)
    assert ledger_is_zero(await proxy.settled())


async def test_a_response_is_lost_with_its_engine(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 2)
    response_id, instance = await create(proxy)
    engine = typed(proxy)[int(instance[-1])]
    await engine.stop()
    await proxy.until(lambda: not proxy.core.instances[instance].healthy)
    down = await proxy.client.post("/v1/responses", json=request(previous_response_id=response_id))
    assert (down.status_code, down.json()["error"]["code"]) == (503, "response_unavailable")
    assert down.headers["retry-after"]
    await engine.restart()
    await proxy.until(lambda: proxy.core.instances[instance].healthy and proxy.core.instances[instance].restarts > 0)
    lost = await proxy.client.post("/v1/responses", json=request(previous_response_id=response_id))
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "response_lost")
    assert (await proxy.client.post("/v1/responses", json=request())).status_code == 200


async def test_a_failing_engine_is_not_replaced_for_what_it_stored(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 2)
    response_id, instance = await create(proxy)
    typed(proxy)[int(instance[-1])].mode = "error"
    answer = await proxy.client.post("/v1/responses", json=request(previous_response_id=response_id))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
    row = (await proxy.rows())[-1]
    assert [attempt["instance"] for attempt in row["attempts"]] == [instance]


async def test_a_follow_up_waits_for_its_engine_and_does_not_block_others(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 2, limits={"max_in_flight_per_instance": 1, "queue_timeout_s": 0.3})
    response_id, instance = await create(proxy)
    engine = typed(proxy)[int(instance[-1])]
    engine.mode = "stall_stream"
    async with proxy.client.stream(
        "POST", "/v1/responses", json=request(previous_response_id=response_id, stream=True)
    ) as held:
        assert held.headers["x-warmroute-instance"] == instance
        late = await proxy.client.post("/v1/responses", json=request(previous_response_id=response_id))
        assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
        other = await proxy.client.post("/v1/responses", json=request())
        assert other.headers["x-warmroute-instance"] != instance
    assert ledger_is_zero(await proxy.settled())


async def test_a_broken_stream_ends_with_an_error_event_that_openais_libraries_raise(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 1)
    typed(proxy)[0].mode = "break_stream"
    answer = await proxy.client.post("/v1/responses", json=request(stream=True))
    last = answer.text.rstrip().rpartition("\n\n")[2]
    assert last.startswith("event: error\ndata: ")
    error = json.loads(last.partition("data: ")[2])
    assert (error["type"], error["code"], error["sequence_number"]) == ("error", "stream_broken", 3)
    assert error["error"]["message"] == error["message"]


async def test_a_stream_without_its_last_event_is_reported_as_truncated(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 1)
    typed(proxy)[0].mode = "truncate_stream"
    answer = await proxy.client.post("/v1/responses", json=request(stream=True))
    assert b"event: error\n" in answer.content
    assert (await proxy.rows())[-1]["outcome"] == "stream_broken"


async def test_an_engine_that_fails_before_the_first_byte_is_replaced(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 2)
    typed(proxy)[0].mode = "reset"
    for _ in range(2):
        answer = await proxy.client.post("/v1/responses", json=request(stream=True))
        assert answer.headers["x-warmroute-instance"] == "inst-1"
        assert answer.content.endswith(response_events("x")[-1][-4:])


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "says"),
    [
        ("POST", "/v1/responses/compact", 404, "unknown_path", "vLLM does not have /compact"),
        ("POST", "/v1/responses/input_tokens", 404, "unknown_path", "vLLM does not have /input_tokens"),
        ("GET", "/v1/responses/resp_1/input_items", 404, "unknown_path", "vLLM does not have /input_items"),
        ("DELETE", "/v1/responses/resp_1", 405, "method_not_allowed", "cannot delete a stored response"),
    ],
)
async def test_what_vllm_lacks_of_the_api_is_refused_as_such(
    start_proxy: StartProxy, method: str, path: str, status: int, code: str, says: str
) -> None:
    proxy = await start(start_proxy, 1)
    answer = await proxy.client.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], set(error)) == (status, code, {"message", "type", "param", "code"})
    assert says in error["message"]
    assert "POST /v1/responses/ID/cancel" in error["message"]
    assert answer.headers.get("allow") == ("GET" if status == 405 else None)
    assert not typed(proxy)[0].paths


async def test_what_an_engine_has_beyond_vllm_is_passed_on_if_it_is_listed(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 1, pass_through={"paths": ["/v1/responses/compact"]})
    answer = await proxy.client.post("/v1/responses/compact", json=request())
    assert answer.headers["x-warmroute-instance"] == "inst-0"


async def test_stored_responses_that_continue_each_other_are_one_session(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    first, instance = await create(proxy)
    other, _ = await create(proxy)
    second, _ = await create(proxy, previous_response_id=first)
    _, third_on = await create(proxy, previous_response_id=second, stream=False)
    await create(proxy, previous_response_id=other)
    await create(proxy, previous_response_id=second, prompt_cache_key="named")
    rows = sorted(await proxy.rows(), key=lambda row: int(row["row"]))
    assert third_on == instance
    assert [(row["session_id"], row["session_source"]) for row in rows] == [
        (None, None),
        (None, None),
        (first, "body.previous_response_id"),
        (first, "body.previous_response_id"),
        (other, "body.previous_response_id"),
        ("named", "body.prompt_cache_key"),
    ]
    assert ledger_is_zero(await proxy.settled())


async def test_a_stream_that_opens_before_its_prefill_is_in_prefill_until_its_first_output(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start(start_proxy, 1)
    [engine] = typed(proxy)
    engine.computed = asyncio.Event()
    routing, learned = proxy.core.router.routing, list[float]()
    prefilled = routing.prefilled

    def note(commitment: Commitment, seconds: float) -> Any:
        learned.append(seconds)
        return prefilled(commitment, seconds)

    monkeypatch.setattr(routing, "prefilled", note)
    async with proxy.client.stream("POST", "/v1/responses", json=request(stream=True)) as answer:
        pieces = answer.aiter_raw()
        seen = b""
        while b"response.in_progress" not in seen:
            seen += await anext(pieces)
        load = routing.state.ledger.load("inst-0", time.monotonic())
        assert (load.requests, load.prefilling, learned) == (1, 1, [])
        assert load.pending_prefill_tokens > 0
        engine.computed.set()
        while b"response.output_text.delta" not in seen:
            seen += await anext(pieces)
        assert routing.state.ledger.load("inst-0", time.monotonic()).prefilling == 0
        async for piece in pieces:
            seen += piece
    assert ledger_is_zero(await proxy.settled())
    assert b"response.completed" in seen
    assert len(learned) == 1


async def test_a_response_that_breaks_off_before_its_first_output_leaves_nothing(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, 1)
    [engine] = typed(proxy)
    engine.computed = asyncio.Event()
    async with proxy.client.stream("POST", "/v1/responses", json=request(stream=True)) as answer:
        await anext(answer.aiter_raw())
    assert ledger_is_zero(await proxy.settled())
