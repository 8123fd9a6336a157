"""Every way a hand-off between real engines fails: the client gets the right answer, in time, and nothing is leaked.

vLLM 0.18.1 itself hangs in nearly all of these cases. This file reproduces the table in docs/engines.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import uuid
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engines.conftest import StartProxy
from tests.engines.relay import Relay
from tests.engines.rig import ABORT_S, REAL_ENGINES, Engines, Proxy, Said, fresh_prompt, until

pytestmark = REAL_ENGINES

P, D, OTHER, JUDGE = 0, 1, 2, 3
IN_USE = "vllm:kv_cache_usage_perc"
LEG_BOUND_S = 5.0
"""Time limit of a leg that another event ends before it, or that an engine answers after it."""
HANGS_S = 3.0
"""Time limit of a leg that never ends, before the request is answered without a hand-off."""
ENOUGH_S = 25.0
"""Time limit of legs that are to succeed: a busy machine must not make them fail."""
PATIENT = {"first_byte_s": 30.0, "total_s": 60.0, "idle_s": 15.0}
"""Bounds of requests without a hand-off."""
IN_TIME_S = 60.0
"""Answer to any of these requests: the bounds that one waits for add up to less than 40 s. vLLM alone never answers."""
NEVER_S = 3600.0
WATCHED = [(0.5, LEG_BOUND_S, "fell_back_p_gone"), (NEVER_S, HANGS_S, "fell_back_d_timeout")]
"""Interval at which the proxy looks at P, bound on D's first token, and which of them ends the pull."""
ABANDONED_S = 2.0
"""Time that a hanging pull stays open here; a D that runs has seats for all, so no queued leg is cut."""


