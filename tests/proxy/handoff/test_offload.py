"""The hand-off by the proxy: contents of each leg, and handling of failures.

The engine's side of the hand-off is covered by the simulated engine (tests/integration) and by real ones.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.exchange.test_held_requests import GatedEngine
from tests.proxy.stub_engine import StubEngine

HEAVY = {"model": "stub", "prompt": list(range(400)), "max_tokens": 4}
THRESHOLD = {"planner": "threshold", "params": {"min_decode_requests": 0}}
SMALL_CLASSES = {"medium_tokens": 50, "heavy_tokens": 100}


async def start(start_proxy: StartProxy, count: int = 2, **more: Any) -> Running:
    offload = {**THRESHOLD, **more.pop("offload", {})}
    return await start_proxy(count, role="kv_both", offload=offload, classes=SMALL_CLASSES, **more)


def legs(proxy: Running) -> tuple[dict[str, Any], dict[str, Any], StubEngine]:
    """P's body, D's body, and the engine that was P."""
    seen = [(engine, body) for engine in proxy.engines for body in engine.seen]
    [(p_engine, p_body)] = [item for item in seen if item[1]["kv_transfer_params"]["do_remote_decode"]]
    [(_, d_body)] = [item for item in seen if item[1]["kv_transfer_params"]["do_remote_prefill"]]
    return p_body, d_body, p_engine


@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_follow_the_contract(start_proxy: StartProxy, stream: bool) -> None:
    proxy = await start(start_proxy)
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert answer.status_code == 200
    p_body, d_body, p_engine = legs(proxy)
    transfer_id = p_body["kv_transfer_params"]["transfer_id"]
    assert p_body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
    }
    assert (p_body["max_tokens"], p_body["min_tokens"], p_body["stream"]) == (1, 1, False)
    assert "stream_options" not in p_body
    assert d_body["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": p_engine.engine_id,
        "remote_bootstrap_addr": p_engine.url,
    }
    assert d_body["max_tokens"] == 4
    assert d_body.get("stream", False) is stream
    assert answer.headers["x-warmroute-prefill-instance"] != answer.headers["x-warmroute-instance"]
    [row] = await proxy.rows()
    assert (row["offload_reason"], row["outcome"]) == ("chosen", "ok")
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_what_p_reused_not_what_d_pulled(start_proxy: StartProxy, stream: bool) -> None:
    proxy = await start(start_proxy, engines=[StubEngine(cached_tokens=64), StubEngine(cached_tokens=64)])
    body = {**HEAVY, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    answer = await proxy.client.post("/v1/completions", json=body)
    text = answer.text if not stream else next(e[6:] for e in answer.text.split("\n\n") if '"choices":[]' in e)
    assert json.loads(text)["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert (await proxy.rows())[0]["actual_cached_tokens"] == 64


async def test_chat_prefill_leg_bounds_max_completion_tokens_too(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    body = {
        "model": "stub",
        "messages": [{"role": "user", "content": "z" * 4000}],
        "max_completion_tokens": 9,
    }
    assert (await proxy.client.post("/v1/chat/completions", json=body)).status_code == 200
    assert legs(proxy)[0]["max_completion_tokens"] == 1


@pytest.mark.parametrize(
    ("mode", "offload", "reason"),
    [
        ("p_error", {}, "fell_back_p_error"),
        ("p_hang", {"prefill_timeout_s": 0.2}, "fell_back_p_timeout"),
        ("pull_hang", {"first_token_timeout_s": 0.2}, "fell_back_d_timeout"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failed_hand_off_runs_co_located_without_transfer_params(
    start_proxy: StartProxy, mode: str, offload: dict[str, Any], reason: str, stream: bool
) -> None:
    proxy = await start(start_proxy, engines=[StubEngine(mode=mode) for _ in range(2)], offload=offload)
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert answer.status_code == 200
    last_on_d = proxy.engines[int(answer.headers["x-warmroute-instance"][-1])].seen[-1]
    assert "kv_transfer_params" not in last_on_d
    assert "x-warmroute-prefill-instance" not in answer.headers
    [row] = await proxy.rows()
    assert (row["offload_reason"], row["outcome"], row["prefill_instance"]) == (reason, "ok", None)
    assert ledger_is_zero(await proxy.settled())


async def test_p_that_restarts_between_the_legs_is_noticed_before_d_is_touched(start_proxy: StartProxy) -> None:
    engines = [GatedEngine(), GatedEngine()]
    proxy = await start(start_proxy, engines=engines)
    request = asyncio.create_task(proxy.client.post("/v1/completions", json=HEAVY))
    await proxy.until(lambda: sum(engine.running for engine in engines) == 1)
    next(engine for engine in engines if engine.running).engine_id = "another life"
    for engine in engines:
        engine.open.set()
    answer = await request
    assert answer.status_code == 200
    assert (await proxy.rows())[0]["offload_reason"] == "fell_back_p_identity"
    pulls = [b for e in engines for b in e.seen if (b.get("kv_transfer_params") or {}).get("do_remote_prefill")]
    assert pulls == []


async def test_pair_that_keeps_failing_is_left_alone_for_a_while(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, engines=[StubEngine(mode="p_error") for _ in range(2)])
    for number in range(12):
        ids = list(range(number * 1000, number * 1000 + 400))
        await proxy.client.post("/v1/completions", json={**HEAVY, "prompt": ids})
    reasons = [row["offload_reason"] for row in await proxy.rows()]
    # Two pairs, at most three failures each; then both breakers are open.
    assert 3 <= reasons.count("fell_back_p_error") <= 6
    assert reasons[-3:] == ["pair_broken"] * 3


async def test_client_that_leaves_during_the_prefill_leg_aborts_it(start_proxy: StartProxy) -> None:
    engines = [StubEngine(prefill_s=30), StubEngine(prefill_s=30)]
    proxy = await start(start_proxy, engines=engines)
    request = asyncio.create_task(
        httpx.AsyncClient(base_url=proxy.url, timeout=60, trust_env=False).post("/v1/completions", json=HEAVY)
    )
    await proxy.until(lambda: sum(engine.running for engine in engines) == 1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await proxy.until(lambda: sum(engine.aborted for engine in engines) == 1)
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.parametrize("mode", ["refuse_input", "p_refuse"])
async def test_a_pair_has_failed_only_if_d_answers_what_a_leg_was_refused(start_proxy: StartProxy, mode: str) -> None:
    """Else one client's wrong requests would end the hand-offs of all others."""
    proxy = await start(start_proxy, engines=[StubEngine(mode=mode) for _ in range(2)])
    for number in range(12):
        ids = list(range(number * 1000, number * 1000 + 400))
        answer = await proxy.client.post("/v1/completions", json={**HEAVY, "prompt": ids})
        assert answer.status_code == (400 if mode == "refuse_input" else 200)
    reasons = [row["offload_reason"] for row in await proxy.rows()]
    assert set(reasons) == {"fell_back_p_error"} | ({"pair_broken"} if mode == "p_refuse" else set())
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.parametrize("reason", ["stop", "abort"])
async def test_d_does_not_wait_for_a_p_that_has_ended_early(start_proxy: StartProxy, reason: str) -> None:
    proxy = await start(start_proxy, engines=[StubEngine(finish_reason=reason) for _ in range(2)])
    assert (await proxy.client.post("/v1/completions", json={**HEAVY, "stream": True})).status_code == 200
    assert [row["offload_reason"] for row in await proxy.rows()] == ["fell_back_p_error"]
    pulls = [b for e in proxy.engines for b in e.seen if (b.get("kv_transfer_params") or {}).get("do_remote_prefill")]
    assert pulls == []


