"""The ``openai`` library against the proxy; the features are the rows of docs/clients.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.proxy.conftest import StartProxy
from tests.proxy.stub_engine import StubEngine
from tests.proxy.typed_engine import TypedEngine

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "warm-sim"
MESSAGES: Any = [{"role": "system", "content": "be brief " * 100}, {"role": "user", "content": "hi"}]
FUNCTION = {"name": "read", "description": "Read a file", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: Any = [{"type": "function", **FUNCTION}]


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Import it with the first test: it takes a second, in each process that collects this file."""
    global openai
    import openai


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fleet_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def over(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="once upon " * 50, max_tokens=6)
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


async def test_completions_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="a tale " * 50, max_tokens=9)
    stream = await client.completions.create(
        model=MODEL, prompt="a tale " * 50, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"


async def test_chat_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6)
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage is not None


async def test_several_choices(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["one " * 50, "two " * 50], n=3, max_tokens=4)
    assert [choice.index for choice in answer.choices] == list(range(6))
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, max_tokens=4, stream=True)
    said = {choice.index for chunk in [chunk async for chunk in stream] for choice in chunk.choices}
    assert said == {0, 1, 2}


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [len(each.top_logprobs) for each in logprobs.content or ()] == [2, 2, 2, 2]


async def test_embeddings(client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model=MODEL, input=["a text", "another"], dimensions=32)
    assert [len(each.embedding) for each in answer.data] == [32, 32]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")


async def test_refused_features(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format"):
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=4, response_format={"type": "json_object"}
        )
    with pytest.raises(openai.APIStatusError, match="does not implement") as refused:
        await client.images.generate(model=MODEL, prompt="a picture")
    assert refused.value.status_code == 501


async def test_responses(client: openai.AsyncOpenAI) -> None:
    instructions = "be brief " * 2_000  # so long that its cached prefix outweighs any difference in load
    answer = await client.responses.create(
        model=MODEL, instructions=instructions, input="hi", max_output_tokens=6, store=False
    )
    assert len(answer.output_text) == 24
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6
    again = await client.responses.create(
        model=MODEL, instructions=instructions, input="hi", max_output_tokens=6, store=False
    )
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert again.output_text == answer.output_text


async def test_responses_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model=MODEL, input="say more " * 90, max_output_tokens=30)
    async with client.responses.stream(model=MODEL, input="say more " * 90, max_output_tokens=30) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.status == whole.status == "incomplete"


async def test_responses_continued(client: openai.AsyncOpenAI) -> None:
    begun = [await client.responses.create(model=MODEL, input=f"{n} {'count ' * 99}") for n in range(6)]
    for first in begun:
        second = await client.responses.create(model=MODEL, input="go on", previous_response_id=first.id)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text
    with pytest.raises(openai.NotFoundError, match="no response with id"):
        await client.responses.create(model=MODEL, input="go on", previous_response_id="resp_unknown")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        await client.responses.cancel(begun[0].id)


async def test_many_streams(client: openai.AsyncOpenAI) -> None:
    async def chat(number: int) -> str:
        messages: Any = [{"role": "user", "content": f"{number} " * 200}]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def respond(number: int) -> str:
        stream = await client.responses.create(model=MODEL, input=f"{number} " * 200, max_output_tokens=20, stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    said = await asyncio.gather(*(chat(number) for number in range(64)), *(respond(number) for number in range(64)))
    assert {len(each) for each in said} == {80}
    assert len(set(said[:64])) > 60


async def test_without_asyncio(fleet_url: str) -> None:
    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{fleet_url}/v1", api_key="unused", max_retries=0) as client:
            chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6)
            with client.responses.stream(model=MODEL, input="hi " * 99, max_output_tokens=6) as stream:
                stream.until_done()
                return chat.choices[0].message.content, stream.get_final_response().output_text

    said, text = await asyncio.to_thread(ask)
    assert said
    assert len(text) == 24


@pytest.mark.asyncio(loop_scope="function")
async def test_chat_tools_pass_through(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[StubEngine()])
    async with over(proxy.url) as client:
        await client.chat.completions.create(
            model="stub", messages=MESSAGES, tools=CHAT_TOOLS, tool_choice="required", parallel_tool_calls=False
        )
    sent = proxy.engines[0].seen[0]
    assert (sent["tools"], sent["tool_choice"], sent["parallel_tool_calls"]) == (CHAT_TOOLS, "required", False)


@pytest.mark.asyncio(loop_scope="function")
async def test_responses_tools_pass_through(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[TypedEngine()])
    items: Any = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "text"},
    ]
    async with over(proxy.url) as client:
        stream = await client.responses.create(
            model="stub", input=items, tools=RESPONSE_TOOLS, tool_choice="required", stream=True
        )
        names = [event.type async for event in stream]
    assert names[-1] == "response.completed"
    sent = proxy.engines[0].seen[0]
    assert (sent["tools"], sent["tool_choice"], sent["input"]) == (RESPONSE_TOOLS, "required", items)


@pytest.mark.asyncio(loop_scope="function")
async def test_errors(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[TypedEngine(mode="break_stream")])
    async with over(proxy.url) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.responses.create(model="other", input="hi")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="stub")
        assert refused.value.param == "input"
        for create in (
            client.responses.create(model="stub", input="hi", stream=True),
            client.chat.completions.create(model="stub", messages=MESSAGES, stream=True),
        ):
            stream: Any = await create
            with pytest.raises(openai.APIError, match="broke off"):
                async for _ in stream:
                    pass
