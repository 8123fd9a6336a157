"""Call the proxy with LiteLLM's library: ``litellm_calls.py URL MODEL``; prints what came back as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

URL, MODEL = sys.argv[1:]
SESSION = {"x-litellm-session-id": "litellm-chat"}
CHAT: dict[str, Any] = {
    **{"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "unused", "max_tokens": 6, "num_retries": 0}
}


def chat() -> list[str]:
    """Three turns of one conversation, the second one streamed."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "be brief " * 200}]
    said = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{turn} {'look at this ' * 20}"})
        answer = litellm.completion(messages=messages, stream=turn == 1, extra_headers=SESSION, **CHAT)
        if turn == 1:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
        said.append(text)
        messages.append({"role": "assistant", "content": text})
    return said


async def messages() -> str:
    """One message, through the interface for Anthropic's API."""
    answer = await litellm.anthropic_messages(
        model=f"anthropic/{MODEL}",
        api_base=URL,
        api_key="unused",
        max_tokens=6,
        messages=[{"role": "user", "content": "hi"}],
        metadata={"user_id": "user_1f_account__session_7f3c2a10-5b1e-4c83-9d1f-0f5f7a1c9b21"},
    )
    return str(answer["content"][0]["text"])


def responses() -> str:
    """One response."""
    answer = litellm.responses(
        model=f"openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="unused",
        input="hi",
        max_output_tokens=16,
        prompt_cache_key="litellm-responses",
    )
    return str(answer.output[0].content[0].text)


def tools() -> list[str]:
    """A chat with a tool, asked of an engine that answers with text."""
    function = {"name": "read", "description": "Read a file", "parameters": {"type": "object", "properties": {}}}
    answer = litellm.completion(
        messages=[{"role": "user", "content": "hi"}], tools=[{"type": "function", "function": function}], **CHAT
    )
    return [answer.choices[0].finish_reason]


print(json.dumps({"chat": chat(), "messages": asyncio.run(messages()), "responses": responses(), "tools": tools()}))
