"""Health: conditions that take an instance out and back, and the reported state."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from proxy.fleet.breaker import BreakerState
from proxy.fleet.instances import Instance, Instances
from proxy.settings import HealthSettings, InstanceSettings
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

OK = {"model": "stub", "prompt": list(range(200)), "max_tokens": 4}
QUICK = {"interval_s": 0.05, "timeout_s": 2.0, "open_s": 0.2, "open_max_s": 10.0}
PROBED_BY_HAND = {"interval_s": 600.0}


async def ask(proxy: Running, **body: Any) -> httpx.Response:
    return await proxy.client.post("/v1/completions", json={**OK, **body})


async def shown(proxy: Running, name: str = "inst-0") -> dict[str, Any]:
    rows = (await proxy.client.get("/instances")).json()["instances"]
    return next(row for row in rows if row["name"] == name)


def state(proxy: Running, name: str = "inst-0") -> BreakerState:
    return proxy.core.instances[name].breaker.state


async def probed_to_trial(proxy: Running) -> None:
    """Probe the first instance until its open time is over."""
    for _ in range(200):
        await proxy.operations.fleet.probe(proxy.core.instances["inst-0"])
        if state(proxy) is BreakerState.HALF_OPEN:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came to trial")


async def test_an_engine_whose_probe_takes_long_delays_no_other_probe(start_proxy: StartProxy) -> None:
    engines = [StubEngine() for _ in range(2)]
    proxy = await start_proxy(engines=engines, health={"interval_s": 0.05, "timeout_s": 45.0, "unhealthy_after": 1})
    slow, other = engines
    slow.metrics_delay_s = 3600
    waiting = slow.probes
    await proxy.until(lambda: slow.probes > waiting)  # its probe is in progress, for longer than this test takes
    probes = other.probes
    await proxy.until(lambda: other.probes >= probes + 10)
    await other.stop()
    await proxy.until(lambda: not proxy.core.instances["inst-1"].healthy)
    assert slow.probes == waiting + 1
    assert proxy.core.instances["inst-0"].healthy


async def test_the_error_of_a_probe_names_what_was_not_answered(start_proxy: StartProxy) -> None:
    engines = [StubEngine(metrics_delay_s=3600), StubEngine(health_delay_s=3600), StubEngine()]
    proxy = await start_proxy(engines=engines, health={"timeout_s": 0.5, "unhealthy_after": 1})
    metrics, health, _ = (each.last_error for each in proxy.core.instances)
    assert metrics is not None
    assert "GET /health was answered, but not GET /metrics within 0.5 s (health.timeout_s)" in metrics
    assert health is not None
    assert "no answer within 0.5 s (health.timeout_s): check host and port" in health


async def test_an_engine_that_reports_nothing_has_no_figures(start_proxy: StartProxy) -> None:
    engines = [StubEngine(metrics_delay_s=3600), StubEngine(running=3, kv_usage=0.25)]
    proxy = await start_proxy(engines=engines, health={**PROBED_BY_HAND, "timeout_s": 0.5, "unhealthy_after": 1})

    async def figures(name: str) -> tuple[Any, list[str]]:
        engine, lines = (await shown(proxy, name))["engine"], (await proxy.client.get("/metrics")).text.splitlines()
        own = [line for line in lines if f'instance="{name}"' in line]
        kept = ("engine_running_requests", "engine_waiting_requests", "kv_usage_ratio")
        found = [line.rpartition(" ")[2] for each in kept for line in own if f"warmroute_instance_{each}{{" in line]
        return (engine["running"], engine["waiting"], engine["kv_usage"]), found

    assert await figures("inst-0") == ((None, None, None), [])
    for _ in range(20):  # on a loaded machine a probe of the healthy one may be late too
        if (await figures("inst-1"))[0] != (None, None, None):
            break
        await proxy.operations.fleet.probe(proxy.core.instances["inst-1"])
    assert await figures("inst-1") == ((3, 0, 0.25), ["3.0", "0.0", "0.25"])
    await engines[1].stop()
    await proxy.operations.fleet.probe(proxy.core.instances["inst-1"])
    assert await figures("inst-1") == ((None, None, None), [])


async def test_the_index_takes_another_block_size_once_all_engines_have_it(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a rolling restart of the fleet."""
    engines = [StubEngine() for _ in range(3)]
    proxy = await start_proxy(engines=engines, health=PROBED_BY_HAND)

    async def probe() -> None:
        for _ in range(2):
            await proxy.operations.monitor.probe_all()

    for number, engine in enumerate(engines):
        await probe()
        assert proxy.core.router.block_tokens == 16, number
        await engine.stop()
        await proxy.operations.monitor.probe_all()
        engine.block_tokens = 64
        await engine.restart()
    await probe()
    assert proxy.core.router.block_tokens == 64
    assert {each.kv_capacity_tokens for each in proxy.core.instances} == {64 * engines[0].blocks}
    warned = [each.getMessage() for each in caplog.records if "blocks of 64 tokens, the fleet 16" in each.getMessage()]
    assert [each.split()[0] for each in warned] == ["inst-0", "inst-1"]
    assert (await ask(proxy)).status_code == 200


