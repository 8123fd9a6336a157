"""An engine that leaks the KV of abandoned pulls: the proxy requests its restart and sends it nothing meanwhile."""

from __future__ import annotations

from typing import Any

from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

CLASSES = {"medium_tokens": 50, "heavy_tokens": 100}
OFFLOAD = {"planner": "threshold", "params": {"min_decode_requests": 0}, "first_token_timeout_s": 0.2}


async def ask(proxy: Running, number: int) -> str:
    """Send one heavy request of its own; returns the instance that decoded it."""
    prompt = list(range(number * 1_000, number * 1_000 + 400))
    answer = await proxy.client.post("/v1/completions", json={"model": "stub", "prompt": prompt, "max_tokens": 4})
    assert answer.status_code == 200
    return answer.headers["x-warmroute-instance"]


async def instances(proxy: Running) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in (await proxy.client.get("/instances")).json()["instances"]}


async def recycle_metric(proxy: Running, name: str) -> bool:
    line = f'warmroute_instance_recycle_wanted{{instance="{name}"}} 1.0'
    return line in (await proxy.client.get("/metrics")).text


async def test_an_engine_that_leaks_is_rested_until_it_was_restarted(start_proxy: StartProxy) -> None:
    engines = [StubEngine(mode="pull_hang", kv_usage=0.0) for _ in range(3)]
    proxy = await start_proxy(
        engines=engines, role="kv_both", offload=OFFLOAD, classes=CLASSES, health={"interval_s": 0.05}
    )
    leaking = await ask(proxy, 0)
    engine = engines[int(leaking[-1])]
    assert [row["offload_reason"] for row in await proxy.rows()] == ["fell_back_d_timeout"]
    for usage in (0.05, 0.09, 0.3):  # climbs, as after several abandoned pulls
        assert (await instances(proxy))[leaking]["recycle_wanted"] is None
        engine.kv_usage = usage
        await proxy.until(lambda: proxy.core.instances[leaking].reported.kv_usage == engine.kv_usage)
    await proxy.until(lambda: proxy.core.instances[leaking].recycle_wanted is not None)

    row = (await instances(proxy))[leaking]
    assert row["healthy"]
    assert row["requests"] == 0
    assert "1 abandoned pull(s)" in row["recycle_wanted"]
    assert await recycle_metric(proxy, leaking)
    assert leaking not in (await proxy.client.get("/ready")).json()["healthy_instances"]
    for other in engines:
        other.mode = "ok"
    seen_before = len(engine.seen)
    assert leaking not in {await ask(proxy, number) for number in range(1, 7)}
    assert len(engine.seen) == seen_before

    await engine.stop()
    engine.kv_usage = 0.0
    await engine.restart()
    await proxy.until(lambda: leaking in proxy.core.instances.healthy())
    row = (await instances(proxy))[leaking]
    assert (row["recycle_wanted"], row["restarts"]) == (None, 1)
    assert not await recycle_metric(proxy, leaking)
    for number in range(10, 16):
        await ask(proxy, number)
    assert len(engine.seen) > seen_before
    assert ledger_is_zero(await proxy.settled())


async def test_kv_use_without_an_abandoned_pull_is_no_reason(start_proxy: StartProxy) -> None:
    engines = [StubEngine(kv_usage=0.9) for _ in range(2)]
    proxy = await start_proxy(engines=engines, role="kv_both", offload=OFFLOAD, classes=CLASSES)
    await ask(proxy, 0)
    probed = [engine.probes for engine in engines]
    await proxy.until(lambda: all(e.probes >= before + 10 for e, before in zip(engines, probed, strict=True)))
    assert {row["recycle_wanted"] for row in (await instances(proxy)).values()} == {None}
