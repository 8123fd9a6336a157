"""Meters and conditions of a running proxy in front of scripted engines."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.proxy.conftest import Running, StartProxy
from tests.proxy.exchange.test_held_requests import GatedEngine
from tests.proxy.stub_engine import StubEngine

METERS = {"interval_s": 0.05, "raise_s": 0.1, "clear_s": 0.1, "min_requests": 3, "window_s": 30}
COUNTERS = {"vllm:prefix_cache_queries_total": 5_000.0, "vllm:prefix_cache_hits_total": 0.0}


async def ask(running: Running, prompt: list[int], session: str | None = None) -> None:
    headers = {} if session is None else {"x-session-id": session}
    body = {"model": "stub", "prompt": prompt, "max_tokens": 4}
    assert (await running.client.post("/v1/completions", json=body, headers=headers)).status_code == 200


async def condition(running: Running, name: str) -> dict[str, Any]:
    conditions = (await running.client.get("/ready?verbose")).json()["conditions"]
    (found,) = (each for each in conditions if each["name"] == name)
    return found


async def raised(running: Running, name: str) -> dict[str, Any]:
    await running.until(lambda: bool(running.core.meters.failing[name]))
    found = await condition(running, name)
    assert not found["ok"]
    assert f'warmroute_condition{{condition="{name}"}} 0.0' in (await running.client.get("/metrics")).text
    return found


async def test_clients_that_stop_sending_their_session_ids_are_noticed(start_proxy: StartProxy) -> None:
    running = await start_proxy(1, meters=METERS)
    prompts = [list(range(1_000 * session, 1_000 * session + 160)) for session in range(3)]
    for session, prompt in enumerate(prompts):
        await ask(running, prompt, f"s{session}")
    assert (await condition(running, "session_headers"))["ok"]
    began_unix_s = time.time()
    for prompt in prompts:
        prompt.extend(range(500_000 + prompt[0], 500_000 + prompt[0] + 64))
        await ask(running, prompt)
    found = await raised(running, "session_headers")
    assert began_unix_s - 0.001 <= found["since_unix_s"] <= time.time() + 0.001
    assert found["detail"].startswith("the last 3 requests have no session id, and 3 of them continue")
    for session, prompt in enumerate(prompts):
        await ask(running, [*prompt, *range(16)], f"s{session}")
    await running.until(lambda: not running.core.meters.failing["session_headers"])
    assert (await condition(running, "session_headers"))["ok"]


async def test_an_engine_whose_prefix_cache_is_off_is_noticed(start_proxy: StartProxy) -> None:
    engine = StubEngine(cached_tokens=0, counters=dict(COUNTERS))
    running = await start_proxy(engines=[engine], meters=METERS)
    for _ in range(5):
        await ask(running, list(range(160)))
    found = await raised(running, "prefix_cache")
    assert found["remedy"] == "start the engine with --enable-prefix-caching"
    engine.counters["vllm:prefix_cache_hits_total"] = 4_000.0
    await raised(running, "cached_token_reports")
    row = (await running.client.get("/meters")).json()["instances"]["inst-0"]
    assert row["engine_counters"] == {"prefix_hit_tokens": 4_000, "prefix_query_tokens": 0}
    text = (await running.client.get("/metrics")).text
    assert 'warmroute_engine_prefix_hit_tokens_total{instance="inst-0"} 4000.0' in text


async def test_an_engine_that_reports_a_disabled_prefix_cache_is_noticed_without_requests(
    start_proxy: StartProxy,
) -> None:
    running = await start_proxy(engines=[StubEngine(prefix_caching=False), StubEngine()], meters=METERS)
    found = await raised(running, "prefix_cache")
    assert found["detail"] == "inst-0: its prefix cache is disabled"
    running.engines[0].prefix_caching = True
    await running.until(lambda: not running.core.meters.failing["prefix_cache"])


async def test_requests_that_bypass_the_proxy_are_noticed(start_proxy: StartProxy) -> None:
    running = await start_proxy(2, meters=METERS)
    running.engines[1].running = 30
    found = await raised(running, "ledger_drift")
    assert found["detail"] == "inst-1: 0 requests by the ledger, 30 by the engine"
    row = (await running.client.get("/meters")).json()["instances"]["inst-1"]
    assert (row["engine_running"], row["ledger_requests"], row["drift"]) == (30, 0, ["ledger_drift"])
    running.engines[1].running = 0
    await running.until(lambda: not running.core.meters.failing["ledger_drift"])


async def test_several_prompts_and_choices_of_one_request_are_no_drift(start_proxy: StartProxy) -> None:
    engine = GatedEngine()
    running = await start_proxy(engines=[engine], meters=METERS)
    body = {"model": "stub", "prompt": [[1, 2, 3]] * 4, "n": 5, "max_tokens": 4}
    asking = asyncio.create_task(running.client.post("/v1/completions", json=body))
    await running.until(lambda: running.core.meters.further_sequences == 19)
    engine.open.set()
    assert (await asking).status_code == 200
    await running.until(lambda: running.core.meters.further_sequences == 0)


async def test_engines_with_different_block_sizes_are_noticed(start_proxy: StartProxy) -> None:
    running = await start_proxy(engines=[StubEngine(), StubEngine(block_tokens=32)], meters=METERS)
    found = await raised(running, "block_size")
    assert found["detail"] == "inst-1: blocks of 32 tokens, others of 16"


async def test_the_answer_has_every_figure(start_proxy: StartProxy) -> None:
    running = await start_proxy(engines=[StubEngine(cached_tokens=64)], meters=METERS)
    before = (await running.client.get("/meters")).json()
    assert before["fleet"]["achieved"] is None
    assert before["instances"]["inst-0"]["prediction_error"] is None
    for _ in range(2):
        await ask(running, list(range(200)))
    meters = (await running.client.get("/meters")).json()
    assert meters["fleet"] == {
        "window_requests": 2,
        "prompt_tokens": 400,
        "achieved": 0.32,
        "reachable": 0.64,
        "ceiling": 0.64,
        "loss": {"routing": 0.0, "eviction": 0.0, "prediction": 0.32},
        "ceiling_blocks": 12,
    }
    row = meters["instances"]["inst-0"]
    assert row.pop("drift") == []
    assert row == {
        "window_requests": 2,
        "prompt_tokens": 400,
        "predicted_tokens": 192,
        "reported_tokens": 128,
        "prediction_error": 0.48,
        "index_trust": "shadow",
        "ledger_requests": 0,
        "engine_running": 0,
        "engine_waiting": 0,
        "transfer_error": None,
        "engine_counters": {},
    }


async def test_without_meters_nothing_is_measured(start_proxy: StartProxy) -> None:
    running = await start_proxy(engines=[StubEngine(cached_tokens=0)], meters={**METERS, "enabled": False})
    for _ in range(5):
        await ask(running, list(range(160)))
    meters = (await running.client.get("/meters")).json()
    assert not meters["enabled"]
    assert meters["fleet"]["window_requests"] == meters["fleet"]["ceiling_blocks"] == 0
    assert all(each["ok"] for each in (await running.client.get("/ready?verbose")).json()["conditions"])


async def test_a_check_that_fails_does_not_end_the_examination(start_proxy: StartProxy) -> None:
    running = await start_proxy(1, meters=METERS)
    examine = running.core.meters.examine
    failed = 0

    def fail(now_s: float) -> None:
        nonlocal failed
        failed += 1
        raise ValueError("a fault of a check")

    running.core.meters.examine = fail  # type: ignore[method-assign]
    await running.until(lambda: failed > 1)
    running.core.meters.examine = examine  # type: ignore[method-assign]
    running.engines[0].running = 30
    await raised(running, "ledger_drift")


async def test_hand_offs_are_compared_with_their_predicted_times(start_proxy: StartProxy) -> None:
    running = await start_proxy(
        2,
        role="kv_both",
        meters=METERS,
        classes={"medium_tokens": 100, "heavy_tokens": 200},
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
    )
    body = {"model": "stub", "prompt": list(range(2_000)), "max_tokens": 4, "stream": True}
    assert (await running.client.post("/v1/completions", json=body)).status_code == 200
    (row,) = await running.rows()
    times = row["legs"]["transfer"]
    rows = (await running.client.get("/meters")).json()["instances"]
    error_s = abs(times["predicted_s"] - times["actual_s"])
    shorter_s = min(times["predicted_s"], times["actual_s"])
    assert rows[row["instance"]]["transfer_error"] == (round(error_s / shorter_s, 6) if shorter_s else None)
    assert rows[row["prefill_instance"]]["transfer_error"] is None
    assert rows[row["prefill_instance"]]["window_requests"] == 1


async def test_a_meter_that_fails_does_not_fail_the_request(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start_proxy(1, meters=METERS)

    def fail(*_: object) -> None:
        raise ValueError("a fault of a meter")

    running.core.meters.session_headers.add = fail  # type: ignore[method-assign, assignment]
    for _ in range(2):  # over one connection
        await ask(running, list(range(160)))
    rows = await running.rows()
    assert [(row["outcome"], row["error"]) for row in rows] == [("ok", None)] * 2
    running.core.meters.total()
    assert all(f"request {row['request_id']} could not be measured" in caplog.text for row in rows)
