"""The ``anthropic`` library against the proxy; the features are the rows of docs/clients.md."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.proxy.conftest import StartProxy
from tests.proxy.typed_engine import TypedEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

anthropic: Any
"""Imported with the first test: it takes two seconds, in each process that collects this file."""

MODEL = "warm-sim"
SYSTEM: Any = [{"type": "text", "text": "be brief " * 100, "cache_control": {"type": "ephemeral"}}]
HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "read", "description": "Read a file", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    global anthropic
    anthropic = pytest.importorskip("anthropic")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet_url: str) -> AsyncIterator[Any]:
    async with over(fleet_url) as client:
        yield client


def over(url: str, key: str = "unused") -> Any:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


async def test_messages(client: Any) -> None:
    answer = await client.messages.create(model=MODEL, max_tokens=6, system=SYSTEM, messages=HI)
    assert len(answer.content[0].text) == 24
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 6)


async def test_messages_streamed(client: Any) -> None:
    whole = await client.messages.create(model=MODEL, max_tokens=30, system=SYSTEM, messages=HI)
    async with client.messages.stream(model=MODEL, max_tokens=30, system=SYSTEM, messages=HI) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == 30
    assert final.stop_reason == "max_tokens"


async def test_messages_of_many_turns(client: Any) -> None:
    said: list[dict[str, Any]] = []
    before = 0
    for turn in range(5):
        marked = {"type": "text", "text": f"{turn} " + "look at this " * 600, "cache_control": {"type": "ephemeral"}}
        messages: Any = [*said, {"role": "user", "content": [marked]}]
        answer = await client.messages.create(model=MODEL, max_tokens=8, system=SYSTEM, messages=messages)
        usage = answer.usage
        assert usage.cache_read_input_tokens >= 0.8 * before
        before = usage.input_tokens + usage.cache_read_input_tokens
        said += [{"role": "user", "content": marked["text"]}, {"role": "assistant", "content": answer.content[0].text}]


async def test_count_tokens(client: Any) -> None:
    counted = await client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=HI)
    answer = await client.messages.create(model=MODEL, max_tokens=1, system=SYSTEM, messages=HI)
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


async def test_models(client: Any) -> None:
    [model] = [model async for model in client.models.list(limit=1)]
    assert model == await client.models.retrieve(MODEL)
    assert (model.type, model.id, model.display_name, model.lifecycle) == ("model", MODEL, MODEL, "active")
    assert model.created_at.year >= 2024
    assert model.max_input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("nope")


async def test_many_streams(client: Any) -> None:
    async def say(number: int) -> str:
        messages: Any = [{"role": "user", "content": f"{number} " * 200}]
        async with client.messages.stream(model=MODEL, max_tokens=20, messages=messages) as stream:
            return "".join([piece async for piece in stream.text_stream])

    said = await asyncio.gather(*(say(number) for number in range(64)))
    assert {len(each) for each in said} == {80}
    assert len(set(said)) > 60


async def test_without_asyncio(fleet_url: str) -> None:
    def ask() -> str:
        with (
            anthropic.Anthropic(base_url=fleet_url, api_key="unused", max_retries=0) as client,
            client.messages.stream(model=MODEL, max_tokens=6, messages=HI) as stream,
        ):
            return str(stream.get_final_text())

    assert len(await asyncio.to_thread(ask)) == 24


@pytest.mark.asyncio(loop_scope="function")
async def test_tools_pass_through(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[TypedEngine()])
    call = {"type": "tool_use", "id": "t", "name": "read", "input": {"path": "x"}}
    messages: Any = [
        *HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "text"}]},
    ]
    async with (
        over(proxy.url) as client,
        client.messages.stream(
            model="stub", max_tokens=8, messages=messages, tools=TOOLS, tool_choice={"type": "any"}
        ) as stream,
    ):
        final = await stream.get_final_message()
    assert final.content[0].text.startswith("w0 ")
    sent = proxy.engines[0].seen[0]
    assert (sent["tools"], sent["tool_choice"], sent["messages"]) == (TOOLS, {"type": "any"}, messages)


@pytest.mark.asyncio(loop_scope="function")
async def test_key(start_proxy: StartProxy) -> None:
    keys = {"client": [{"name": "me", "sha256": hashlib.sha256(b"wr-secret").hexdigest()}]}
    proxy = await start_proxy(engines=[TypedEngine()], keys=keys)
    async with over(proxy.url, "wr-secret") as client:
        assert (await client.messages.create(model="stub", max_tokens=8, messages=HI)).id
    async with over(proxy.url, "wr-wrong") as client:
        with pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
            await client.messages.create(model="stub", max_tokens=8, messages=HI)


@pytest.mark.asyncio(loop_scope="function")
async def test_errors(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[TypedEngine(mode="break_stream")])
    async with over(proxy.url) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(model="other", max_tokens=8, messages=HI)
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.create(model="stub", max_tokens=8, messages=[])
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            async with client.messages.stream(model="stub", max_tokens=8, messages=HI) as stream:
                await stream.get_final_message()
