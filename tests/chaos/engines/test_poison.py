"""Requests that kill engines: at most two, whatever the number of attempts; failures of living engines are retried."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tests.chaos.conftest import BODY, HEAVY, Chaos, StartChaos
from tests.chaos.rig import faults
from tests.chaos.rig.engine import ChaosEngine, Fault, Talk, good
from tests.chaos.rig.faults import Moment, answers, at
from tests.chaos.rig.wire import EVENTS, good_body, whole

MANY = {"limits": {"max_attempts": 10}}
POISON = {**BODY, "user": "poison"}


def poisoned_by(fault: Fault) -> Fault:
    """The fault for poison requests, good answers for all others."""

    async def either(talk: Talk) -> None:
        await (fault if talk.request.fields.get("user") == "poison" else good)(talk)

    return either


async def core_dies(talk: Talk) -> None:
    """vLLM's way: the engine core is dead, and the HTTP server still answers so."""
    talk.engine.probe_fault = answers("503 Service Unavailable")
    await talk.send(whole("500 Internal Server Error", b'{"error":{"message":"EngineCore encountered an issue"}}'))


async def replaced(talk: Talk) -> None:
    """The process dies, and a supervisor starts another one at once."""
    talk.engine.started_unix_s += 1
    await talk.reset()


DEATHS: dict[str, Fault] = {
    "reset": at(Moment.BEFORE_HEADERS, faults.dies),
    "after the headers": at(Moment.BEFORE_FIRST_BYTE, faults.dies),
    "core": core_dies,
    "replaced": replaced,
}


async def start(start_chaos: StartChaos, fault: Fault, count: int = 4, **settings: Any) -> Chaos:
    return await start_chaos(*(ChaosEngine(poisoned_by(fault)) for _ in range(count)), **{**MANY, **settings})


def hit(proxy: Chaos) -> int:
    """Engines that received a poison request."""
    return sum(any(post.fields.get("user") == "poison" for post in engine.posts) for engine in proxy.engines)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings", "/pooling"])
async def test_requests_to_other_endpoints_kill_no_third_engine_either(start_chaos: StartChaos, path: str) -> None:
    proxy = await start(start_chaos, DEATHS["reset"])
    body = {**POISON, "messages": [{"role": "user", "content": "x"}], "input": "x", "stream": True}
    answer = await proxy.client.post(path, json=body)
    assert answer.status_code == 502
    assert "died while serving this request" in answer.json()["error"]["message"]
    assert (hit(proxy), (await proxy.rows())[-1]["outcome"]) == (2, "poison_request")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("death", DEATHS)
async def test_a_request_that_kills_its_engine_kills_one_more_and_no_third(
    start_chaos: StartChaos, caplog: pytest.LogCaptureFixture, death: str, stream: bool
) -> None:
    proxy = await start(start_chaos, DEATHS[death])
    with caplog.at_level(logging.WARNING, "warmroute.poison"):
        answer = await proxy.client.post(
            "/v1/completions", json={**POISON, "stream": stream}, headers={"x-request-id": "r-1"}
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "poison_request")
    assert hit(proxy) == 2
    [row] = await proxy.rows()
    assert (row["outcome"], row["status"], len(row["attempts"])) == ("poison_request", 502, 2)
    [record] = [record for record in caplog.records if record.name == "warmroute.poison"]
    assert "request r-1 is not sent to another engine: " in record.getMessage()
    metrics = (await proxy.client.get("/metrics")).text
    assert 'outcome="poison_request"} 1.0' in metrics
    # The other engines serve.
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": stream})
    assert answer.content == (b"".join(EVENTS) if stream else good_body())
    await proxy.nothing_left()


async def test_a_poison_request_on_reused_connections_is_recognised(start_chaos: StartChaos) -> None:
    """A connection that was idle is lost, and the next one refused: that is not a request no engine has seen."""
    proxy = await start(start_chaos, DEATHS["reset"])
    for _ in range(4):
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    answer = await proxy.client.post("/v1/completions", json=POISON)
    assert answer.json()["error"]["code"] == "poison_request"
    assert hit(proxy) == 2
    stats = (await proxy.client.get("/stats")).json()
    assert (stats["retries"]["retried"], stats["retries"]["retried_unseen"]) == (1, 0)
    await proxy.nothing_left()


