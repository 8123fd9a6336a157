"""Requests that are passed on to the least loaded instance: bodies, forms, streams, retries, keys, other paths."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.console.account import account_of
from proxy.paths import PASSED_ON
from tests.proxy.access.test_keys import KEY, KEYS, bearer
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.passing_engine import AUDIO, EVENTS, PassingEngine

BODY = b'{ "model" : "stub", "input": ["a", "\\u00e9"], "unknown": {"x": [1, 2]} }'
JSON = {"content-type": "application/json"}


async def start(start_proxy: StartProxy, count: int = 1, **settings: Any) -> tuple[Running, list[PassingEngine]]:
    engines = [PassingEngine() for _ in range(count)]
    return await start_proxy(engines=list(engines), **settings), engines


async def test_body_query_and_answer_pass_untouched(start_proxy: StartProxy) -> None:
    proxy, [engine] = await start(start_proxy)
    engine.answer_headers = {"x-of-the-engine": "kept", "server": "engine", "set-cookie": "a=b"}
    for path in sorted(PASSED_ON):
        answer = await proxy.client.post(f"{path}?a=b&c=%20d", content=BODY, headers={**JSON, "x-request-id": path})
        assert (answer.status_code, answer.json()) == (200, {"answered": path})
        assert answer.headers["x-of-the-engine"] == "kept", path
        assert (answer.headers["x-request-id"], answer.headers["x-warmroute-instance"]) == (path, "inst-0")
        assert "set-cookie" not in answer.headers, path
        arrived = engine.arrived.pop()
        assert not engine.arrived, path
        assert (arrived.line, arrived.body) == (f"POST {path}?a=b&c=%20d", BODY)
        assert arrived.headers["content-type"] == "application/json", path
        assert arrived.headers["x-request-id"] == path
    rows = sorted((row["endpoint"], row["outcome"], row["status"]) for row in await proxy.rows())
    assert rows == [(path, "ok", 200) for path in sorted(PASSED_ON)]
    assert ledger_is_zero(await proxy.settled())


async def test_records_have_the_instance_that_answered_and_no_decision(start_proxy: StartProxy, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    proxy, engines = await start(start_proxy, 2, logs={"access": str(path)}, health={"interval_s": 600.0})
    engines[0].mode = "error"
    names = [str(number) for number in range(4)]  # each instance has its turn, so one fails and is replaced
    for name in names:
        sent = await proxy.client.post("/tokenize", content=BODY, headers={**JSON, "x-request-id": name})
        assert sent.status_code == 200
    rows = await proxy.rows(instance="inst-1")
    assert [row["request_id"] for row in rows] == names
    assert any(row["attempts"] for row in rows)
    assert {(row["policy"], row["reason"], row["class"], row["planner"]) for row in rows} == {(None, None, None, "")}
    engines[1].mode = "error"
    assert (await proxy.client.post("/tokenize", content=BODY)).status_code == 502
    [failed] = await proxy.rows(outcome="upstream_error")
    assert failed["instance"] == failed["attempts"][-1]["instance"]
    samples = (await proxy.client.get("/metrics")).text.splitlines()
    assert 'warmroute_requests_total{instance="inst-1",outcome="ok"} 4.0' in samples
    routed = ("warmroute_decisions_total{", "warmroute_instance_request_seconds", "warmroute_request_seconds_count{")
    assert not [line for line in samples if line.startswith(routed)]
    await proxy.until(lambda: path.read_bytes().count(b"\n") == 5)
    logged = [json.loads(line)["instance"] for line in path.read_bytes().splitlines()]
    assert logged == ["inst-1"] * 4 + [failed["instance"]]
    account = account_of(rows[0])
    [where] = [each.sentences for each in account.parts if each.subject == "instance"]
    passed_on = "inst-1: it was passed on, without a decision of the policy, to the instance "
    assert where == (passed_on + "with the fewest requests in flight.",)
    assert not account.candidates


async def test_requests_take_turns_on_idle_instances_and_avoid_busy_ones(start_proxy: StartProxy) -> None:
    proxy, engines = await start(start_proxy, 3)
    for _ in range(9):
        assert (await proxy.client.post("/v1/embeddings", content=BODY)).status_code == 200
    assert [len(engine.arrived) for engine in engines] == [3, 3, 3]
    engines[1].mode = "hang"
    stuck = asyncio.create_task(proxy.client.post("/v1/embeddings", content=BODY))
    while len(engines[1].arrived) == 3:
        if stuck.done():
            stuck = asyncio.create_task(proxy.client.post("/v1/embeddings", content=BODY))
        await asyncio.sleep(0.01)
    before = [len(engine.arrived) for engine in engines]
    for _ in range(6):
        assert (await proxy.client.post("/rerank", content=BODY)).status_code == 200
    assert [len(engine.arrived) - count for engine, count in zip(engines, before, strict=True)] == [3, 0, 3]
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
    await proxy.until(lambda: engines[1].aborted == 1)
    await proxy.settled()
    assert not proxy.core.short_load._in_flight


async def test_an_engine_that_fails_is_replaced_and_a_missing_model_is_looked_for_elsewhere(
    start_proxy: StartProxy,
) -> None:
    proxy, engines = await start(start_proxy, 2, health={"interval_s": 600.0})
    engines[0].mode = "error"
    for _ in range(4):
        answer = await proxy.client.post("/v1/score", content=BODY)
        assert (answer.status_code, answer.headers["x-warmroute-instance"]) == (200, "inst-1")
    assert proxy.core.instances["inst-0"].breaker.failures_in_a_row == 0
    engines[0].mode = "no_model"
    for _ in range(2):
        assert (await proxy.client.post("/v1/score", content=BODY)).status_code == 200
    engines[0].mode = engines[1].mode = "error"
    assert (await proxy.client.post("/v1/score", content=BODY)).status_code == 502


async def test_only_engines_that_serve_the_model_are_sent_requests(start_proxy: StartProxy) -> None:
    engines = [PassingEngine(), PassingEngine(model="embedder"), PassingEngine(model="embedder")]
    proxy = await start_proxy(engines=list(engines))
    for _ in range(4):
        answer = await proxy.client.post("/v1/embeddings", json={"model": "embedder", "input": "x"})
        assert answer.status_code == 200
    assert [len(engine.arrived) for engine in engines] == [0, 2, 2]
    unknown = await proxy.client.post("/v1/embeddings", json={"model": "gpt-9", "input": "x"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    unnamed = await proxy.client.post("/v1/embeddings", json={"input": "x"})
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")


REFUSED = [
    (b"{", "invalid_json"),
    (b"", "invalid_json"),
    (b"\xff", "invalid_json"),
    (b"[" * 5000, "invalid_type"),
    (b"[]", "invalid_type"),
    (b'{"model":3}', "invalid_type"),
    (b'{"model":"stub","vllm_xargs":{"a":1}}', "field_not_allowed"),
    (b'{"model":"stub","priori\\u0074y":-1}', "field_not_allowed"),
    (b'{"model":"stub","kv_transfer_params":{"a":1}}', None),
]


@pytest.mark.parametrize("padding", [0, 3 * 1024 * 1024])
async def test_bodies_that_are_refused(start_proxy: StartProxy, padding: int) -> None:
    proxy, [engine] = await start(start_proxy)
    for content, code in REFUSED:
        answer = await proxy.client.post("/pooling", content=content + b" " * padding)
        assert answer.status_code == 400, content[:50]
        if not padding:
            assert answer.json()["error"]["code"] == code, content[:50]
        assert not engine.arrived, content[:50]
    rows = await proxy.rows(outcome="rejected")
    assert [row["endpoint"] for row in rows] == ["/pooling"] * len(REFUSED)


async def test_a_form_passes_untouched_and_its_model_is_read(start_proxy: StartProxy) -> None:
    engines = [PassingEngine(), PassingEngine(model="whisper")]
    proxy = await start_proxy(engines=list(engines), models={"aliases": {"whisper-1": "whisper"}})
    sound = b"\r\n--x\r\n\x00\xff" * 40_000
    files = {"file": ("a.wav", sound, "audio/wav")}
    for number, model in enumerate(("whisper", "whisper-1")):
        answer = await proxy.client.post("/v1/audio/transcriptions", data={"model": model, "lang": "en"}, files=files)
        assert answer.headers["x-warmroute-instance"] == "inst-1"
        arrived = engines[1].arrived[number]
        sent = answer.request.read()
        assert arrived.body == sent.replace(b"whisper-1", b"whisper")
        assert arrived.headers["content-type"] == answer.request.headers["content-type"]
        assert arrived.headers["content-type"].startswith("multipart/form-data; boundary=")
    unnamed = await proxy.client.post("/v1/audio/translations", data={"lang": "en"}, files=files)
    assert unnamed.status_code == 200
    unknown = await proxy.client.post("/v1/images/edits", data={"model": "gpt-9"}, files=files)
    assert unknown.status_code == 404
    broken = await proxy.client.post("/v1/images/edits", content=b"x", headers={"content-type": "multipart/form-data"})
    assert broken.status_code == 200, "whether a form is readable is the engine's to say"


@pytest.mark.parametrize(("mode", "whole"), [("audio", AUDIO), ("events", EVENTS)])
async def test_streams_are_relayed_as_they_come(start_proxy: StartProxy, mode: str, whole: list[bytes]) -> None:
    proxy, [engine] = await start(start_proxy)
    engine.mode = mode
    answer = await proxy.client.post("/v1/audio/speech", content=BODY)
    assert answer.content == b"".join(whole)
    assert "content-length" not in answer.headers
    [row] = await proxy.rows()
    assert (row["outcome"], row["stream"]) == ("ok", True)
    engine.mode = f"break_{mode}"
    if mode == "audio":
        with pytest.raises(httpx.RemoteProtocolError):
            await proxy.client.post("/v1/audio/speech", content=BODY)
    else:
        answer = await proxy.client.post("/v1/audio/speech", content=BODY)
        assert answer.content.startswith(EVENTS[0])
        assert json.loads(answer.text.rpartition("data: ")[2])["error"]["code"] == "stream_broken"
    await proxy.settled()
    assert (await proxy.rows())[-1]["outcome"] == "stream_broken"


async def test_client_keys_and_their_limits_apply(start_proxy: StartProxy) -> None:
    proxy, [engine] = await start(start_proxy, keys=KEYS)
    for path in ("/v1/embeddings", "/v2/embed", "/tokenize", "/v2/rerank"):
        assert (await proxy.client.post(path, content=BODY)).status_code == 401
        assert (await proxy.client.post(path, content=BODY, headers=bearer("wrong"))).status_code == 401
        assert (await proxy.client.post(path, content=BODY, headers=bearer(KEY))).status_code == 200
    for path in ("/version", "/load", "/v1/models"):
        assert (await proxy.client.get(path)).status_code == 401
        assert (await proxy.client.get(path, headers=bearer(KEY))).status_code == 200
    assert (await proxy.client.get("/ping")).status_code == 200
    assert all("authorization" not in arrived.headers for arrived in engine.arrived)


async def test_tokens_that_the_engine_reports_are_recorded_and_count_for_the_keys_limit(
    start_proxy: StartProxy,
) -> None:
    limited = {"client": [{**key, "max_tokens_per_min": 100} for key in KEYS["client"]]}
    proxy, [engine] = await start(start_proxy, keys=limited)
    engine.answer_fields = {"usage": {"prompt_tokens": 5_000, "total_tokens": 5_000}}
    headers = bearer(KEY)
    assert (await proxy.client.post("/v1/embeddings", content=BODY, headers=headers)).status_code == 200
    refused = await proxy.client.post("/v1/embeddings", content=BODY, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "max_tokens_per_min" in refused.json()["error"]["message"]
    [row] = await proxy.rows(outcome="ok")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (5_000, None)


async def test_bodies_are_bounded(start_proxy: StartProxy) -> None:
    proxy, [engine] = await start(start_proxy, limits={"body_bytes": 2048})
    answer = await proxy.client.post("/classify", content=BODY + b" " * 4096)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert not engine.arrived


async def test_the_proxys_own_version_load_and_ping(start_proxy: StartProxy) -> None:
    proxy, [engine, _] = await start(start_proxy, 2)
    answer = (await proxy.client.get("/version")).json()
    assert answer["server"] == "warmroute"
    assert answer["version"]
    assert answer["engines"] == {"inst-0": "0.18.1", "inst-1": "0.18.1"}
    engine.version = "0.20.2"
    assert (await proxy.client.get("/version")).json() == answer, "kept for seconds"
    assert (await proxy.client.get("/load")).json() == {"server_load": 0}
    for method in ("GET", "POST"):
        assert (await proxy.client.request(method, "/ping")).status_code == 200
    proxy.core.draining = True
    assert (await proxy.client.get("/ping")).status_code == 503
    proxy.core.draining = False


async def test_an_unknown_path_names_those_that_are_served(start_proxy: StartProxy) -> None:
    proxy, [engine] = await start(start_proxy)
    for method in ("GET", "POST", "DELETE"):
        answer = await proxy.client.request(method, "/v1/files")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], set(error)) == (
            404,
            "unknown_path",
            {"message", "type", "param", "code"},
        )
        for text in ("/v1/embeddings", "/v1/chat/completions", "pass_through.paths", "docs/proxy.md"):
            assert text in error["message"]
    answer = await proxy.client.get("/tokenize")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"
    answer = await proxy.client.post("/v1/%65mbeddings", content=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
    assert "percent-encoding" in answer.json()["error"]["message"]
    assert not engine.arrived


async def test_further_paths_are_passed_on_if_they_are_listed(start_proxy: StartProxy) -> None:
    proxy, [engine] = await start(start_proxy, pass_through={"paths": ["/v1/moderations", "/v1/files/*"]})
    for content, kind in ((BODY, "application/json"), (b"{}", "application/json"), (b"\x00", "application/x-other")):
        answer = await proxy.client.post("/v1/moderations?x=1", content=content, headers={"content-type": kind})
        assert answer.json() == {"answered": "/v1/moderations"}
        assert (engine.arrived[-1].body, engine.arrived[-1].headers["content-type"]) == (content, kind)
    assert (await proxy.client.get("/v1/files/a-1")).json() == {"answered": "/v1/files/a-1"}
    assert (await proxy.rows())[-1]["endpoint"] == "/v1/files/*"
    arrived = len(engine.arrived)
    for path in ("/v1/files", "/v1/files/", "/v1/files/%2e%2e/x", "/v1/files/a//b", "/v1/moderations/x", "/v1/load"):
        assert (await proxy.client.post(path, content=BODY)).status_code == 404, path
    wrong = await proxy.client.delete("/v1/files/a-1")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, POST")
    assert len(engine.arrived) == arrived


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/files/f-1"), ("POST", "/v1/moderations")])
@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
async def test_a_listed_path_needs_no_body_whatever_type_is_named(
    start_proxy: StartProxy, method: str, path: str, kind: str
) -> None:
    proxy, [engine] = await start(start_proxy, pass_through={"paths": ["/v1/moderations", "/v1/files/*"]})
    headers = {"content-type": kind}
    answer = await proxy.client.request(method, path, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"answered": path})
    [arrived] = [each for each in engine.arrived if path in each.line]
    assert (arrived.line.split()[0], arrived.body) == (method, b"")
    cut = await proxy.client.post(path, content=b"{", headers={"content-type": "application/json"})
    assert (cut.status_code, cut.json()["error"]["code"]) == (400, "invalid_json")
    if kind == "application/json":
        needed = await proxy.client.post("/v1/embeddings", headers=headers)
        assert (needed.status_code, needed.json()["error"]["code"]) == (400, "invalid_json")