@dataclass
class Pair:
    """A proxy over one P and one D, with relays before both and before P's bootstrap server."""

    engines: Engines
    proxy: Proxy
    alone: Proxy
    p: Relay
    d: Relay
    bootstrap: Relay

    async def check(self, expected: set[str], body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send one offloaded request and check what must hold for every outcome of the hand-off. Returns its row."""
        body = body or self.proxy.body(fresh_prompt(700))
        started_s = time.monotonic()
        said = await self.proxy.say(body)
        took_s = time.monotonic() - started_s
        return await self.judge(said, expected, took_s, body)

    async def judge(self, said: Said, expected: set[str], took_s: float, body: dict[str, Any]) -> dict[str, Any]:
        row = await self.proxy.row(said.request_id)
        assert row is not None
        assert row["offload_reason"] in expected, row
        assert said.answer == (await self.alone.say(body)).answer
        assert took_s < IN_TIME_S
        self.calm()
        stats = await self.proxy.settled()
        assert stats["requests"]["outcomes"] == {"ok": stats["requests"]["finished"]}
        metrics = (await self.proxy.client.get("/metrics")).text
        assert f'warmroute_offloads_total{{reason="{row["offload_reason"]}"}}' in metrics
        await self.engines.until_idle(P, D)
        return row

    def calm(self) -> None:
        """Reset: relays pass everything on, engines run."""
        for relay in (self.p, self.d, self.bootstrap):
            relay.before = relay.after = relay.change = None
        self.engines.resume_all()


async def start_pair(
    engines: Engines, start_proxy: StartProxy, *more: int, timeouts: dict[str, float] = PATIENT, **offload: Any
) -> Pair:
    bootstrap_url = engines.file.bootstrap_url(P)
    assert bootstrap_url is not None
    p = await start_proxy.relay(engines.file.url(P))
    d = await start_proxy.relay(engines.file.url(D))
    bootstrap = await start_proxy.relay(bootstrap_url)
    proxy = await start_proxy(
        P,
        D,
        *more,
        roles={P: "kv_producer", D: "kv_consumer", **dict.fromkeys(more, "kv_consumer")},
        urls={P: p.url, D: d.url},
        bootstraps={P: bootstrap.url},
        offload={
            "prefill_timeout_s": ENOUGH_S,
            "first_token_timeout_s": LEG_BOUND_S,
            "token_timeout_s": 0.05,
            "abandoned_s": ABANDONED_S,
            "query_timeout_s": 10.0,
            "watch_interval_s": 0.5,
            **offload,
        },
        timeouts=timeouts,
    )
    alone = await start_proxy(JUDGE, offload={"planner": "never", "params": {}})
    return Pair(engines, proxy, alone, p, d, bootstrap)


def pulls(body: dict[str, Any]) -> bool:
    return bool(body.get("kv_transfer_params", {}).get("do_remote_prefill"))


def with_params(body: dict[str, Any], **changes: str) -> dict[str, Any]:
    return {**body, "kv_transfer_params": {**body["kv_transfer_params"], **changes}}


# --- the engine id is wrong ---


@pytest.mark.parametrize(("watch_interval_s", "first_token_timeout_s", "reason"), WATCHED)
async def test_stale_engine_id(
    engines: Engines, start_proxy: StartProxy, watch_interval_s: float, first_token_timeout_s: float, reason: str
) -> None:
    """The proxy learned an engine id that P no longer has when D asks for it: D waits forever.

    Watching P ends this at the next check; without it the bound on D's first token does.
    """
    bounds: dict[str, Any] = {"watch_interval_s": watch_interval_s, "first_token_timeout_s": first_token_timeout_s}
    pair = await start_pair(engines, start_proxy, **bounds)
    engine_id = (await pair.proxy.instance(engines.name(P)))["engine_id"].encode()
    pair.bootstrap.change = lambda answer: answer.replace(engine_id, b"0" * 8 + engine_id[8:])

    async def renamed() -> bool:
        return bool((await pair.proxy.instance(engines.name(P)))["engine_id"] != engine_id.decode())

    await until(renamed, "the proxy has P's old engine id")

    async def right_from_now_on(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if pulls(body):
            pair.bootstrap.change = None
        return body

    pair.d.before = right_from_now_on
    await pair.check({reason})


async def test_p_restarts_between_leg_and_query(engines: Engines, start_proxy: StartProxy) -> None:
    """Another engine id after the P leg than before it: no D leg is sent."""
    pair = await start_pair(engines, start_proxy)
    engine_id = (await pair.proxy.instance(engines.name(P)))["engine_id"].encode()

    async def rename(path: str, body: dict[str, Any]) -> None:
        pair.bootstrap.change = lambda answer: answer.replace(engine_id, b"f" * 8 + engine_id[8:])

    pair.p.after = rename
    await pair.check({"fell_back_p_identity"})
    assert not any(pulls(body) for body in pair.d.bodies)


# --- the bootstrap server cannot be reached ---


async def test_bootstrap_unreachable_after_the_p_leg(engines: Engines, start_proxy: StartProxy) -> None:
    pair = await start_pair(engines, start_proxy)

    async def cut(path: str, body: dict[str, Any]) -> None:
        await pair.bootstrap.close_port()

    pair.p.after = cut
    await pair.check({"fell_back_p_identity"})
    assert not any(pulls(body) for body in pair.d.bodies)


@pytest.mark.parametrize(("watch_interval_s", "first_token_timeout_s", "reason"), WATCHED)
async def test_bootstrap_unreachable_for_d(
    engines: Engines, start_proxy: StartProxy, watch_interval_s: float, first_token_timeout_s: float, reason: str
) -> None:
    bounds: dict[str, Any] = {"watch_interval_s": watch_interval_s, "first_token_timeout_s": first_token_timeout_s}
    pair = await start_pair(engines, start_proxy, **bounds)

    async def cut(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if not pulls(body):
            return body
        await pair.bootstrap.close_port()
        # A D that has pulled from P keeps P's address. This one pulls for the first time.
        return with_params(body, remote_engine_id=str(uuid.uuid4()))

    pair.d.before = cut
    await pair.check({reason})


async def test_a_d_that_has_met_p_needs_no_bootstrap(engines: Engines, start_proxy: StartProxy) -> None:
    pair = await start_pair(engines, start_proxy, watch_interval_s=NEVER_S, first_token_timeout_s=ENOUGH_S)
    await pair.check({"chosen"})

    async def cut(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if pulls(body):
            await pair.bootstrap.close_port()
        return body

    pair.d.before = cut
    await pair.check({"chosen"})


# --- the transfer is not, or no longer, what P has ---


async def test_expired_at_p(engines: Engines, start_proxy: StartProxy) -> None:
    """D pulls after P has dropped the KV. P drops it only at its next step, so the test causes one."""
    pair = await start_pair(engines, start_proxy, first_token_timeout_s=ABORT_S + 9.0)
    # Not nothing: an engine that was a D keeps the blocks of every pull that failed in an earlier test.
    before = (await engines.metrics(P))[IN_USE]

    async def too_late(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if pulls(body):
            await asyncio.sleep(ABORT_S + 1)
            await engines.post(P, pair.proxy.body(fresh_prompt(20)))
            await asyncio.sleep(0.5)
            await engines.post(P, pair.proxy.body(fresh_prompt(20)))
        return body

    pair.d.before = too_late
    await pair.check({"fell_back_d_timeout"})
    # P dropped the blocks of this very leg, and has its room back.
    leg = json.loads(pair.p.answers[0])["id"]
    assert re.search(rf"Request {leg}\S* timed out after {ABORT_S} seconds without being sent", engines.log(P))
    assert (await engines.metrics(P))[IN_USE] < before + 0.001


async def test_unknown_transfer_id(engines: Engines, start_proxy: StartProxy) -> None:
    pair = await start_pair(engines, start_proxy, first_token_timeout_s=HANGS_S)

    async def misname(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return with_params(body, transfer_id="xfer-unknown") if pulls(body) else body

    pair.d.before = misname
    await pair.check({"fell_back_d_timeout"})


async def test_reused_transfer_id(engines: Engines, start_proxy: StartProxy) -> None:
    pair = await start_pair(engines, start_proxy, first_token_timeout_s=ENOUGH_S)
    await pair.check({"chosen"})
    used = next(body for body in pair.d.bodies if pulls(body))["kv_transfer_params"]["transfer_id"]
    pair = await start_pair(engines, start_proxy, first_token_timeout_s=HANGS_S)

    async def reuse(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return with_params(body, transfer_id=used) if pulls(body) else body

    pair.d.before = reuse
    await pair.check({"fell_back_d_timeout"})


# --- an engine hangs ---


async def test_p_hangs_in_its_leg(engines: Engines, start_proxy: StartProxy) -> None:
    pair = await start_pair(engines, start_proxy, prefill_timeout_s=HANGS_S)

    async def hang(path: str, body: dict[str, Any]) -> dict[str, Any]:
        engines.signal(P, signal.SIGSTOP)
        return body

    pair.p.before = hang
    await pair.check({"fell_back_p_timeout"})


async def test_p_hangs_after_its_leg(engines: Engines, start_proxy: StartProxy) -> None:
    pair = await start_pair(engines, start_proxy, query_timeout_s=2.0)

    async def hang(path: str, body: dict[str, Any]) -> None:
        engines.signal(P, signal.SIGSTOP)

    pair.p.after = hang
    await pair.check({"fell_back_p_identity"})


async def test_p_hangs_while_d_pulls(engines: Engines, start_proxy: StartProxy) -> None:
    """A slow P is not a dead one, so the watch does not end this: the bound on D's first token does."""
    pair = await start_pair(engines, start_proxy, first_token_timeout_s=HANGS_S)

    async def hang(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if pulls(body):
            engines.signal(P, signal.SIGSTOP)
        return body

    pair.d.before = hang
    await pair.check({"fell_back_d_timeout"})


@pytest.mark.parametrize("stream", [False, True])
async def test_d_hangs_after_the_pull_began(engines: Engines, start_proxy: StartProxy, stream: bool) -> None:
    """D answers neither the pull nor the plain request that follows it: another instance answers."""
    # D reads the leg when it runs again: closed by then, it may end D's engine core (decision 8), for the next test.
    short = {**PATIENT, "first_byte_s": LEG_BOUND_S, "total_s": 14.0}
    pair = await start_pair(
        engines, start_proxy, OTHER, timeouts=short, abandoned_s=60.0, first_token_timeout_s=HANGS_S
    )
    body = pair.proxy.body(fresh_prompt(700), stream=stream)
    hung: list[str] = []

    async def hang(path: str, leg: dict[str, Any]) -> dict[str, Any]:
        if pulls(leg) and not hung:
            engines.signal(D, signal.SIGSTOP)
            hung.append(path)
        return leg

    pair.d.before = hang
    started_s = time.monotonic()
    said = await pair.proxy.say(body)
    if not hung:  # the policy began with the other one; now D is next
        started_s = time.monotonic()
        body = pair.proxy.body(fresh_prompt(700), stream=stream)
        said = await pair.proxy.say(body)
    assert hung
    row = await pair.judge(said, {"chosen", "fell_back_d_timeout"}, time.monotonic() - started_s, body)
    assert row["instance"] == engines.name(OTHER)
    assert "fell_back_d_timeout" in {attempt.get("offload") for attempt in row["attempts"]}


async def test_a_pair_that_fails_again_and_again_is_left_alone(engines: Engines, start_proxy: StartProxy) -> None:
    """After three failures in a row the pair gets no hand-offs for a while: requests no longer wait for the bound."""
    pair = await start_pair(engines, start_proxy, first_token_timeout_s=2.0)

    async def misname(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return with_params(body, transfer_id="xfer-unknown") if pulls(body) else body

    for _ in range(3):
        pair.d.before = misname
        await pair.check({"fell_back_d_timeout"})
    sent = len(pair.p.bodies)
    await pair.check({"pair_broken"})
    assert len(pair.p.bodies) == sent