async def test_the_two_engines_of_a_fleet_that_both_died_are_named(start_chaos: StartChaos) -> None:
    proxy = await start(start_chaos, DEATHS["reset"], count=2)
    answer = await proxy.client.post("/v1/completions", json=POISON)
    assert answer.json()["error"]["code"] == "poison_request"
    assert "inst-0 and inst-1 died while serving this request" in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers


async def test_an_engine_that_was_dead_before_does_not_count(start_chaos: StartChaos) -> None:
    proxy = await start(start_chaos, DEATHS["reset"])
    await proxy.engines[0].stop()
    answer = await proxy.client.post("/v1/completions", json=POISON)
    assert answer.json()["error"]["code"] == "poison_request"
    assert hit(proxy) == 2
    assert len((await proxy.rows())[0]["attempts"]) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_one_death_is_retried(start_chaos: StartChaos, stream: bool) -> None:
    proxy = await start(start_chaos, good)
    proxy.engines[0].fault = DEATHS["reset"]
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": stream})
    assert answer.content == (b"".join(EVENTS) if stream else good_body())
    assert proxy.engines[1].probes == 2  # no engine was asked
    await proxy.nothing_left()


@pytest.mark.parametrize("dead", [0, 1])
async def test_failures_of_living_engines_are_retried_as_before(start_chaos: StartChaos, dead: int) -> None:
    proxy = await start(start_chaos, good, count=5)
    for number, engine in enumerate(proxy.engines[:4]):
        engine.fault = DEATHS["reset"] if number < dead else at(Moment.BEFORE_HEADERS, faults.close)
    for _ in range(5):
        answer = await proxy.client.post("/v1/completions", json=BODY)
        assert answer.content == good_body()
    await proxy.nothing_left()


async def test_an_engine_that_is_slow_to_answer_its_probe_is_not_dead(start_chaos: StartChaos) -> None:
    """A long prefill may hold a living engine's interpreter for seconds."""
    proxy = await start(start_chaos, good, count=3, health={"interval_s": 60.0, "timeout_s": 1.0})
    for engine in proxy.engines[:2]:
        engine.fault = at(Moment.BEFORE_HEADERS, faults.close)
        engine.probe_fault = no_answer
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200


async def no_answer(talk: Talk) -> None:
    await talk.hang()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leg", ["P", "D"])
async def test_legs_of_a_hand_off_count(start_chaos: StartChaos, leg: str, stream: bool) -> None:
    """A request that killed P goes to D alone; one that killed D to one other engine."""

    async def fault(talk: Talk) -> None:
        prefills = (talk.request.fields.get("kv_transfer_params") or {}).get("do_remote_decode")
        await (good if leg == "D" and prefills else DEATHS["reset"])(talk)

    proxy = await start(
        start_chaos,
        fault,
        role="kv_both",
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}, "watch_interval_s": 30.0},
        classes={"medium_tokens": 50, "heavy_tokens": 100},
    )
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "user": "poison", "stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "poison_request")
    assert sum(engine.dead for engine in proxy.engines) == 2
    [row] = await proxy.rows()
    assert row["attempts"][0]["offload"] == ("fell_back_p_error" if leg == "P" else "fell_back_d_error")
    await proxy.nothing_left()


async def test_a_resumed_stream_kills_one_more_engine_and_no_third(start_chaos: StartChaos) -> None:
    proxy = await start(start_chaos, at(Moment.MID_STREAM, faults.dies), resume={"enabled": "always", "max_resumes": 5})
    answer = await proxy.client.post("/v1/completions", json={**POISON, "stream": True, "temperature": 0})
    assert '"code":"stream_broken"' in answer.text
    assert hit(proxy) == 2
    [row] = await proxy.rows()
    assert (row["outcome"], row["resume"], len(row["attempts"])) == ("stream_broken", "poison", 2)
    await proxy.nothing_left()


async def test_a_client_that_leaves_while_engines_are_asked_leaves_nothing_behind(start_chaos: StartChaos) -> None:
    proxy = await start(start_chaos, at(Moment.BEFORE_HEADERS, faults.close), count=3)
    for engine in proxy.engines:
        engine.probe_fault = no_answer
    request = asyncio.create_task(proxy.client.post("/v1/completions", json=POISON))
    await proxy.until(lambda: sum(len(engine.posts) for engine in proxy.engines) == 2)
    await asyncio.sleep(0.05)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await proxy.until(lambda: proxy.core.breakdown.finished == 1)
    assert (await proxy.rows())[0]["outcome"] == "client_gone"
