"""Call the proxy with LangChain's models: ``langchain_calls.py URL MODEL``; prints what came back as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

URL, MODEL = sys.argv[1:]
SYSTEM = "be brief " * 200


def turns(model: Any) -> dict[str, Any]:
    """Three turns of one conversation, the second one streamed; texts, and the last turn's usage."""
    messages: list[Any] = [("system", SYSTEM)]
    said = []
    usage = None
    for turn in range(3):
        messages.append(("human", f"{turn} {'look at this ' * 20}"))
        if turn == 1:
            answer = None
            for chunk in model.stream(messages):
                answer = chunk if answer is None else answer + chunk
            assert answer is not None
        else:
            answer = model.invoke(messages)
        said.append(answer.text)
        usage = answer.usage_metadata
        messages.append(("ai", answer.text))
    return {"said": said, "usage": usage}


def read(path: str) -> str:
    """Read a file."""
    return path


def tools(model: Any) -> str:
    """A call with a tool, asked of an engine that answers with text."""
    answer = model.bind_tools([read]).invoke("hi")
    return str(answer.text)


common: dict[str, Any] = {"model": MODEL, "api_key": "unused", "max_retries": 0}
chat = ChatOpenAI(base_url=f"{URL}/v1", max_tokens=6, default_headers={"x-session-id": "langchain-chat"}, **common)
responses = ChatOpenAI(
    base_url=f"{URL}/v1",
    max_tokens=16,
    use_responses_api=True,
    store=False,
    model_kwargs={"prompt_cache_key": "langchain-responses"},
    **common,
)
messages = ChatAnthropic(base_url=URL, max_tokens=6, default_headers={"x-session-id": "langchain-messages"}, **common)

print(
    json.dumps(
        {
            "chat": turns(chat),
            "responses": turns(responses),
            "messages": turns(messages),
            "tools": [tools(chat), tools(messages)],
        }
    )
)
