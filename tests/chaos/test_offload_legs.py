"""Faults on either leg of a hand-off: the client gets D's co-located answer, and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.chaos.conftest import HEAVY, Chaos, StartChaos
from tests.chaos.rig import faults
from tests.chaos.rig.engine import ChaosEngine, Fault, Talk, good
from tests.chaos.rig.faults import Moment, answers, at
from tests.chaos.rig.wire import EVENTS, good_body, head

BOUNDS = {"prefill_timeout_s": 30.0, "first_token_timeout_s": 30.0, "token_timeout_s": 0.01, "watch_interval_s": 0.1}
SHORT = {"prefill_timeout_s": 0.8, "first_token_timeout_s": 0.8}


@dataclass(frozen=True)
class Leg:
    """A fault on one leg and the result of the request."""

    name: str
    leg: str
    """``P`` or ``D``."""
    fault: Fault
    reason: str
    """``offload_reason`` in the breakdown."""
    outcome: str = "ok"
    stream: tuple[bool, ...] = (True, False)
    offload: dict[str, Any] = field(default_factory=dict, hash=False)


P, D = "P", "D"
BEFORE, FIRST, MID = Moment.BEFORE_HEADERS, Moment.BEFORE_FIRST_BYTE, Moment.MID_STREAM

LEGS = [
    Leg("hang", P, at(BEFORE, faults.hang), "fell_back_p_timeout"),
    Leg("hang after headers", P, at(FIRST, faults.hang), "fell_back_p_timeout"),
    Leg("hang inside the answer", P, at(MID, faults.hang), "fell_back_p_timeout"),
    Leg("close", P, at(BEFORE, faults.close), "fell_back_p_error"),
    Leg("close after headers", P, at(FIRST, faults.close), "fell_back_p_error"),
    Leg("close inside the answer", P, at(MID, faults.close), "fell_back_p_error"),
    Leg("reset", P, at(BEFORE, faults.rst), "fell_back_p_error"),
    Leg("reset inside the answer", P, at(MID, faults.rst), "fell_back_p_error"),
    Leg("garbage", P, at(BEFORE, faults.garbage), "fell_back_p_error"),
    Leg("400", P, answers("400 Bad Request"), "fell_back_p_error"),
    Leg("429", P, answers("429 Too Many Requests"), "fell_back_p_error"),
    Leg("500", P, answers("500 Internal Server Error"), "fell_back_p_error"),
    Leg("204", P, faults.bodiless("204 No Content"), "fell_back_p_error"),
    Leg("restart after its answer", P, faults.also("x-restart: 1"), "fell_back_p_identity"),
    Leg("a byte at a time", P, faults.trickle(BEFORE), "chosen"),
    Leg("Connection: close", P, faults.says_close, "chosen"),
    Leg("HTTP/1.0", P, faults.framed("close"), "chosen"),
    Leg("hang", D, at(BEFORE, faults.hang), "fell_back_d_timeout"),
    Leg("hang after headers", D, at(FIRST, faults.hang), "fell_back_d_timeout"),
    Leg("close", D, at(BEFORE, faults.close), "fell_back_d_error"),
    Leg("close after headers", D, at(FIRST, faults.close), "fell_back_d_error"),
    Leg("reset", D, at(BEFORE, faults.rst), "fell_back_d_error"),
    Leg("garbage", D, at(BEFORE, faults.garbage), "fell_back_d_error"),
    Leg("400", D, answers("400 Bad Request"), "fell_back_d_error"),
    Leg("500", D, answers("500 Internal Server Error"), "fell_back_d_error"),
    Leg("close inside the answer", D, at(MID, faults.close), "fell_back_d_error", stream=(False,)),
    Leg("hang inside the answer", D, at(MID, faults.hang), "fell_back_d_timeout", stream=(False,)),
    Leg("close mid-stream", D, at(MID, faults.close), "chosen", "stream_broken", stream=(True,)),
    Leg("reset mid-stream", D, at(MID, faults.rst), "chosen", "stream_broken", stream=(True,)),
    Leg("hang mid-stream", D, at(MID, faults.hang), "chosen", "stream_broken", stream=(True,)),
    Leg("a byte at a time", D, faults.trickle(BEFORE), "chosen"),
]

CASES = [pytest.param(leg, stream, id=f"{leg.leg}-{leg.name}-{stream}") for leg in LEGS for stream in leg.stream]


def leg_of(talk: Talk) -> str | None:
    params = talk.request.fields.get("kv_transfer_params")
    if not params:
        return None
    return P if params["do_remote_decode"] else D


def on(leg: str, fault: Fault) -> Fault:
    """The fault on this leg only; all other requests are answered properly."""

    async def either(talk: Talk) -> None:
        await (fault if leg_of(talk) == leg else good)(talk)

    return either


async def start(start_chaos: StartChaos, fault: Fault, count: int = 2, **offload: Any) -> Chaos:
    return await start_chaos(
        *(ChaosEngine(fault) for _ in range(count)),
        role="kv_both",
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}, **BOUNDS, **offload},
        classes={"medium_tokens": 50, "heavy_tokens": 100},
        timeouts={"idle_s": 1.5},
    )


@pytest.mark.parametrize(("case", "stream"), CASES)
async def test_leg(start_chaos: StartChaos, case: Leg, stream: bool) -> None:
    short: dict[str, Any] = SHORT if "hang" in case.name else {}
    proxy = await start(start_chaos, on(case.leg, case.fault), **short)
    if case.reason == "fell_back_p_identity":
        for engine in proxy.engines:
            engine.fault = on(P, restarts_after_its_answer)
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert answer.status_code == 200
    [row] = await proxy.rows()
    assert (row["offload_reason"], row["outcome"]) == (case.reason, case.outcome)
    if case.outcome == "ok":
        text = answer.text.replace(',"prompt_tokens_details":{"cached_tokens":0}', "") if not stream else answer.text
        if case.reason == "chosen" and not stream:
            assert answer.json()["choices"][0]["text"] == "w0 w1 w2 w3 w4 w5 "
        else:
            assert text.encode() == (b"".join(EVENTS) if stream else good_body())
    else:
        assert '"code":"stream_broken"' in answer.text
    if case.reason.startswith("fell_back"):
        [attempt] = row["attempts"]
        assert attempt["offload"] == case.reason
        assert row["prefill_instance"] is None
    # D's last request is the plain one after a fall-back, and D never waits for a failed P leg.
    bodies = [post.fields for engine in proxy.engines for post in engine.posts]
    pulls = [body for body in bodies if (body.get("kv_transfer_params") or {}).get("do_remote_prefill")]
    assert len(pulls) == (0 if case.reason.startswith("fell_back_p") else 1)
    assert len([body for body in bodies if not body.get("kv_transfer_params")]) == case.reason.startswith("fell_back")
    await proxy.nothing_left()


async def restarts_after_its_answer(talk: Talk) -> None:
    await good(talk)
    talk.engine.engine_id = "another life"


@pytest.mark.parametrize("stream", [True, False])
async def test_p_that_vanishes_while_d_pulls_is_noticed_at_once(start_chaos: StartChaos, stream: bool) -> None:
    proxy = await start(start_chaos, on(D, at(BEFORE, faults.hang)), first_token_timeout_s=30.0)
    request = asyncio.create_task(proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream}))
    await proxy.until(lambda: sum(engine.busy for engine in proxy.engines) == 1 and len(posts(proxy)) == 2)
    await next(engine for engine in proxy.engines if not engine.busy).stop()
    answer = await request
    assert answer.content == (b"".join(EVENTS) if stream else good_body())
    assert (await proxy.rows())[0]["offload_reason"] == "fell_back_p_gone"
    await proxy.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_p_that_refuses_is_out_and_d_answers(start_chaos: StartChaos, stream: bool) -> None:
    proxy = await start(start_chaos, good)
    await proxy.engines[1].stop()
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert answer.content == (b"".join(EVENTS) if stream else good_body())
    [row] = await proxy.rows()
    assert (row["instance"], row["offload_reason"], row["outcome"]) == ("inst-0", "fell_back_p_error", "ok")
    assert not proxy.instance(1).healthy
    await proxy.nothing_left()


@pytest.mark.parametrize("content", [b"\0\0\0", b"[]", b'{"0": 5}', b"{}"])
async def test_a_p_with_an_invalid_identity_is_not_pulled_from(start_chaos: StartChaos, content: bytes) -> None:
    async def nonsense(talk: Talk) -> None:
        await talk.send(head("200 OK", f"content-length: {len(content)}") + content)

    proxy = await start(start_chaos, good)
    for engine in proxy.engines:
        engine.probe_fault = nonsense
    answer = await proxy.client.post("/v1/completions", json=HEAVY)
    assert answer.content == good_body()
    assert (await proxy.rows())[0]["offload_reason"] == "fell_back_p_identity"
    await proxy.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_both_legs_failing_on_every_engine_is_one_clean_error(start_chaos: StartChaos, stream: bool) -> None:
    proxy = await start(start_chaos, at(BEFORE, faults.close), count=3)
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "upstream_error"
    await proxy.nothing_left()


@pytest.mark.parametrize("leg", [P, D])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_during_a_leg_leaves_nothing_behind(
    start_chaos: StartChaos, leg: str, stream: bool
) -> None:
    proxy = await start(
        start_chaos, on(leg, at(BEFORE, faults.hang)), prefill_timeout_s=30.0, first_token_timeout_s=30.0
    )
    request = asyncio.create_task(proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream}))
    await proxy.until(lambda: len(posts(proxy)) == (1 if leg == P else 2))
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await proxy.nothing_left()
    [row] = await proxy.rows()
    assert row["outcome"] == "client_gone"


def posts(proxy: Chaos) -> list[Any]:
    return [post for engine in proxy.engines for post in engine.posts]
