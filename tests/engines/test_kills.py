"""Engines killed with all their processes: only requests they had begun to answer are lost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.engines.conftest import StartProxy
from tests.engines.hand_offs.test_failures import ENOUGH_S, OTHER, D, P, pulls, start_pair, with_params
from tests.engines.rig import REAL_ENGINES, Engines, Proxy, Said, fresh_prompt, many, until

pytestmark = REAL_ENGINES

STREAMS = 20


async def test_p_killed_between_the_legs(engines: Engines, start_proxy: StartProxy) -> None:
    # The hand-off at the end is to succeed, with an engine that has just started.
    pair = await start_pair(engines, start_proxy, first_token_timeout_s=ENOUGH_S)

    async def kill(path: str, body: dict[str, Any]) -> None:
        engines.kill(P)

    pair.p.after = kill
    body = pair.proxy.body(fresh_prompt(700))
    said = await pair.proxy.say(body)
    row = await pair.proxy.row(said.request_id)
    assert row is not None
    assert row["offload_reason"] == "fell_back_p_identity", row["attempts"]
    assert said.answer == (await pair.alone.say(body)).answer
    await pair.proxy.settled()
    await back_in_service(engines, pair.proxy, P)
    pair.calm()
    await pair.check({"chosen"})


async def test_p_killed_while_d_pulls(engines: Engines, start_proxy: StartProxy) -> None:
    """D alone would wait forever; the proxy notices P's death at its next check."""
    pair = await start_pair(engines, start_proxy)

    async def kill(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if pulls(body):
            engines.kill(P)
        return body

    pair.d.before = kill
    body = pair.proxy.body(fresh_prompt(700), stream=True)
    said = await pair.proxy.say(body)
    row = await pair.proxy.row(said.request_id)
    assert row is not None
    assert row["offload_reason"] in {"fell_back_p_gone", "fell_back_d_timeout"}, row["attempts"]
    assert said.answer == (await pair.alone.say(body)).answer
    await pair.proxy.settled()
    pair.d.before = None
    await back_in_service(engines, pair.proxy, P)


async def test_a_client_that_leaves_a_queued_d_leg_harms_nobody(engines: Engines, start_proxy: StartProxy) -> None:
    """vLLM 0.18.1's engine core would die if the D leg were cut while it is queued, so it is kept open.

    (vLLM makes P free the KV, counts that as a finished pull, and does not find its request any more.)
    """
    d_relay = await start_proxy.relay(engines.file.url(D))
    proxy = await start_proxy(
        P, D, roles={P: "kv_producer", D: "kv_consumer"}, urls={D: d_relay.url}, offload={"abandoned_s": 90.0}
    )
    restarts = engines.state(D).restarts
    seats = engines.file.vllm.max_num_seqs
    assert seats is not None
    others = proxy.body(fresh_prompt(50), max_tokens=2000, ignore_eos=True)
    async with many([engines.post(D, others) for _ in range(seats)]) as taken:

        async def full() -> bool:
            return (await engines.metrics(D))["vllm:num_requests_running"] == seats

        await until(full, "D has no free seat")
        async with many([proxy.say(proxy.body(fresh_prompt(700)))]):

            async def queued() -> bool:
                asked = any(pulls(body) for body in d_relay.bodies)
                return asked and (await engines.metrics(D))["vllm:num_requests_waiting"] >= 1

            await until(queued, "the D leg is queued")

        async def left() -> bool:
            requests = (await proxy.client.get("/stats")).json()["requests"]
            return not requests["in_flight"] and requests["abandoned_pulls"] == 1

        await until(left, "the client is gone, the D leg is not")
        assert (await engines.metrics(D))["vllm:num_requests_waiting"] >= 1
        for answer in await asyncio.gather(*taken):
            assert answer["usage"]["completion_tokens"] == 2000
    [row] = await proxy.rows()
    assert row["outcome"] == "client_gone"
    await proxy.settled()
    await engines.until_idle(P, D)
    assert engines.state(D).restarts == restarts
    # Nothing was leaked: D pulled the KV when it was scheduled, and P sent it.
    assert (await proxy.say(proxy.body(fresh_prompt(700)))).answer
    assert [row["offload_reason"] for row in await proxy.rows()].count("chosen") == 2


async def test_a_d_that_keeps_what_it_never_got_asks_for_its_restart(engines: Engines, start_proxy: StartProxy) -> None:
    """vLLM 0.18.1 never frees the blocks of an abandoned pull. Only a restart does, and the proxy requests it."""
    pair = await start_pair(engines, start_proxy, OTHER, first_token_timeout_s=1.0, leak_share=0.001)
    before = (await engines.metrics(D))["vllm:kv_cache_usage_perc"]
    abandoned: list[str] = []

    async def misname(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if not pulls(body):
            return body
        abandoned.append(path)
        return with_params(body, transfer_id="xfer-unknown")

    pair.d.before = misname

    async def tried() -> bool:
        assert (await pair.proxy.say(pair.proxy.body(fresh_prompt(800)))).answer
        return bool(abandoned)

    await until(tried, "D was given a hand-off")
    await pair.proxy.settled()
    await engines.until_idle(P, D, OTHER)
    assert (await engines.metrics(D))["vllm:kv_cache_usage_perc"] > before

    async def asked() -> bool:
        return bool((await pair.proxy.instance(engines.name(D)))["recycle_wanted"])

    await until(asked, "the proxy requests a recycle of D", 30)
    sent = len(pair.d.bodies)
    for _ in range(3):
        assert (await pair.proxy.say(pair.proxy.body(fresh_prompt(100)))).answer
    assert len(pair.d.bodies) == sent

    engines.kill(D)  # as a supervisor does on this request, less gently
    pair.calm()
    await back_in_service(engines, pair.proxy, D)

    async def content() -> bool:
        return not await asked()

    await until(content, "the request is withdrawn with the old engine", 30)
    assert (await engines.metrics(D))["vllm:kv_cache_usage_perc"] < before + 0.001


async def back_in_service(engines: Engines, proxy: Proxy, number: int) -> None:
    """Wait until the supervisor has restarted it and the proxy uses it."""
    await engines.until_all_ready()
    await proxy.until_healthy(engines.name(number))


async def test_an_instance_killed_under_twenty_streams(engines: Engines, start_proxy: StartProxy) -> None:
    proxy = await start_proxy(0, 1, 2, 3, policy={"name": "least_loaded"})
    draw = random.Random(3)
    bodies = [
        proxy.body(
            # Half of them heavy: hand-offs are in progress too.
            fresh_prompt(draw.randrange(50, 150) if number % 2 else draw.randrange(600, 2000)),
            stream=True,
            max_tokens=1000,
            ignore_eos=True,
        )
        for number in range(STREAMS)
    ]
    streaming: dict[str, set[str]] = {}
    begun = asyncio.Event()

    def count(said: Said) -> None:
        if said.token_ids:
            streaming.setdefault(said.instance, set()).add(said.request_id)
        if len(streaming.get(said.instance, ())) >= 2 and sum(map(len, streaming.values())) >= STREAMS / 3:
            begun.set()

    async with many([proxy.say(body, on_event=count) for body in bodies]) as asking:
        await asyncio.wait_for(begun.wait(), 60)
        victim = engines.number(max(streaming, key=lambda name: len(streaming[name])))
        restarts = engines.state(victim).restarts
        known = await proxy.instance(engines.name(victim))
        engines.kill(victim)
        said = await asyncio.gather(*asking)

    rows = {row["request_id"]: row for row in await proxy.rows()}
    lost = 0
    for each, body in zip(said, bodies, strict=True):
        row = rows[each.request_id]
        if row["outcome"] == "stream_broken":
            lost += 1
            assert row["instance"] == engines.name(victim)
            assert each.error is not None
            assert each.error["code"] == "stream_broken"
            assert each.token_ids  # a single token may have no text
            assert not each.done
        else:
            assert row["outcome"] == "ok", row
            assert each.done
            assert len(each.token_ids) == body["max_tokens"]
    assert 1 <= lost < STREAMS
    await proxy.settled()

    # The delivered answers are right: compare with the same prompts, co-located, on an engine that was not killed.
    whole = [(each, body) for each, body in zip(said, bodies, strict=True) if each.done][:6]
    alone = await start_proxy((victim + 1) % 4, offload={"planner": "never", "params": {}})
    # At the same time, as the streams were: the engine has eight seats, and six answers take little longer than one.
    for (each, _), other in zip(whole, await asyncio.gather(*(alone.say(body) for _, body in whole)), strict=True):
        assert each.answer == other.answer

    await back_in_service(engines, proxy, victim)
    assert engines.state(victim).restarts == restarts + 1

    async def seen_as_new() -> bool:
        now = await proxy.instance(engines.name(victim))
        return bool(now["engine_id"] != known["engine_id"] and now["restarts"] == known["restarts"] + 1)

    await until(seen_as_new, "the proxy has noticed the new engine", 30)
    again = await asyncio.gather(*(proxy.say(proxy.body(fresh_prompt(600))) for _ in range(12)))
    assert all(each.answer for each in again)
    served = {row["instance"] for row in await proxy.rows()} | {row["prefill_instance"] for row in await proxy.rows()}
    assert engines.name(victim) in served
    await proxy.settled()
