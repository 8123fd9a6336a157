"""Placements of ``joint`` on real engines: the same answers as on one engine, also when a hand-off fails."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.engines.conftest import StartProxy
from tests.engines.relay import Relay
from tests.engines.rig import BLOCK, REAL_ENGINES, Engines, Proxy, fresh_prompt, many, until

pytestmark = REAL_ENGINES

P, D, JUDGE = 0, 1, 3
STREAMS = 4
LEG_BOUND_S = 3.0
PULLED = "vllm:external_prefix_cache_hits_total"
JOINT = {
    "name": "joint",
    # A long prefill among streams on D costs each of them as long; nothing else speaks for a hand-off of so few tokens.
    "params": {"heavy_tokens": 500, "max_own_loss": 1000.0, "stream_s": 0.0, "queue_cost": 0.0},
}
PRICED_AS = "nvlink"
"""The tiny model's KV moves faster than the price of TCP for a real model's says."""

Fault = Callable[[Engines, Relay, Relay, Relay], None]


@asynccontextmanager
async def streams_on(engines: Engines, proxy: Proxy) -> AsyncIterator[None]:
    """``STREAMS`` answers that D decodes until the end of the block."""
    bodies = [proxy.body(fresh_prompt(40), max_tokens=30_000, ignore_eos=True, stream=True) for _ in range(STREAMS)]
    async with many([proxy.say(body) for body in bodies]):

        async def decoding() -> bool:
            row = await proxy.instance(engines.name(D))
            return bool(row["requests"] == STREAMS and not row["prefilling"])

        await until(decoding, "D decodes its streams")
        yield


def is_pull(body: dict[str, Any]) -> bool:
    return bool(body.get("kv_transfer_params", {}).get("do_remote_prefill"))


async def test_placements_and_pulls_of_cached_prefixes_do_not_change_the_answer(
    engines: Engines, start_proxy: StartProxy
) -> None:
    # Tokens are compared here, not times: the bounds allow for two busy processors.
    bounds = {"prefill_timeout_s": 30.0, "first_token_timeout_s": 25.0}
    proxy = await start_proxy(
        P, D, roles={P: "kv_producer", D: "kv_consumer"}, transport=PRICED_AS, policy=JOINT, offload=bounds
    )
    alone = await start_proxy(JUDGE, offload={"planner": "never", "params": {}})
    turns = []
    async with streams_on(engines, proxy):
        for _ in range(4):
            prompt = fresh_prompt(1_600)
            # Of the second turn P has the beginning cached and computes the rest, and D pulls what it lacks.
            for tokens in (0, 700):
                prompt = [*prompt, *fresh_prompt(tokens)]
                before = await engines.total(PULLED, D)
                said = await proxy.say(proxy.body(prompt))
                row = await proxy.row(said.request_id)
                assert row is not None
                turns.append((prompt, said, row, await engines.total(PULLED, D) - before))
                prompt = [*prompt, *said.token_ids]
    handed = [turn for turn in turns if turn[2]["offload_reason"] == "chosen"]
    assert len(handed) >= len(turns) / 2, "\n".join(repr(row["offload_inputs"]) for _, _, row, _ in turns)
    for prompt, _, row, pulled in handed:
        assert (row["planner"], row["prefill_instance"], row["instance"]) == ("joint", engines.name(P), engines.name(D))
        assert 0 < pulled <= len(prompt)
    # Some second turn was computed on P from its cached beginning.
    assert any(row["actual_cached_tokens"] >= 1_600 - BLOCK for _, _, row, _ in handed)
    for prompt, said, _, _ in turns:
        assert (await alone.say(alone.body(prompt))).answer == said.answer
    await proxy.settled()
    await engines.until_idle(P, D)


def p_hangs(engines: Engines, p: Relay, d: Relay, bootstrap: Relay) -> None:
    async def hang(path: str, body: dict[str, Any]) -> dict[str, Any]:
        engines.signal(P, signal.SIGSTOP)
        return body

    p.before = hang


def p_cannot_be_named(engines: Engines, p: Relay, d: Relay, bootstrap: Relay) -> None:
    async def cut(path: str, body: dict[str, Any]) -> None:
        await bootstrap.close_port()

    p.after = cut


def transfer_is_unknown(engines: Engines, p: Relay, d: Relay, bootstrap: Relay) -> None:
    async def misname(path: str, body: dict[str, Any]) -> dict[str, Any]:
        params = {**body.get("kv_transfer_params", {}), "transfer_id": "xfer-unknown"}
        return {**body, "kv_transfer_params": params} if is_pull(body) else body

    d.before = misname


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (p_hangs, "fell_back_p_timeout"),
        (p_cannot_be_named, "fell_back_p_identity"),
        (transfer_is_unknown, "fell_back_d_timeout"),
    ],
)
async def test_a_placement_that_fails_is_answered_by_d(
    engines: Engines, start_proxy: StartProxy, fault: Fault, reason: str
) -> None:
    bootstrap_url = engines.file.bootstrap_url(P)
    assert bootstrap_url is not None
    relays: list[Relay] = []
    start: Callable[[str], Awaitable[Relay]] = start_proxy.relay
    for url in (engines.file.url(P), engines.file.url(D), bootstrap_url):
        relays.append(await start(url))
    p, d, bootstrap = relays
    proxy = await start_proxy(
        P,
        D,
        roles={P: "kv_producer", D: "kv_consumer"},
        urls={P: p.url, D: d.url},
        bootstraps={P: bootstrap.url},
        transport=PRICED_AS,
        policy=JOINT,
        offload={
            "prefill_timeout_s": LEG_BOUND_S if fault is p_hangs else 30.0,
            "first_token_timeout_s": LEG_BOUND_S,
            "token_timeout_s": 0.05,
            "abandoned_s": 2.0,
            "query_timeout_s": 10.0,
        },
    )
    alone = await start_proxy(JUDGE, offload={"planner": "never", "params": {}})
    async with streams_on(engines, proxy):
        fault(engines, p, d, bootstrap)
        body = proxy.body(fresh_prompt(1_600))
        said = await proxy.say(body)
        row = await proxy.row(said.request_id)
        assert row is not None
        p.before = p.after = d.before = None
        engines.resume_all()
    assert (row["planner"], row["offload_reason"], row["instance"]) == ("joint", reason, engines.name(D)), row
    assert said.answer == (await alone.say(alone.body(body["prompt"]))).answer
    await proxy.settled()
    await engines.until_idle(P, D)
