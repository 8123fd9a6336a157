"""Common clients work unchanged: curl, the openai package, and vLLM's benchmark client."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

import aiohttp
import pytest

from tests.integration.conftest import StartCluster

SCALE = ("--engine-speed", "50")


async def curl(*arguments: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed on this machine")
    process = await asyncio.create_subprocess_exec(
        "curl",
        "--silent",
        "--show-error",
        "--max-time",
        "30",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_curl_streamed_and_not(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(2, *SCALE)
    body = {"model": "warm-sim", "prompt": "hello " * 200, "max_tokens": 8}
    url = f"{cluster.url}/v1/completions"
    whole = json.loads(await curl(url, "--header", "content-type: application/json", "--data", json.dumps(body)))
    assert whole["usage"]["completion_tokens"] == 8
    streamed = await curl("--no-buffer", url, "--data", json.dumps({**body, "stream": True}))
    events = [event for event in streamed.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1])
    assert text == whole["choices"][0]["text"]


async def test_openai_client_completions_chat_stream_models_and_errors(start_cluster: StartCluster) -> None:
    import openai  # takes a second, in each process that collects this file

    cluster = await start_cluster(2, *SCALE)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id for model in (await client.models.list()).data] == ["warm-sim"]
        whole = await client.completions.create(model="warm-sim", prompt="once upon " * 50, max_tokens=6)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        ids = await client.completions.create(model="warm-sim", prompt=list(range(300)), max_tokens=6)
        assert ids.usage is not None
        assert ids.usage.prompt_tokens == 300
        messages: Any = [{"role": "system", "content": "be brief " * 100}, {"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(model="warm-sim", messages=messages, max_tokens=6)
        assert chat.choices[0].message.content
        stream = await client.chat.completions.create(
            model="warm-sim", messages=messages, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 6
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == chat.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="available: warm-sim"):
            await client.completions.create(model="gpt-nope", prompt="x")


async def test_vllm_bench_serve_style_client(start_cluster: StartCluster) -> None:
    """Request and parsing of ``vllm bench serve --backend openai``: its fields, its chunk handling."""
    cluster = await start_cluster(2, *SCALE)
    payload = {
        "model": "warm-sim",
        "prompt": "benchmark " * 300,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    headers = {"Authorization": "Bearer unused"}
    text, usage, done = "", None, False
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.post(f"{cluster.url}/v1/completions", json=payload, headers=headers) as response,
    ):
        assert response.status == 200
        async for piece in response.content.iter_any():
            for line in piece.decode().split("\n\n"):
                message = line.removeprefix("data: ").strip()
                if not message:
                    continue
                if message == "[DONE]":
                    done = True
                    continue
                data = json.loads(message)
                if data["choices"]:
                    text += data["choices"][0]["text"]
                elif data.get("usage"):
                    usage = data["usage"]
    assert done
    assert text
    assert usage is not None
    assert usage["completion_tokens"] == 12
