"""Clients that leave at any moment of a hand-off: both engines stop working for them, the ledger returns to zero."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from tests.engines.conftest import StartProxy
from tests.engines.rig import REAL_ENGINES, Engines, Proxy, Said, fresh_prompt

pytestmark = REAL_ENGINES

WORKERS = (0, 1, 2)


async def leave_after(proxy: Proxy, body: dict[str, Any], seconds: float) -> str:
    """Send a request and disconnect."""
    try:
        async with asyncio.timeout(seconds):
            async with proxy.client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass
            return "answered"
    except TimeoutError:
        return "left"
    except httpx.HTTPError as error:
        return repr(error)


async def test_clients_leave_at_random_moments(engines: Engines, start_proxy: StartProxy) -> None:
    proxy = await start_proxy(*WORKERS)
    restarts = [engines.state(number).restarts for number in WORKERS]
    draw = random.Random(11)
    await proxy.say(proxy.body(fresh_prompt(2000)))  # duration of each stage, warmed up
    ends: list[str] = []
    for _ in range(6):
        batch = [
            leave_after(
                proxy,
                proxy.body(fresh_prompt(draw.randrange(600, 4000)), stream=draw.random() < 0.5, max_tokens=200),
                draw.choice([0.02, 0.05, 0.1, 0.2, 0.4, 0.8]) * draw.uniform(0.5, 1.5),
            )
            for _ in range(8)
        ]
        ends += await asyncio.gather(*batch)
    assert ends.count("left") >= len(ends) / 2, ends
    await proxy.settled()
    await engines.until_idle(*WORKERS)
    assert [engines.state(number).restarts for number in WORKERS] == restarts
    assert "client_gone" in {row["outcome"] for row in await proxy.rows()}
    reasons: list[str] = []
    # One after the other: on a busy machine several at once may take longer than the bounds learned before.
    while "chosen" not in reasons:
        assert len(reasons) < 12, reasons
        assert (await proxy.say(proxy.body(fresh_prompt(900)))).answer
        reasons.append((await proxy.rows())[-1]["offload_reason"])
    await proxy.settled()


async def test_a_client_leaves_at_each_stage(engines: Engines, start_proxy: StartProxy) -> None:
    """In the P leg, between the legs, while D pulls, and in D's stream."""
    for stage in ("p_leg", "between", "pull", "stream"):
        p_relay = await start_proxy.relay(engines.file.url(0))
        d_relay = await start_proxy.relay(engines.file.url(1))
        proxy = await start_proxy(
            0, 1, roles={0: "kv_producer", 1: "kv_consumer"}, urls={0: p_relay.url, 1: d_relay.url}
        )
        reached = asyncio.Event()

        async def hold(path: str, body: dict[str, Any], reached: asyncio.Event = reached) -> dict[str, Any]:
            reached.set()
            await asyncio.sleep(1)
            return body

        async def hold_answer(path: str, body: dict[str, Any], reached: asyncio.Event = reached) -> None:
            reached.set()
            await asyncio.sleep(1)

        if stage == "p_leg":
            p_relay.before = hold
        elif stage == "between":
            p_relay.after = hold_answer
        elif stage == "pull":
            d_relay.before = hold

        def streaming(said: Said, reached: asyncio.Event = reached) -> None:
            reached.set()

        body = proxy.body(fresh_prompt(1500), stream=True, max_tokens=4000, ignore_eos=True)
        async with asyncio.timeout(60):
            asking = asyncio.create_task(proxy.say(body, on_event=streaming))
            try:
                await reached.wait()
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        await proxy.settled()
        await engines.until_idle(0, 1)
        [row] = await proxy.rows()
        assert row["outcome"] == "client_gone", (stage, row)
        assert [bool(p_relay.bodies), bool(d_relay.bodies)] == [True, stage in {"pull", "stream"}], stage
        p_relay.before = p_relay.after = d_relay.before = None
        said = await proxy.say(proxy.body(fresh_prompt(700)))
        assert said.answer