async def test_an_engine_that_hangs_while_its_health_endpoint_answers_stays_out_until_a_request_gets_through(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="warmroute.health")
    hung = StubEngine(mode="hang")
    proxy = await start_proxy(
        engines=[hung, StubEngine()],
        health={**QUICK, **PROBED_BY_HAND, "trial_requests": 2},
        timeouts={"first_byte_s": 0.5},
        policy={"name": "round_robin"},
    )
    while state(proxy) is not BreakerState.OPEN:
        assert (await ask(proxy, stream=True)).status_code == 200
    assert len(hung.seen) == 3
    row = await shown(proxy)
    assert (row["healthy"], row["breaker"]["state"], row["breaker"]["openings"]) == (False, "open", 1)
    assert row["breaker"]["why"] == "3 requests in a row failed, the last: no first byte within 0.5 s"
    assert row["breaker"]["until_unix_s"] is not None
    metrics = (await proxy.client.get("/metrics")).text
    assert 'warmroute_instance_breaker{instance="inst-0",state="open"} 1.0' in metrics
    assert 'warmroute_instance_breaker{instance="inst-1",state="closed"} 1.0' in metrics
    # Its probes are successful all the time, which only makes it half-open.
    await probed_to_trial(proxy)
    for _ in range(3):
        await proxy.operations.fleet.probe(proxy.core.instances["inst-0"])
    assert (await shown(proxy))["breaker"]["state"] == "half_open"
    # The trial fails: open again, for longer.
    answers = await asyncio.gather(*(ask(proxy, stream=True) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(hung.seen) <= 3 + 2, "no more than two at a time"
    assert state(proxy) is BreakerState.OPEN
    assert (await shown(proxy))["breaker"]["doublings"] == 1
    hung.mode = "ok"
    await probed_to_trial(proxy)
    while state(proxy) is not BreakerState.CLOSED:
        assert (await ask(proxy, stream=True)).status_code == 200
    assert proxy.core.instances.healthy() == {"inst-0", "inst-1"}
    row = await shown(proxy)
    assert (row["breaker"]["why"], row["breaker"]["until_unix_s"], row["breaker"]["trial_requests"]) == (None, None, 0)
    log = [record.getMessage() for record in caplog.records if record.getMessage().startswith("inst-0")]
    assert [line.split(":")[0].removeprefix("inst-0 ") for line in log] == [
        "is up",
        "is down",
        "answers its probes and is on trial",
        "is down",
        "answers its probes and is on trial",
        "passed its trial request and is up",
    ]
    assert ledger_is_zero(await proxy.settled())


async def test_a_trial_whose_client_leaves_says_nothing_and_makes_room_for_another(start_proxy: StartProxy) -> None:
    engine = StubEngine(mode="page")
    health = {**QUICK, "unhealthy_after": 1, "trial_requests": 1}
    proxy = await start_proxy(engines=[engine], health=health)
    assert (await ask(proxy)).status_code == 502
    engine.mode = "hang"
    await proxy.until(lambda: state(proxy) is BreakerState.HALF_OPEN)
    trial = asyncio.create_task(ask(proxy))
    await proxy.until(lambda: engine.running == 1)
    waiting = asyncio.create_task(ask(proxy))
    await proxy.until(lambda: proxy.core.admission.waiting == 1)
    assert (await shown(proxy))["breaker"]["trial_requests"] == 1
    engine.mode = "ok"
    trial.cancel()
    await asyncio.gather(trial, return_exceptions=True)
    assert (await waiting).status_code == 200
    assert state(proxy) is BreakerState.CLOSED
    assert ledger_is_zero(await proxy.settled())


async def test_a_dead_engine_is_out_at_once_and_its_successor_starts_clean(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2, health={**QUICK, "interval_s": 0.3}, policy={"name": "round_robin"})
    for _ in range(4):
        await ask(proxy)
    victim = proxy.engines[0]
    await victim.stop()
    while state(proxy) is BreakerState.CLOSED and proxy.core.instances["inst-0"].up:
        assert (await ask(proxy)).status_code == 200
    assert proxy.core.instances.healthy() == {"inst-1"}
    await victim.restart()
    await proxy.until(lambda: proxy.core.instances.healthy() == {"inst-0", "inst-1"})
    row = await shown(proxy)
    assert (row["restarts"], row["index_blocks"], row["breaker"]["doublings"]) == (1, 0, 0)
    for _ in range(4):
        assert (await ask(proxy)).status_code == 200
    assert state(proxy) is BreakerState.CLOSED


async def test_many_failures_among_successes_take_an_instance_out_too(start_proxy: StartProxy) -> None:
    engine = StubEngine()
    health = {**QUICK, **PROBED_BY_HAND, "window_min_requests": 8, "failure_ratio": 0.5}
    proxy = await start_proxy(engines=[engine], health=health)
    statuses = []
    for number in range(8):
        engine.mode = "page" if number % 2 else "ok"
        statuses.append((await ask(proxy)).status_code)
    assert statuses == [200, 502] * 4
    assert (await shown(proxy))["breaker"]["why"].startswith("4 of 8 requests failed within 30 s")
    assert (await ask(proxy)).json()["error"]["code"] == "no_instance"


async def test_streams_that_break_off_take_an_instance_out(start_proxy: StartProxy) -> None:
    engine = StubEngine(mode="break_stream")
    proxy = await start_proxy(engines=[engine], health={**QUICK, **PROBED_BY_HAND})
    for _ in range(3):
        assert state(proxy) is BreakerState.CLOSED
        assert "stream_broken" in (await ask(proxy, stream=True)).text
    assert state(proxy) is BreakerState.OPEN


async def test_refused_input_never_counts_and_ends_a_trial_well(start_proxy: StartProxy) -> None:
    engine = StubEngine(mode="page")
    proxy = await start_proxy(engines=[engine], health={**QUICK, "unhealthy_after": 1})
    await ask(proxy)
    engine.mode = "refuse_input"
    await proxy.until(lambda: state(proxy) is BreakerState.HALF_OPEN)
    for _ in range(20):
        assert (await ask(proxy)).status_code == 400
    assert state(proxy) is BreakerState.CLOSED


async def test_probes_alone_take_out_and_take_back_what_only_probes_found_unwell(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2, health={**QUICK, "open_s": 10.0})
    engine = proxy.engines[0]
    engine.mode = "sick"
    await proxy.until(lambda: proxy.core.instances.healthy() == {"inst-1"})
    assert state(proxy) is BreakerState.CLOSED
    engine.mode = "ok"
    await proxy.until(lambda: proxy.core.instances.healthy() == {"inst-0", "inst-1"})
    assert (await shown(proxy))["last_error"] is None


# The fleet's rule, without a server


@pytest.fixture
def fleet() -> Instances:
    settings = tuple(InstanceSettings(url=f"http://127.0.0.1:{port}", name=name) for port, name in enumerate("ab", 1))
    return Instances(settings, HealthSettings(healthy_after=2, unhealthy_after=3))


def test_probes_need_to_be_good_and_bad_as_often_in_a_row_as_is_set(fleet: Instances) -> None:
    fleet.probed("a")
    fleet.probe_failed("a", "slow")
    fleet.probed("a")
    assert fleet.healthy() == set()
    fleet.probed("a")
    assert fleet.healthy() == {"a"}
    for _ in range(5):
        fleet.probe_failed("a", "slow")
        fleet.probe_failed("a", "slow")
        fleet.probed("a")
    assert fleet.healthy() == {"a"}
    fleet.probe_failed("a", "refused", refused=True)
    assert fleet.healthy() == set()
    assert fleet["a"].last_error == "refused"


def test_after_failed_requests_as_many_good_probes_are_asked_for(fleet: Instances) -> None:
    for _ in range(4):
        fleet.probed("a")
    fleet.failed("a", "refused", refused=True)
    fleet.probed("a")
    assert fleet.healthy() == set()
    fleet.probed("a")
    assert fleet.healthy() == {"a"}
    assert fleet["a"].breaker.state is BreakerState.HALF_OPEN
    fleet.succeeded("a")
    assert fleet["a"].breaker.state is BreakerState.CLOSED


def test_good_probes_do_not_forgive_failed_requests(fleet: Instances) -> None:
    for _ in range(3):
        fleet.probed("a")
        fleet.probed("a")
        fleet.failed("a", "late")
    assert fleet.healthy() == set()


def test_every_recovery_wakes_the_queue(fleet: Instances) -> None:
    called: list[str] = []

    def on_room() -> None:
        called.append("room")

    fleet.on_room = on_room
    fleet.probed("a")
    assert not called
    fleet.probed("a")
    assert called, "it is up"
    fleet.failed("a", "refused", refused=True)
    called.clear()
    fleet.probed("a")
    assert not called
    fleet.probed("a")
    assert called, "it is on trial"
    called.clear()
    fleet.succeeded("a")
    assert called, "it has passed"
    fleet.set_draining(fleet["a"], True)
    called.clear()
    fleet.set_draining(fleet["a"], False)
    assert called, "it no longer drains"


def test_an_engine_that_takes_over_a_name_inherits_nothing(fleet: Instances) -> None:
    old = fleet["a"]
    for _ in range(3):
        fleet.failed(old, "late")
    fleet.add(Instance(old.settings))
    fleet.failed(old, "late")
    assert (fleet["a"].breaker.openings, fleet["a"].failures_in_a_row, fleet["a"].last_error) == (0, 0, None)


async def test_an_engine_without_a_start_time_has_restarted_when_its_counters_fell(start_proxy: StartProxy) -> None:
    engine = StubEngine(reports_start=False)
    proxy = await start_proxy(engines=[engine], health=PROBED_BY_HAND)
    for looked_up, restarts in ((500.0, 0), (500.0, 0), (900.0, 0), (80.0, 1), (90.0, 1)):
        engine.counters["vllm:prefix_cache_queries_total"] = looked_up
        await proxy.operations.fleet.probe(proxy.core.instances["inst-0"])
        assert (await shown(proxy))["restarts"] == restarts
