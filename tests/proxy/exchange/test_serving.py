"""Plain requests through the proxy: bytes in, bytes out, and their records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.conftest import StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

IDS = list(range(1000))


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "stub", "prompt": IDS, "max_tokens": 4, **more}


async def test_whole_answer_is_the_engines_and_headers_give_the_decision(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    answer = await proxy.client.post("/v1/completions", json=completion(), headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 1000
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-warmroute-instance"] in {"inst-0", "inst-1"}
    assert answer.headers["x-warmroute-class"] == "WARM"
    assert answer.headers["x-warmroute-reason"] == "lowest_score"
    assert answer.headers["x-warmroute-predicted-cached-tokens"] == "0"
    served_by = proxy.engines[int(answer.headers["x-warmroute-instance"][-1])]
    assert served_by.seen_headers[0]["x-request-id"] == "mine"


async def test_body_is_forwarded_as_it_came(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    odd = b'{ "model" : "stub","prompt":"h\\u00e9llo", "max_tokens":1, "unknown_field": {"a":[1, 2]} }\n'
    await proxy.client.post("/v1/completions", content=odd, headers={"content-type": "application/json"})
    assert proxy.engines[0].raw_bodies == [odd]


async def test_stream_bytes_are_relayed_untouched_when_the_client_asks_for_usage(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    engine = proxy.engines[0]
    body = completion(stream=True, stream_options={"include_usage": True})
    answer = await proxy.client.post("/v1/completions", json=body)
    expected = b"".join(engine.event(number, usage_asked=True) for number in range(4))
    expected += b"data: " + json.dumps(engine.usage_event(body)).encode() + b"\n\n" + b"data: [DONE]\n\n"
    assert answer.content == expected
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert engine.seen[0] == body


@pytest.mark.parametrize(
    "asked",
    [
        {},
        *({"stream_options": {"include_usage": off}} for off in (False, 0, "false", None)),
        *({"stream_options": options} for options in ({}, {"include_obfuscation": False})),
        {"stream_options": {"continuous_usage_stats": True}},
        {"stream": "true"},
        {"stream": 1},
    ],
)
async def test_usage_is_learnt_but_not_shown_when_the_client_did_not_ask(
    start_proxy: StartProxy, asked: dict[str, Any]
) -> None:
    proxy = await start_proxy(1, engines=[StubEngine(cached_tokens=320)])
    answer = await proxy.client.post("/v1/completions", json=completion(**{"stream": True, **asked}))
    engine = proxy.engines[0]
    assert answer.content == b"".join(engine.event(number) for number in range(4)) + b"data: [DONE]\n\n"
    assert engine.seen[0]["stream_options"] == {"include_usage": True}
    [row] = await proxy.rows()
    assert (row["actual_cached_tokens"], row["completion_tokens"], row["events"]) == (320, 4, 6)


@pytest.mark.parametrize("prompt", [["", "x"], ["x", ""], [""]])
async def test_an_empty_prompt_of_several_is_left_to_the_engine(start_proxy: StartProxy, prompt: list[str]) -> None:
    proxy = await start_proxy(2)
    assert (await proxy.client.post("/v1/completions", json=completion(prompt=prompt))).status_code == 200
    [body] = [body for engine in proxy.engines for body in engine.seen]
    assert body["prompt"] == prompt
    assert ledger_is_zero(await proxy.settled())


async def test_usage_is_left_alone_when_injection_is_off(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, inject_usage=False)
    await proxy.client.post("/v1/completions", json=completion(stream=True))
    assert "stream_options" not in proxy.engines[0].seen[0]


async def test_second_turn_follows_the_cache_and_predicts_it(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(4)
    first = await proxy.client.post("/v1/completions", json=completion())
    second = await proxy.client.post("/v1/completions", json=completion(prompt=[*IDS, *range(500)]))
    assert second.headers["x-warmroute-instance"] == first.headers["x-warmroute-instance"]
    # 1,000 tokens are 62 full blocks of the 16 tokens that the engines report.
    assert second.headers["x-warmroute-predicted-cached-tokens"] == "992"


async def test_breakdown_row_has_the_whole_story(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    await proxy.client.post("/v1/completions", json=completion(), headers={"x-session-id": "s-1"})
    [row] = await proxy.rows()
    assert row["outcome"] == "ok"
    assert row["status"] == 200
    assert row["session_id"] == "s-1"
    assert row["policy"] == "warm"
    assert row["planner"] == "never"
    assert row["offload_reason"] == "planner_never"
    assert row["prompt_tokens"] == 1000
    assert row["actual_cached_tokens"] == 0
    assert {score["instance"] for score in row["scores"]} == {"inst-0", "inst-1"}
    assert set(row["scores"][0]["inputs"]) == {"queue_s", "crowd_s", "own_s", "others_s", "room_s", "cached_tokens"}
    assert {"parse", "decide", "first_byte", "total"} <= set(row["stages_ms"])


async def test_breakdown_filters_and_downloads(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    for number in range(5):
        await proxy.client.post("/v1/completions", json=completion(), headers={"x-request-id": f"r{number}"})
    assert [row["request_id"] for row in await proxy.rows(limit=2)] == ["r3", "r4"]
    assert [row["request_id"] for row in await proxy.rows(request_id="r1")] == ["r1"]
    assert await proxy.rows(**{"class": "HEAVY"}) == []
    download = await proxy.client.get("/breakdown", params={"format": "jsonl"})
    assert [json.loads(line)["request_id"] for line in download.text.splitlines()] == [f"r{n}" for n in range(5)]


async def test_chat_prompts_share_their_history(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(4)
    history = [{"role": "system", "content": "x" * 4000}, {"role": "user", "content": "one"}]
    first = await proxy.client.post("/v1/chat/completions", json={"model": "stub", "messages": history})
    longer = [*history, {"role": "assistant", "content": "w"}, {"role": "user", "content": "two"}]
    second = await proxy.client.post("/v1/chat/completions", json={"model": "stub", "messages": longer})
    assert second.headers["x-warmroute-instance"] == first.headers["x-warmroute-instance"]
    assert int(second.headers["x-warmroute-predicted-cached-tokens"]) > 0


async def test_text_ratio_is_learnt_from_usage(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, index={"bytes_per_token": 8.0})
    for _ in range(40):
        await proxy.client.post("/v1/completions", json=completion(prompt="y" * 8000))
    learnt = (await proxy.client.get("/stats")).json()["bytes_per_token"]
    assert learnt.pop("/v1/completions") == pytest.approx(4.0, rel=0.05)
    assert set(learnt.values()) == {8.0}


async def test_session_its_source_and_its_parent_are_in_the_row_and_the_explanation(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    headers = {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}
    await proxy.client.post("/v1/completions", json=completion(), headers=headers)
    await proxy.client.post("/v1/completions", json=completion(metadata={"session_id": "m"}))
    await proxy.client.post("/v1/completions", json=completion())
    names = ("session_id", "session_source", "parent_session_id")
    assert [tuple(row[name] for name in names) for row in await proxy.rows()] == [
        ("c/a", "x-claude-code-session-id", "c"),
        ("m", "body.metadata.session_id", None),
        (None, None, None),
    ]
    explained = (await proxy.client.post("/explain", json=completion(), headers=headers)).json()["request"]
    assert tuple(explained[name] for name in names) == ("c/a", "x-claude-code-session-id", "c")


async def test_policy_switch_keeps_index_sessions_and_ledger(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(4)
    first = await proxy.client.post("/v1/completions", json=completion(), headers={"x-session-id": "s"})
    switched = await proxy.client.put("/policy", json={"name": "session_sticky", "params": {"overload_factor": 3}})
    assert switched.json()["name"] == "session_sticky"
    assert switched.json()["params"]["overload_factor"] == 3
    second = await proxy.client.post("/v1/completions", json=completion(), headers={"x-session-id": "s"})
    assert second.headers["x-warmroute-instance"] == first.headers["x-warmroute-instance"]
    assert second.headers["x-warmroute-reason"] == "session_pinned"
    assert second.headers["x-warmroute-predicted-cached-tokens"] == "992"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"name": "nope"}, "round_robin"),
        ({"name": "linear", "params": {"beta": 1}}, "alpha"),
        ({"planner": "sometimes"}, "threshold"),
        ({"nmae": "linear"}, "nmae"),
    ],
)
async def test_bad_policy_switch_changes_nothing_and_says_what_exists(
    start_proxy: StartProxy, body: dict[str, Any], named: str
) -> None:
    proxy = await start_proxy(1)
    answer = await proxy.client.put("/policy", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert (await proxy.client.get("/policy")).json()["name"] == "warm"


async def test_explain_shows_all_policies_and_counts_nothing(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(3)
    await proxy.client.post("/v1/completions", json=completion())
    before = await proxy.settled()
    explained = (await proxy.client.post("/explain", json=completion())).json()
    assert set(explained["decisions"]) >= {"round_robin", "linear", "lmetric", "session_sticky", "unified"}
    assert explained["in_force"] == "warm"
    assert explained["request"]["blocks"] == 62
    for decision in explained["decisions"].values():
        assert len(decision["scores"]) == 3
    after = (await proxy.client.get("/stats")).json()
    # The event loop's lag depends on the machine, not on requests.
    del before["event_loop_late_s"], after["event_loop_late_s"]
    assert after == before
    actual = await proxy.client.post("/v1/completions", json=completion())
    assert actual.headers["x-warmroute-instance"] == explained["decisions"]["warm"]["instance"]


async def test_models_health_ready_instances_metrics(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    assert [model["id"] for model in (await proxy.client.get("/v1/models")).json()["data"]] == ["stub"]
    assert (await proxy.client.get("/health")).status_code == 200
    assert (await proxy.client.get("/ready")).json()["healthy_instances"] == ["inst-0", "inst-1"]
    [first, _] = (await proxy.client.get("/instances")).json()["instances"]
    assert first["engine"]["kv_capacity_tokens"] == 160_000
    assert first["index_capacity_blocks"] == 10_000
    await proxy.client.post("/v1/completions", json=completion())
    text = (await proxy.client.get("/metrics")).text
    assert 'warmroute_decisions_total{policy="warm",reason="lowest_score",request_class="WARM"} 1.0' in text
    assert 'warmroute_instance_healthy{instance="inst-0"} 1.0' in text
    assert ledger_is_zero(await proxy.settled())


async def test_engines_see_the_clients_headers_without_its_cookies(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    headers = {"x-warmroute-internal": "1", "cookie": "a=b", "x-session-id": "s", "traceparent": "00-ab-cd-01"}
    await proxy.client.post("/v1/completions", json=completion(), headers=headers)
    seen = proxy.engines[0].seen_headers[0]
    assert "x-warmroute-internal" not in seen
    assert "cookie" not in seen
    assert seen["x-session-id"] == "s"
    assert seen["traceparent"] == "00-ab-cd-01"
