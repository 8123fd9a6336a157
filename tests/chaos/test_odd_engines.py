"""Engines that answer before reading, do not read, or answer probes with nonsense."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from tests.chaos.conftest import BODY, SHORT, StartChaos
from tests.chaos.rig.engine import ChaosEngine, Talk
from tests.chaos.rig.faults import Moment, answers, at, close, hang, rst
from tests.chaos.rig.wire import EVENTS, good_body, head, whole

LARGE = {**BODY, "user": "x" * 12_000_000}
"""Too large for the sockets' buffers."""


async def refuses_early(talk: Talk) -> None:
    """Answers 400 to the head and then reads the rest, as well-behaved servers do."""
    await talk.send(whole("400 Bad Request", b'{"error":{"message":"early"}}', "connection: close"))
    await talk.hang()


async def reads_nothing(talk: Talk) -> None:
    """Leaves the body in the socket."""
    talk.writer.transport.pause_reading()  # type: ignore[attr-defined]
    try:
        await asyncio.sleep(3600)
    finally:
        await talk.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_comes_before_the_body_was_read_is_an_answer(
    start_chaos: StartChaos, stream: bool
) -> None:
    proxy = await start_chaos(ChaosEngine(head_fault=refuses_early))
    answer = await proxy.client.post("/v1/completions", json={**LARGE, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "early")
    await proxy.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_does_not_read_the_request_is_late(start_chaos: StartChaos, stream: bool) -> None:
    engine = ChaosEngine(head_fault=reads_nothing)
    proxy = await start_chaos(engine, ChaosEngine(), timeouts={**SHORT, "total_s": 6.0, "first_byte_s": 6.0})
    answer = await proxy.client.post("/v1/completions", json={**LARGE, "stream": stream})
    assert answer.status_code == 200
    assert answer.content == (b"".join(EVENTS) if stream else good_body())
    [row] = await proxy.rows()
    assert [attempt["instance"] for attempt in row["attempts"]] == ["inst-0"]
    await engine.stop()
    await proxy.nothing_left()


@pytest.mark.parametrize("act", [close, rst])
async def test_an_engine_that_hangs_up_on_a_large_request_is_a_failed_attempt(
    start_chaos: StartChaos, act: Callable[[Talk], Awaitable[None]]
) -> None:
    proxy = await start_chaos(ChaosEngine(head_fault=act), ChaosEngine())
    answer = await proxy.client.post("/v1/completions", json=LARGE)
    assert answer.content == good_body()
    await proxy.nothing_left()


def only(path: str, fault: Callable[[Talk], Awaitable[None]]) -> Callable[[Talk], Awaitable[None]]:
    """The fault for requests to this path, good answers for the others."""

    async def either(talk: Talk) -> None:
        if talk.request.path == path:
            await fault(talk)
        else:
            await talk.send(talk.engine._probed(talk.request.path))

    return either


def says(content: bytes) -> Callable[[Talk], Awaitable[None]]:
    async def fault(talk: Talk) -> None:
        await talk.send(head("200 OK", f"content-length: {len(content)}") + content)

    return fault


PROBES: dict[str, Callable[[Talk], Awaitable[None]]] = {
    "hang": at(Moment.BEFORE_HEADERS, hang),
    "close": at(Moment.BEFORE_HEADERS, close),
    "reset": at(Moment.BEFORE_HEADERS, rst),
    "500": answers("500 X"),
    "404": answers("404 X"),
    "empty": says(b""),
    "no text": says(b"\xff\xfe\0\0" * 50),
    "no JSON": says(b"<html>"),
    "a number": says(b"5"),
    "a list": says(b"[[[1]]]"),
    "deep": says(b"[" * 100_000),
    "null everywhere": says(b'{"data":null,"0":null}'),
    "odd models": says(b'{"data":[null,5,{"id":5},{"id":"stub","max_model_len":"x"},{}]}'),
    "broken metrics": says(
        b"vllm:num_requests_running{ NaN\nvllm:kv_cache_usage_perc NaN\nvllm:num_requests_running inf\n"
    ),
    "odd metrics": says(
        b'vllm:num_requests_running{engine="0"} NaN\nvllm:kv_cache_usage_perc{engine="0"} -5\n'
        b'vllm:cache_config_info{block_size="0",num_gpu_blocks="99999999999999999999"} 1.0\n'
    ),
    "metrics of 2 MB": says(b'vllm:num_requests_running{engine="0"} 1\n' * 40_000),
}


PROBED = ("/health", "/metrics", "/v1/models", "/query")


@pytest.mark.parametrize("name", PROBES)
async def test_a_bad_answer_to_a_probe_affects_no_other_instance(start_chaos: StartChaos, name: str) -> None:
    """Of five instances four answer badly, each another probe. The fifth is probed and serves; so do the others as soon
    as they answer properly again."""
    odd, sound = {path: ChaosEngine() for path in PROBED}, ChaosEngine()
    health = {"interval_s": 0.1, "timeout_s": 0.5, "unhealthy_after": 2}
    proxy = await start_chaos(*odd.values(), sound, health=health)
    for path, engine in odd.items():
        engine.probe_fault = only(path, PROBES[name])
    before = sound.probes
    await proxy.until(lambda: sound.probes >= before + 4)
    assert proxy.instance(len(odd)).healthy
    for _ in range(2 * len(proxy.engines)):
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    assert (await proxy.client.get("/metrics")).status_code == 200
    assert (await proxy.client.get("/instances")).status_code == 200
    for engine in odd.values():
        engine.probe_fault = None
    await proxy.until(lambda: all(proxy.instance(number).healthy for number in range(len(proxy.engines))))
    await proxy.nothing_left()


@pytest.mark.parametrize("path", PROBED)
async def test_a_probe_without_end_is_cut_off(start_chaos: StartChaos, path: str) -> None:
    sent_bytes = 0

    async def endless(talk: Talk) -> None:
        nonlocal sent_bytes
        await talk.send(head("200 OK", "transfer-encoding: chunked"))
        for _ in itertools.count():
            await talk.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            sent_bytes += 0x10000

    odd, sound = ChaosEngine(), ChaosEngine()
    proxy = await start_chaos(odd, sound, health={"interval_s": 2.0, "timeout_s": 1.0, "unhealthy_after": 1})
    odd.probe_fault = only(path, endless)
    await proxy.until(lambda: sent_bytes > 0)
    await proxy.until(lambda: not proxy.instance(0).healthy)
    assert sent_bytes < 32 * 2**20
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
