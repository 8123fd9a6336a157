"""Hand-offs end to end whose engines die, refuse or answer nonsense between the legs, or accept no connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.chaos.conftest import BODY, HEAVY, Chaos, StartChaos
from tests.chaos.rig import faults
from tests.chaos.rig.engine import ChaosEngine, Fault, Talk, good
from tests.chaos.rig.faults import Moment, at
from tests.chaos.rig.wire import EVENTS, good_body, whole
from tests.chaos.test_matrix import full_backlog
from tests.chaos.test_offload_legs import D, P, on, start

BEFORE = Moment.BEFORE_HEADERS
BLOCKS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [1], "remote_host": "127.0.0.1"}


def answered(stream: bool) -> bytes:
    return b"".join(EVENTS) if stream else good_body()


async def start_nixl(start_chaos: StartChaos, fault: Fault, count: int = 2) -> Chaos:
    return await start_chaos(
        *(ChaosEngine(fault) for _ in range(count)),
        role="kv_both",
        connector="nixl",
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
        classes={"medium_tokens": 50, "heavy_tokens": 100},
    )


def prefilled(content: bytes) -> Fault:
    """P's answer is this; everything else is answered properly."""

    async def fault(talk: Talk) -> None:
        await talk.send(whole("200 OK", content))

    return on(P, fault)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        good_body(),
        good_body(kv_transfer_params=None),
        good_body(kv_transfer_params={}),
        good_body(kv_transfer_params={"remote_block_ids": []}),
        good_body(kv_transfer_params=[1]),
        good_body(kv_transfer_params="x"),
        good_body(kv_transfer_params=5),
        b"",
        b"not JSON",
        b"[]",
        b"null",
        b"\xff\xfe\0",
        b'{"kv_transfer_params":' + b"[" * 100_000,
    ],
    ids=lambda content: content[-30:].decode("latin-1"),
)
async def test_a_p_that_answers_200_without_transfer_parameters_is_not_pulled_from(
    start_chaos: StartChaos, content: bytes, stream: bool
) -> None:
    proxy = await start_nixl(start_chaos, prefilled(content))
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert (answer.status_code, answer.content) == (200, answered(stream))
    [row] = await proxy.rows()
    assert (row["offload_reason"], row["outcome"]) == ("fell_back_p_error", "ok")
    assert not any(leg_of_post(post) == D for engine in proxy.engines for post in engine.posts)
    await proxy.nothing_left()


async def test_transfer_parameters_reach_d_as_p_wrote_them(start_chaos: StartChaos) -> None:
    proxy = await start_nixl(start_chaos, prefilled(good_body(kv_transfer_params=BLOCKS)))
    answer = await proxy.client.post("/v1/completions", json=HEAVY)
    assert answer.status_code == 200
    assert (await proxy.rows())[0]["offload_reason"] == "chosen"
    [pull] = [post for engine in proxy.engines for post in engine.posts if leg_of_post(post) == D]
    assert pull.fields["kv_transfer_params"] == BLOCKS
    await proxy.nothing_left()