@pytest.mark.parametrize(
    "shape",
    [
        *({"use_beam_search": False}, {"use_beam_search": None}, {"max_completion_tokens": 3}),
        *({"max_tokens": 8, "min_tokens": least} for least in (8, "8", 8.0)),
        {"max_tokens": "8", "n": "1", "stream": "true", "stream_options": {"include_usage": "false"}},
    ],
)
async def test_fields_that_change_nothing_leave_the_hand_off(start_proxy: StartProxy, shape: dict[str, Any]) -> None:
    proxy = await start(start_proxy)
    assert (await proxy.client.post("/v1/completions", json={**HEAVY, **shape})).status_code == 200
    assert [row["offload_reason"] for row in await proxy.rows()] == ["chosen"]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "reason"),
    [
        ((500, 500), 101, "request_shape"),
        ((500, 500), 100, "chosen"),
        ((None, None), 101, "chosen"),
        # The short engine is left out, and nobody else could be P.
        ((500, 600), 101, "no_prefill_candidate"),
    ],
)
async def test_what_no_engines_context_has_room_for_is_not_handed_over(
    start_proxy: StartProxy, lengths: tuple[int | None, ...], max_tokens: int, reason: str
) -> None:
    """D would refuse it with 400, after P, whose leg makes one token, has computed it and holds the KV."""
    proxy = await start(start_proxy, engines=[StubEngine(max_model_len=length) for length in lengths])
    body = {**HEAVY, "max_tokens": max_tokens}
    explained = (await proxy.client.post("/explain", json=body)).json()
    assert explained["decisions"][explained["in_force"]]["offload"]["reason"] == reason
    assert (await proxy.client.post("/v1/completions", json=body)).status_code == 200
    assert [row["offload_reason"] for row in await proxy.rows()] == [reason]


@pytest.mark.parametrize(
    "shape",
    [
        *({"n": 2}, {"best_of": 2}, {"echo": True}, {"prompt_logprobs": 1}, {"prompt": [HEAVY["prompt"]] * 2}),
        {"use_beam_search": True},
        # P's leg would be accepted, and D's refused.
        *({"max_tokens": 0}, {"max_completion_tokens": 0}, {"stream_options": {"include_usage": True}}),
        *({"max_tokens": 8, "min_tokens": 9}, {"max_tokens": None, "min_tokens": 17}, {"min_tokens": -1}),
        {"min_tokens": None},
        *({"n": "2"}, {"echo": 1}, {"prompt_logprobs": "1"}, {"max_tokens": "0"}, {"max_tokens": "8", "min_tokens": 9}),
    ],
)
async def test_requests_one_hand_off_cannot_carry_run_co_located(
    start_proxy: StartProxy, shape: dict[str, Any]
) -> None:
    proxy = await start(start_proxy)
    assert (await proxy.client.post("/v1/completions", json={**HEAVY, **shape})).status_code == 200
    assert [row["offload_reason"] for row in await proxy.rows()] == ["request_shape"]


async def test_embeddings_are_served_and_not_handed_off(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, fields={"allow": ["prompt_embeds"]})
    for prompt in ({"prompt": ""}, {}, {"prompt": HEAVY["prompt"]}):
        body = {"model": "stub", "max_tokens": 4, **prompt, "prompt_embeds": "QUJD" * 50_000}
        assert (await proxy.client.post("/v1/completions", json=body)).status_code == 200
    assert {row["offload_reason"] for row in await proxy.rows()} == {"request_shape"}
    assert ledger_is_zero(await proxy.settled())


async def test_light_requests_are_never_offloaded(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy)
    await proxy.client.post("/v1/completions", json={**HEAVY, "prompt": list(range(40))})
    assert (await proxy.rows())[0]["offload_reason"] == "below_threshold"
    assert "kv_transfer_params" not in next(body for engine in proxy.engines for body in engine.seen)
