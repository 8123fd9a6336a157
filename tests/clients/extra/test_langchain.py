"""LangChain's models against the proxy; the features are the rows of docs/clients.md."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.clients.extra.rig import EXTRA, MODEL, Client, Recorded, check_traffic

pytestmark = [*EXTRA, pytest.mark.asyncio(loop_scope="module")]

CONVERSATIONS = {
    "chat": ("/v1/chat/completions", "x-session-id", "langchain-chat"),
    "responses": ("/v1/responses", "body.prompt_cache_key", "langchain-responses"),
    "messages": ("/v1/messages", "x-session-id", "langchain-messages"),
}


async def test_models(client_of: Callable[[str], Client], fleet_url: str, recorded: Recorded) -> None:
    said = json.loads((await client_of("langchain").run("langchain_calls.py", fleet_url, MODEL)).checked)
    rows = await recorded.new(11)
    for number, (name, expected) in enumerate(CONVERSATIONS.items()):
        turns = rows[3 * number : 3 * number + 3]
        assert {(row["endpoint"], row["session_source"], row["session_id"]) for row in turns} == {expected}
        assert [row["stream"] for row in turns] == [False, True, False]
        assert len({row["instance"] for row in turns}) == 1
        assert all(said[name]["said"])
        usage = said[name]["usage"]
        assert usage["input_token_details"]["cache_read"] == turns[-1]["actual_cached_tokens"]
        assert turns[-1]["actual_cached_tokens"] > 0.8 * turns[-2]["prompt_tokens"]
    assert [len(text) for text in said["tools"]] == [24, 24]
    check_traffic("langchain", rows)
