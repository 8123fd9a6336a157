"""Cache killers and normalised prompts through the running proxy."""

from __future__ import annotations

import json
from typing import Any

from tests.proxy.conftest import StartProxy
from tests.proxy.sessions.turns import Messages, billing_line, conversation
from tests.proxy.stub_engine import StubEngine

CHAT = "/v1/chat/completions"
SESSION = {"x-claude-code-session-id": "s"}


def chat(messages: Messages, **more: Any) -> dict[str, Any]:
    return {"model": "stub", "messages": messages, "max_tokens": 4, **more}


async def test_a_cache_killer_is_in_the_list_the_row_the_explanation_and_the_metrics(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, engines=[StubEngine(cached_tokens=0)])
    for number in range(3):
        body = chat(conversation(number + 1, billing_line(number)), stream=number == 1)
        assert (await proxy.client.post(CHAT, json=body, headers=SESSION)).status_code == 200
    listed = (await proxy.client.get("/cache-killers", params={"session_id": "s"})).json()
    assert [each["rule"] for each in listed["found"]] == ["cch", "cch"]
    assert listed["redacted"]
    assert "cch=" not in json.dumps(listed["found"])
    rows = await proxy.rows()
    assert [row["cache_killer"] for row in rows] == [None, "cch", "cch"]
    assert listed["found"][0]["request_id"] == rows[2]["request_id"]
    body = chat(conversation(4, billing_line(9)))
    explained = (await proxy.client.post("/explain", json=body, headers=SESSION)).json()
    assert explained["cache_killer"]["rule"] == "cch"
    metrics = (await proxy.client.get("/metrics")).text
    assert 'warmroute_cache_killers_total{rule="cch"} 2.0' in metrics
    assert "warmroute_compared_turns_total 2.0" in metrics
    assert (await proxy.client.get("/cache-killers", params={"rule": "nope"})).status_code == 400


async def test_a_normalised_prompt_is_sent_routed_and_named_in_the_answer(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, normalize={"chat": ["cch"]})
    sent = [chat(conversation(number + 1, billing_line(number + 1))) for number in range(2)]
    for body in sent:
        answer = await proxy.client.post(CHAT, json=body, headers=SESSION)
        assert answer.headers["x-warmroute-normalized"] == "cch"
    assert int(answer.headers["x-warmroute-predicted-cached-tokens"]) > 100
    engine = proxy.engines[0]
    system = [body["messages"][0]["content"].split("\n")[0] for body in engine.seen]
    assert system == [billing_line(0).strip()] * 2
    assert [row["normalized"] for row in await proxy.rows()] == [["cch"], ["cch"]]
    assert [row["cache_killer"] for row in await proxy.rows()] == [None, None]
    assert 'warmroute_normalized_requests_total{rule="cch"} 2.0' in (await proxy.client.get("/metrics")).text
    opted_out = await proxy.client.post(CHAT, json=sent[1], headers={"x-warmroute-no-normalize": "1"})
    assert "x-warmroute-normalized" not in opted_out.headers
    assert engine.seen[2] == sent[1]


async def test_a_request_that_failed_is_not_compared(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    proxy.engines[0].mode = "refuse_input"
    for number in range(2):
        await proxy.client.post(CHAT, json=chat(conversation(number + 1, billing_line(number))), headers=SESSION)
    listed = (await proxy.client.get("/cache-killers")).json()
    assert (listed["compared_turns"], listed["conversations"]) == (0, 0)
