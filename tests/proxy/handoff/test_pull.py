"""While D pulls: P's death is detected, D's lateness is not counted, and a client that leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from proxy.handoff.legs import HandOff
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

HEAVY = {"model": "stub", "prompt": list(range(400)), "max_tokens": 4}
CLASSES = {"medium_tokens": 50, "heavy_tokens": 100}
RARELY_PROBED = {"interval_s": 60.0, "timeout_s": 2.0, "unhealthy_after": 1}


async def start(start_proxy: StartProxy, engines: list[StubEngine], **more: Any) -> Running:
    offload = {
        "planner": "threshold",
        "params": {"min_decode_requests": 0},
        "watch_interval_s": 0.05,
        **more.pop("offload", {}),
    }
    return await start_proxy(engines=engines, offload=offload, classes=CLASSES, **{"role": "kv_both", **more})


def pulling(engine: StubEngine) -> bool:
    return engine.running == 1 and bool((engine.seen[-1].get("kv_transfer_params") or {}).get("do_remote_prefill"))


async def ask_until_pull(proxy: Running, **body: Any) -> tuple[asyncio.Task[httpx.Response], StubEngine, StubEngine]:
    """A request in flight whose D is pulling: the request, P and D."""
    request = asyncio.create_task(proxy.client.post("/v1/completions", json={**HEAVY, **body}))
    await proxy.until(lambda: any(pulling(engine) for engine in proxy.engines))
    d = next(engine for engine in proxy.engines if pulling(engine))
    p = next(engine for engine in proxy.engines if engine is not d)
    return request, p, d


async def fell_back(proxy: Running, request: asyncio.Task[httpx.Response], d: StubEngine) -> dict[str, Any]:
    """The one row, after checking that the client was answered by D alone."""
    answer = await request
    assert answer.status_code == 200
    assert "w0 " in answer.text or answer.json()["choices"][0]["text"] == "w " * d.tokens
    assert "error" not in answer.text
    assert "x-warmroute-prefill-instance" not in answer.headers
    assert "kv_transfer_params" not in d.seen[-1]
    assert d.seen[-1]["max_tokens"] == 4
    await proxy.until(lambda: d.aborted == 1)  # the pull itself
    [row] = await proxy.rows()
    assert (row["outcome"], row["prefill_instance"]) == ("ok", None)
    assert "transfer" not in row["legs"]
    assert ledger_is_zero(await proxy.settled())
    return row


@pytest.mark.parametrize("stream", [False, True])
async def test_p_that_dies_while_d_pulls_is_noticed_long_before_the_bound(
    start_proxy: StartProxy, stream: bool
) -> None:
    proxy = await start(start_proxy, [StubEngine(mode="pull_hang") for _ in range(2)])
    request, p, d = await ask_until_pull(proxy, stream=stream)
    await p.stop()
    row = await fell_back(proxy, request, d)
    assert row["offload_reason"] == "fell_back_p_gone"
    assert "disappeared" in row["attempts"][0]["error"]


async def test_p_that_restarts_while_d_pulls_is_noticed_too(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, [StubEngine(mode="pull_hang") for _ in range(2)])
    request, p, d = await ask_until_pull(proxy)
    p.engine_id = "another life"
    row = await fell_back(proxy, request, d)
    assert (row["offload_reason"], row["attempts"][0]["error"]) == (
        "fell_back_p_gone",
        "P restarted while D pulled",
    )


async def test_a_p_with_a_slow_identity_answer_is_waited_for(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    identity = HandOff._identity

    async def counting(self: HandOff, *args: Any) -> str | None:
        nonlocal asked
        asked += 1
        return await identity(self, *args)

    monkeypatch.setattr(HandOff, "_identity", counting)
    engines = [StubEngine(mode="pull_hang") for _ in range(2)]
    proxy = await start(start_proxy, engines, health=RARELY_PROBED)
    request, p, d = await ask_until_pull(proxy)
    # Only now: P's identity is checked before the pull too.
    proxy.core.handoff.apply(proxy.core.settings.offload.model_copy(update={"query_timeout_s": 0.1}))
    before = asked
    p.query_delay_s = 30.0
    await proxy.until(lambda: asked >= before + 4)
    assert not request.done()
    assert pulling(d)
    p.query_delay_s, p.engine_id = 0.0, "another life"  # the watch is still running
    assert (await fell_back(proxy, request, d))["offload_reason"] == "fell_back_p_gone"


async def test_the_lateness_of_a_pull_does_not_take_d_out_of_service(start_proxy: StartProxy) -> None:
    engines = [StubEngine(mode="pull_hang") for _ in range(2)]
    proxy = await start(start_proxy, engines, offload={"first_token_timeout_s": 0.2}, health=RARELY_PROBED)
    request = asyncio.create_task(proxy.client.post("/v1/completions", json=HEAVY))
    await request
    d = next(engine for engine in engines if len(engine.seen) == 2)  # the pull, and the request without it
    row = await fell_back(proxy, request, d)
    assert row["offload_reason"] == "fell_back_d_timeout"
    assert proxy.core.instances.healthy() == {"inst-0", "inst-1"}
    assert [instance.last_error for instance in proxy.core.instances] == [None, None]


async def test_a_request_without_a_hand_off_that_is_late_does_take_its_instance_out(start_proxy: StartProxy) -> None:
    engines = [StubEngine(mode="hang")]
    proxy = await start(start_proxy, engines, timeouts={"first_byte_s": 0.2}, health=RARELY_PROBED)
    assert (await proxy.client.post("/v1/completions", json={**HEAVY, "stream": True})).status_code == 504
    assert proxy.core.instances.healthy() == set()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_during_the_pull_leaves_nothing_behind(start_proxy: StartProxy, stream: bool) -> None:
    proxy = await start(start_proxy, [StubEngine(mode="pull_hang") for _ in range(2)])
    request, _, d = await ask_until_pull(proxy, stream=stream)
    ledger = (await proxy.client.get("/stats")).json()["ledger"]
    assert (ledger["offloads"], ledger["held_tokens"], ledger["requests"]) == (1, 400, 1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await proxy.until(lambda: d.aborted == 1)
    assert ledger_is_zero(await proxy.settled())
    # The engine does not know that no D will pull: P's room stays taken until its abort timeout.
    p_name = next(row["prefill_instance"] for row in await proxy.rows())
    assert proxy.core.router.state.holds.tokens(p_name, asyncio.get_running_loop().time()) == 400
    assert (await proxy.rows())[0]["outcome"] == "client_gone"


async def test_client_that_leaves_during_the_prefill_leg_leaves_nothing_behind(start_proxy: StartProxy) -> None:
    engines = [StubEngine(prefill_s=30), StubEngine(prefill_s=30)]
    proxy = await start(start_proxy, engines)
    request = asyncio.create_task(proxy.client.post("/v1/completions", json=HEAVY))
    await proxy.until(lambda: sum(engine.running for engine in engines) == 1)
    ledger = (await proxy.client.get("/stats")).json()["ledger"]
    assert (ledger["offloads"], ledger["held_tokens"], ledger["requests"], ledger["prefilling"]) == (1, 0, 2, 2)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await proxy.until(lambda: sum(engine.aborted for engine in engines) == 1)
    assert ledger_is_zero(await proxy.settled())
    rows = (await proxy.client.get("/instances")).json()["instances"]
    assert [row["index_blocks"] for row in rows] == [0, 0]
    assert sum(len(engine.seen) for engine in engines) == 1


async def test_the_slot_of_an_offload_is_taken_until_d_answers(start_proxy: StartProxy) -> None:
    engines = [StubEngine(mode="pull_hang") for _ in range(2)]
    params = {"min_decode_requests": 0, "max_in_flight": 1}
    proxy = await start(start_proxy, engines, offload={"params": params})
    request, p, _ = await ask_until_pull(proxy)
    other = {**HEAVY, "prompt": list(range(1_000, 1_400))}
    assert (await proxy.client.post("/v1/completions", json=other)).status_code == 200
    assert (await proxy.rows())[0]["offload_reason"] == "cap_reached"
    p.engine_id = "another life"
    await request
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pull_that_was_given_up_is_closed_only_after_its_first_byte(
    start_proxy: StartProxy, stream: bool
) -> None:
    """Closed while D has it queued, it would crash vLLM 0.18.1's engine core with all its requests."""
    arrives = asyncio.Event()
    engines = [StubEngine(pulls_end=arrives) for _ in range(2)]
    proxy = await start(start_proxy, engines, offload={"abandoned_s": 20.0})
    request, _, d = await ask_until_pull(proxy, stream=stream)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await proxy.until(lambda: proxy.core.breakdown.finished == 1)
    stats = (await proxy.client.get("/stats")).json()
    assert stats["requests"]["abandoned_pulls"] == 1
    assert (stats["ledger"]["requests"], stats["ledger"]["offloads"]) == (0, 0)
    assert stats["ledger"]["held_tokens"] == 400, "its room on D is counted while it lasts"
    assert (d.running, d.aborted) == (1, 0)
    arrives.set()
    assert ledger_is_zero(await proxy.settled())
    await proxy.until(lambda: d.running == 0)
    assert proxy.core.instances.healthy() == {"inst-0", "inst-1"}


async def test_pulls_given_up_are_cut_when_the_proxy_ends(start_proxy: StartProxy) -> None:
    engines = [StubEngine(mode="pull_hang") for _ in range(2)]
    proxy = await start(start_proxy, engines, offload={"abandoned_s": 3600.0, "first_token_timeout_s": 0.1})
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": True})
    assert answer.status_code == 200
    assert len(proxy.core.abandoned) == 1
    await proxy.core.abandoned.close(0.1)
    assert len(proxy.core.abandoned) == 0
    await proxy.until(lambda: sum(engine.aborted for engine in engines) == 1)
    assert ledger_is_zero(await proxy.settled())
