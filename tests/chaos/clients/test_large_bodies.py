"""Requests that would occupy the event loop, reach into engines or distort the estimates of others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.errors import RequestError
from proxy.request.parse import AT_ONCE_BYTES, Endpoint
from proxy.request.usage import usage_of_answer, with_cached_tokens
from tests.chaos.conftest import BODY, CHAT, Chaos, StartChaos
from tests.chaos.rig.client import RawClient, post
from tests.chaos.rig.engine import ChaosEngine, Talk
from tests.chaos.rig.wire import MODEL, good_body, usage, whole

MIB = 1024 * 1024
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 480_000}}
"""About 5 MB."""


def many(item: bytes, size: int) -> bytes:
    return b"[" + item * (size // len(item)) + item.rstrip(b",") + b"]"


def completion(prompt: bytes) -> bytes:
    return b'{"model":"stub","prompt":' + prompt + b"}"


@pytest.mark.parametrize("item", [b"[1],", b'"a",', b'"\\\\",', b"[],", b'["a"],'])
@pytest.mark.parametrize("size", [12_000, 2 * MIB, 6 * MIB])
async def test_more_prompts_than_allowed_are_refused(start_chaos: StartChaos, item: bytes, size: int) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port, limit=2**20) as client:
        await client.send(post(completion(many(item, size))))
        got = await client.answer(within_s=30.0)
    assert got.status == 400
    assert "limits.prompts" in got.error["message"]
    assert proxy.engines[0].posts == []


async def test_the_number_of_prompts_is_a_setting(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), limits={"prompts": 2})
    for count, status in ((2, 200), (3, 400)):
        answer = await proxy.client.post("/v1/completions", json={**BODY, "prompt": ["a"] * count})
        assert answer.status_code == status


LARGE: dict[str, Callable[[int], tuple[Endpoint, bytes]]] = {
    "text": lambda size: (Endpoint.COMPLETIONS, completion(b'"' + b"word " * (size // 5) + b'"')),
    "escapes": lambda size: (Endpoint.COMPLETIONS, completion(b'"' + b"\\n" * (size // 2) + b'"')),
    "ids": lambda size: (Endpoint.COMPLETIONS, completion(many(b"12345,", size))),
    "short ids": lambda size: (Endpoint.COMPLETIONS, completion(many(b"7,", size))),
    "several prompts": lambda size: (Endpoint.COMPLETIONS, completion(many(b"[" + b"1," * 50_000 + b"1],", size))),
    "messages": lambda size: (Endpoint.CHAT, b'{"model":"stub","messages":' + many(b'{"role":"user"},', size) + b"}"),
    "tools": lambda size: (
        Endpoint.CHAT,
        b'{"model":"stub","messages":[{"role":"user"}],"tools":' + many(b'{"a":[1]},', size) + b"}",
    ),
    "items": lambda size: (Endpoint.RESPONSES, b'{"model":"stub","input":' + many(b'{"role":"user"},', size) + b"}"),
    "cache marks": lambda size: (
        Endpoint.MESSAGES,
        b'{"model":"stub","messages":' + many(b'{"cache_control":{}},', size) + b"}",
    ),
    "system prompt": lambda size: (
        Endpoint.MESSAGES,
        b'{"model":"stub","messages":[{}],"system":' + many(b'{"text":"x-anthropic-billing-header"},', size) + b"}",
    ),
    "another field": lambda size: (
        Endpoint.COMPLETIONS,
        b'{"model":"stub","prompt":"x","metadata":' + many(b"{},", size) + b"}",
    ),
}


@pytest.mark.parametrize("shape", LARGE)
async def test_the_event_loop_serves_others_while_a_large_body_is_parsed(start_chaos: StartChaos, shape: str) -> None:
    proxy = await start_chaos(ChaosEngine())
    endpoint, body = LARGE[shape](8 * MIB)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    try:
        parsed = await proxy.core.router.parse_fairly(endpoint, body)
    finally:
        beside.cancel()
    assert parsed.body is body
    assert turns >= 8 * MIB / AT_ONCE_BYTES, "more than AT_ONCE_BYTES in one turn"
    assert turns >= proxy.core.router.large_bodies.steps


@pytest.mark.parametrize("shape", LARGE)
async def test_a_large_body_is_parsed_as_a_small_one_of_its_shape(start_chaos: StartChaos, shape: str) -> None:
    router = (await start_chaos(ChaosEngine())).core.router
    found = []
    for size in (AT_ONCE_BYTES // 2, 3 * MIB):
        endpoint, body = LARGE[shape](size)
        parsed = await router.parse_fairly(endpoint, body)
        assert parsed.prompt == router.parse(endpoint, body).prompt
        found.append(parsed.prompt)
    small, large = found
    assert large.hashes[: len(small.hashes)] == small.hashes or shape in {"tools", "system prompt"}
    assert (large.tokens > 0) == (small.tokens > 0)
    if small.tokens and shape != "several prompts":
        assert large.tokens == pytest.approx(small.tokens * 3 * MIB / (AT_ONCE_BYTES // 2), rel=0.01)


async def test_ids_beyond_the_hashed_blocks_are_counted(start_chaos: StartChaos) -> None:
    router = (await start_chaos(ChaosEngine())).core.router
    for size in (3 * MIB, 3 * MIB + 2):
        parsed = await router.parse_fairly(Endpoint.COMPLETIONS, completion(many(b"7,", size)))
        assert parsed.prompt.tokens == size // 2 + 1
    assert len(parsed.prompt.hashes) < 70_000


async def test_a_large_body_reaches_the_engine_unchanged(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    body = json.dumps({**BODY, "prompt": [number % 50_000 for number in range(700_000)]}).encode()
    answer = await proxy.client.post("/v1/completions", content=body)
    assert answer.status_code == 200
    assert proxy.engines[0].posts[0].body == body
    assert (await proxy.rows())[0]["stages_ms"]["parse"] > 0
    await proxy.nothing_left()


async def test_a_client_that_leaves_while_its_large_body_is_parsed_leaves_nothing_behind(
    start_chaos: StartChaos,
) -> None:
    proxy = await start_chaos(ChaosEngine())
    lane = proxy.core.router.large_bodies
    async with RawClient(proxy.port) as client:
        await client.send(post(LARGE["ids"](4 * MIB)[1]))
        await proxy.until(lambda: lane.steps > 0)
        client.reset()
    await proxy.until(lambda: proxy.core.breakdown.finished == 1)
    assert (await proxy.rows())[0]["outcome"] in {"client_gone", "ok"}
    await proxy.nothing_left()


async def test_an_invalid_large_body_is_refused(start_chaos: StartChaos) -> None:
    router = (await start_chaos(ChaosEngine())).core.router
    for broken in (b'{"model":"stub","prompt":"' + b"x" * 3 * MIB, b"[" * 3 * MIB, completion(many(b"1.5,", 3 * MIB))):
        with pytest.raises(RequestError) as caught:
            await router.parse_fairly(Endpoint.COMPLETIONS, broken)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"vllm_xargs": {"ngram_size": 3}},
        {"ec_transfer_params": {"a": 1}},
        {"prompt_embeds": "AAAA"},
        {"priority": -100},
        {"request_id": "another's"},
    ],
    ids=str,
)
async def test_a_field_that_reaches_into_the_engine_is_refused(start_chaos: StartChaos, fields: dict[str, Any]) -> None:
    proxy = await start_chaos(ChaosEngine())
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        answer = await proxy.client.post(path, json={**body, **fields})
        assert answer.status_code == 400
        assert "fields.allow" in answer.json()["error"]["message"]
    assert proxy.engines[0].posts == []
    assert {row["outcome"] for row in await proxy.rows()} == {"rejected"}


async def test_an_operator_can_allow_a_field_but_not_the_transfer_parameters(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), fields={"allow": ["vllm_xargs", "priority"]})
    for fields, status in (
        ({"vllm_xargs": {"ngram_size": 3}, "priority": 5}, 200),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, 400),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 400),
    ):
        assert (await proxy.client.post("/v1/completions", json={**BODY, **fields})).status_code == status


async def counts_text(talk: Talk) -> None:
    """Answers with 1,300 tokens for an image and one for 4 bytes of text."""
    fields = talk.request.fields
    parts = [part for message in fields["messages"] for part in message["content"]]
    text = sum(len(part["text"]) for part in parts if part["type"] == "text")
    images = sum(part["type"] == "image_url" for part in parts)
    await talk.send(whole("200 OK", good_body(usage=usage(text // 4 + 1_300 * images))))


def chat(*parts: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6}


async def class_of(proxy: Chaos, body: dict[str, Any]) -> str:
    answer = await proxy.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    return answer.headers["x-warmroute-class"]


async def test_images_do_not_change_the_class_of_texts(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(fault=counts_text))
    for number in range(3):
        assert await class_of(proxy, chat({"type": "text", "text": f"{number} what is this?"}, IMAGE)) == "WARM"
    text = {"type": "text", "text": "some words, " * 10_000 + "x" * 32}  # 30,008 tokens
    assert await class_of(proxy, chat(text)) == "HEAVY"
    assert await class_of(proxy, chat(IMAGE, {**text, "text": "other " * 20_000})) == "HEAVY"


@pytest.mark.parametrize("tokens", [-30_008, 0, True, 1, 10**12, 1.5, "7", None])
async def test_a_wrong_usage_changes_no_estimate(start_chaos: StartChaos, tokens: Any) -> None:
    async def misreports(talk: Talk) -> None:
        counts = {
            "prompt_tokens": tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": tokens},
        }
        await talk.send(whole("200 OK", good_body(usage=counts)))

    proxy = await start_chaos(ChaosEngine(fault=misreports))
    body = {**BODY, "prompt": "some words, " * 2_000}
    for _ in range(30):
        assert (await proxy.client.post("/v1/completions", json=body)).status_code == 200
    assert set((await proxy.client.get("/stats")).json()["bytes_per_token"].values()) == {4.0}
    assert all((row["prompt_tokens"] or 0) >= 0 for row in await proxy.rows())
    await proxy.nothing_left()


@pytest.mark.parametrize("padding", [0, 2 * MIB])
def test_the_usage_of_a_large_answer_is_read_and_corrected_without_decoding_it(padding: int) -> None:
    counts = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    texts = ['say "usage": {"prompt_tokens": 5}', "y" * padding]
    answer = json.dumps({"choices": texts, "usage": counts, "kv_transfer_params": None}).encode()
    found = usage_of_answer(answer)
    assert found is not None
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (9, 2, 8)
    corrected = json.loads(with_cached_tokens(answer, 3))
    assert corrected["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert corrected["choices"] == texts
