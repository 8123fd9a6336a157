"""LiteLLM's library against the proxy; the features are the rows of docs/clients.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.clients.extra.rig import EXTRA, MODEL, Client, Recorded, check_traffic

pytestmark = [*EXTRA, pytest.mark.asyncio(loop_scope="module")]


async def test_library(client_of: Callable[[str], Client], fleet_url: str, recorded: Recorded) -> None:
    client = client_of("litellm")
    # Without it the library fetches prices when it is imported.
    client.variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    said = json.loads((await client.run("litellm_calls.py", fleet_url, MODEL)).checked.splitlines()[-1])
    rows = await recorded.new(6)
    chat, (message, response, with_tools) = rows[:3], rows[3:]
    assert [len(each) for each in said["chat"]] == [24, 24, 24]
    assert [row["stream"] for row in chat] == [False, True, False]
    assert {(row["session_source"], row["session_id"]) for row in chat} == {("x-litellm-session-id", "litellm-chat")}
    assert all(later["actual_cached_tokens"] > 0.8 * earlier["prompt_tokens"] for earlier, later in pairwise(chat))
    assert len(said["messages"]) == 24
    assert (message["endpoint"], message["session_source"]) == ("/v1/messages", "body.metadata.user_id")
    assert message["session_id"] == "7f3c2a10-5b1e-4c83-9d1f-0f5f7a1c9b21"
    assert said["responses"]
    assert (response["endpoint"], response["session_source"]) == ("/v1/responses", "body.prompt_cache_key")
    assert said["tools"] == ["length"]
    assert with_tools["session_source"] is None
    check_traffic("litellm", rows)
