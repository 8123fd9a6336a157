"""LiteLLM's proxy in front of ours; the features are the rows of docs/clients.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.clients.extra.rig import EXTRA, MODEL, Client, Recorded, check_traffic
from tests.integration.fleet import free_port

pytestmark = [*EXTRA, pytest.mark.asyncio(loop_scope="module")]

KEY = "sk-7d41c0a96be2f5381b"
SESSION = "7f3c2a10-5b1e-4c83-9d1f-0f5f7a1c9b21"
CONFIG = """
model_list:
  - model_name: {model}
    litellm_params: {{model: "hosted_vllm/{model}", api_base: "{url}/v1", api_key: unused}}
  - model_name: over-openai
    litellm_params: {{model: "openai/{model}", api_base: "{url}/v1", api_key: unused}}
  - model_name: over-anthropic
    litellm_params: {{model: "anthropic/{model}", api_base: "{url}", api_key: unused}}
general_settings:
  forward_client_headers_to_llm_api: true
"""


@pytest_asyncio.fixture(loop_scope="module")
async def litellm(client_of: Callable[[str], Client], fleet_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of LiteLLM's proxy, which sends its requests to ours."""
    client = client_of("litellm")
    client.variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    (client.work / "config.yaml").write_text(CONFIG.format(model=MODEL, url=fleet_url), encoding="utf-8")
    port, log = free_port(), client.folder / "litellm.log"
    listen = ("--host", "127.0.0.1", "--port", str(port), "--telemetry", "False")
    async with (
        client.running("bin/litellm", "--config", "config.yaml", *listen, log=log) as process,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False
        ) as caller,
    ):
        for _ in range(450):
            assert process.returncode is None, log.read_text(encoding="utf-8")
            try:
                if (await caller.get("/health/liveliness")).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.2)
        else:
            raise AssertionError(f"not up in 90 s: {log.read_text(encoding='utf-8')}")
        yield caller


async def answer(caller: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> str:
    sent = await caller.post(
        path, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    assert sent.status_code == 200, sent.text
    return sent.text


async def test_in_front(litellm: httpx.AsyncClient, recorded: Recorded) -> None:
    """One test, since LiteLLM's proxy takes ten seconds to start."""
    await recorded.skip()
    messages: list[dict[str, str]] = [{"role": "user", "content": "hi " * 400}]
    chat = {"model": MODEL, "max_tokens": 6, "messages": messages}
    whole = json.loads(await answer(litellm, "/v1/chat/completions", chat, x_litellm_session_id="headed"))
    text = whole["choices"][0]["message"]["content"]
    streamed = await answer(litellm, "/v1/chat/completions", {**chat, "stream": True}, x_litellm_session_id="headed")
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == text
    rows = await recorded.new(2)
    assert {(row["session_source"], row["session_id"]) for row in rows} == {("x-litellm-session-id", "headed")}
    assert [row["stream"] for row in rows] == [False, True]
    check_traffic("litellm_proxy", rows)

    # Fields of the body: those that LiteLLM knows stay with it, and it passes on those that it does not know.
    await answer(litellm, "/v1/chat/completions", {**chat, "metadata": {"session_id": "kept"}})
    await answer(litellm, "/v1/chat/completions", {**chat, "litellm_session_id": "kept"})
    await answer(litellm, "/v1/chat/completions", {**chat, "session_id": "passed"})
    rows = await recorded.new(3)
    assert [row["session_source"] for row in rows] == ["prefix", "prefix", "body.session_id"]
    check_traffic("litellm_proxy", rows)

    # Claude Code's API, in front of either API of ours.
    message = {**chat, "metadata": {"user_id": f"user_1f_account__session_{SESSION}"}}
    await answer(litellm, "/v1/messages", {**message, "model": "over-anthropic"})
    await answer(litellm, "/v1/messages", {**message, "model": "over-openai"})
    await answer(litellm, "/v1/messages", {**message, "model": "over-anthropic"}, x_claude_code_session_id=SESSION)
    rows = await recorded.new(3)
    assert [(row["endpoint"], row["session_source"]) for row in rows] == [
        ("/v1/messages", "body.metadata.user_id"),
        ("/v1/responses", "body.user"),
        ("/v1/messages", "x-claude-code-session-id"),
    ]
    assert {row["session_id"] for row in rows} == {SESSION}
    check_traffic("litellm_proxy", rows)

    # Codex's API.
    response = {"model": "over-openai", "input": "hi", "max_output_tokens": 16, "prompt_cache_key": "keyed"}
    await answer(litellm, "/v1/responses", response)
    await answer(litellm, "/v1/responses", response, session_id="headed")
    rows = await recorded.new(2)
    assert [row["endpoint"] for row in rows] == ["/v1/responses"] * 2
    assert [row["session_source"] for row in rows] == ["body.prompt_cache_key", "body.prompt_cache_key"]
    check_traffic("litellm_proxy", rows)