def leg_of_post(post: Any) -> str | None:
    params = post.fields.get("kv_transfer_params")
    return None if not params else P if params["do_remote_decode"] else D


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
async def test_a_p_that_dies_after_its_answer_is_noticed_before_d_pulls(
    start_chaos: StartChaos, connector: str, stream: bool
) -> None:
    async def last_words(talk: Talk) -> None:
        talk.engine.probe_fault = faults.dies
        await talk.send(whole("200 OK", good_body(kv_transfer_params=BLOCKS)))

    proxy = await (start_nixl if connector == "nixl" else start)(start_chaos, on(P, last_words))
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert answer.content == answered(stream)
    [row] = await proxy.rows()
    assert (row["offload_reason"], row["outcome"]) == ("fell_back_p_identity", "ok")
    assert not any(leg_of_post(post) == D for engine in proxy.engines for post in engine.posts)
    await proxy.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_d_that_refuses_the_pull_is_replaced(start_chaos: StartChaos, stream: bool) -> None:
    """D dies while P computes; its death is not the request's fault."""
    engines: list[ChaosEngine] = []

    async def kills_d(talk: Talk) -> None:
        for engine in engines:
            if engine is not talk.engine and engine.port:
                engine.die()
        await good(talk)

    proxy = await start(start_chaos, on(P, kills_d))
    engines += proxy.engines
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert answer.content == answered(stream)
    [row] = await proxy.rows()
    assert row["outcome"] == "ok"
    assert [attempt.get("offload") for attempt in row["attempts"]] == ["fell_back_d_error", None]
    assert sum(engine.dead for engine in engines) == 1
    await proxy.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_two_engines_that_hang_on_everything_are_one_timeout(start_chaos: StartChaos, stream: bool) -> None:
    proxy = await start_chaos(
        *(ChaosEngine(at(BEFORE, faults.hang)) for _ in range(2)),
        role="kv_both",
        offload={
            "planner": "threshold",
            "params": {"min_decode_requests": 0},
            "prefill_timeout_s": 0.3,
            "first_token_timeout_s": 0.3,
        },
        classes={"medium_tokens": 50, "heavy_tokens": 100},
        timeouts={"first_byte_s": 0.3, "total_s": 0.3},
    )
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
    [row] = await proxy.rows()
    assert [attempt.get("offload") for attempt in row["attempts"]] == ["fell_back_p_timeout", None, None]
    await proxy.nothing_left()


async def stops(engine: ChaosEngine) -> None:
    """The port listens no more, and open connections are closed."""
    await engine.stop()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_is_slow_to_accept_serves_in_the_end(start_chaos: StartChaos, stream: bool) -> None:
    """Its backlog is full for a while; others are served meanwhile, and it is not blamed."""
    proxy = await start_chaos(ChaosEngine(), ChaosEngine())
    slow = proxy.engines[0]
    await stops(slow)
    with full_backlog(slow.port):
        waiting = asyncio.create_task(proxy.client.post("/v1/completions", json={**BODY, "stream": stream}))
        await proxy.until(lambda: proxy.core.admission.in_flight == 1)
        for _ in range(3):  # every second turn of round robin would be the slow one's
            proxy.instance(0).draining = True
            other = await proxy.client.post("/v1/completions", json={**BODY, "stream": stream})
            assert other.headers["x-warmroute-instance"] == "inst-1"
        assert not waiting.done()
    await slow.start()
    proxy.instance(0).draining = False
    answer = await waiting
    assert (answer.content, answer.headers["x-warmroute-instance"]) == (answered(stream), "inst-0")
    assert proxy.instance(0).failures_in_a_row == 0
    await proxy.nothing_left()


async def test_a_client_that_leaves_while_its_engine_does_not_accept_leaves_nothing_behind(
    start_chaos: StartChaos,
) -> None:
    proxy = await start_chaos(ChaosEngine())
    await stops(proxy.engines[0])
    with full_backlog(proxy.engines[0].port):
        waiting = asyncio.create_task(proxy.client.post("/v1/completions", json=BODY))
        await proxy.until(lambda: proxy.core.admission.in_flight == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await proxy.until(lambda: proxy.core.breakdown.finished == 1)
    assert (await proxy.rows())[0]["outcome"] == "client_gone"
    await proxy.nothing_left()


@pytest.mark.parametrize("leg", [P, D])
async def test_a_leg_whose_engine_does_not_accept_is_bounded(start_chaos: StartChaos, leg: str) -> None:
    proxy = await start(start_chaos, good)
    proxy.core.upstream.connect_timeout_s = 0.5
    number = 1 if leg == P else 0
    await stops(proxy.engines[number])
    with full_backlog(proxy.engines[number].port):
        answer = await proxy.client.post("/v1/completions", json=HEAVY)
    assert answer.content == good_body()
    [row] = await proxy.rows()
    assert row["attempts"][0]["offload"] == ("fell_back_p_error" if leg == P else "fell_back_d_error")
    await proxy.nothing_left()
