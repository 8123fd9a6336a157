"""Planners and connectors through the whole proxy: cost model, static prefill/decode, NIXL, leg predictions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

HEAVY = {"model": "stub", "prompt": list(range(400)), "max_tokens": 4}
CLASSES = {"medium_tokens": 50, "heavy_tokens": 100}
THRESHOLD = {"planner": "threshold", "params": {"min_decode_requests": 0}}


def leg_of(body: dict[str, Any]) -> str:
    params = body.get("kv_transfer_params") or {}
    return "P" if params.get("do_remote_decode") else "D" if params.get("do_remote_prefill") else "co-located"


def legs_seen(engine: StubEngine) -> list[str]:
    return [leg_of(body) for body in engine.seen]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_nixl_hand_off_passes_p_s_answer_to_d_unchanged(start_proxy: StartProxy, stream: bool) -> None:
    engines = [StubEngine(nixl_block_ids=[7, 8, 9], cached_tokens=64) for _ in range(2)]
    nixl = {"connector": "nixl", "bootstrap_url": None}
    proxy = await start_proxy(engines=engines, role="kv_both", each=[nixl] * 2, offload=THRESHOLD, classes=CLASSES)
    answer = await proxy.client.post("/v1/completions", json={**HEAVY, "stream": stream})
    assert answer.status_code == 200
    [p] = [engine for engine in engines if legs_seen(engine) == ["P"]]
    [d] = [engine for engine in engines if legs_seen(engine) == ["D"]]
    assert p.seen[0]["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert d.seen[0]["kv_transfer_params"] == p._answered_params()
    assert d.seen[0]["max_tokens"] == 4
    [row] = await proxy.rows()
    assert (row["offload_reason"], row["actual_cached_tokens"]) == ("chosen", 64)
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.parametrize("block_ids", [None, []])
async def test_a_nixl_p_that_answers_no_blocks_means_co_located(
    start_proxy: StartProxy, block_ids: list[int] | None
) -> None:
    engines = [StubEngine(nixl_block_ids=block_ids) for _ in range(2)]
    proxy = await start_proxy(
        engines=engines, role="kv_both", each=[{"connector": "nixl"}] * 2, offload=THRESHOLD, classes=CLASSES
    )
    assert (await proxy.client.post("/v1/completions", json=HEAVY)).status_code == 200
    assert sorted(leg for engine in engines for leg in legs_seen(engine)) == ["P", "co-located"]
    assert (await proxy.rows())[0]["offload_reason"] == "fell_back_p_error"


async def test_a_nixl_p_that_dies_while_d_pulls_is_noticed_by_its_health(start_proxy: StartProxy) -> None:
    engines = [StubEngine(nixl_block_ids=[1], mode="pull_hang") for _ in range(2)]
    nixl = {"connector": "nixl", "bootstrap_url": None}
    proxy = await start_proxy(
        engines=engines,
        role="kv_both",
        each=[nixl] * 2,
        offload={**THRESHOLD, "watch_interval_s": 0.05},
        classes=CLASSES,
    )
    request = asyncio.create_task(proxy.client.post("/v1/completions", json=HEAVY))
    await proxy.until(lambda: any(legs_seen(engine)[-1:] == ["D"] for engine in engines))
    await next(engine for engine in engines if "P" in legs_seen(engine)).stop()
    assert (await request).status_code == 200
    assert (await proxy.rows())[0]["offload_reason"] == "fell_back_p_gone"


async def test_different_connectors_never_hand_over_to_each_other(start_proxy: StartProxy) -> None:
    each = [{"connector": "nixl", "bootstrap_url": None}, {}]
    proxy = await start_proxy(2, role="kv_both", each=each, offload=THRESHOLD, classes=CLASSES)
    assert (await proxy.client.post("/v1/completions", json=HEAVY)).status_code == 200
    assert (await proxy.rows())[0]["offload_reason"] == "no_prefill_candidate"


@pytest.mark.parametrize(
    ("role", "each", "ok"),
    [
        ("none", [{}, {}], False),
        ("kv_consumer", [{}, {}], False),
        ("kv_both", [{"connector": "nixl", "bootstrap_url": None}, {}], False),
        ("kv_consumer", [{"role": "kv_producer"}, {}], True),
        ("kv_both", [{}, {"role": "none"}], False),
        ("kv_both", [{}, {}], True),
    ],
    ids=["none", "nobody sends", "two connectors", "a pair", "one alone", "both"],
)
async def test_a_planner_without_a_pair_for_a_hand_off_is_a_condition(
    start_proxy: StartProxy, role: str, each: list[dict[str, Any]], ok: bool
) -> None:
    proxy = await start_proxy(2, role=role, each=each, offload={"planner": "cost_model"})

    async def planner() -> dict[str, Any]:
        shown = (await proxy.client.get("/ready?verbose")).json()["conditions"]
        (found,) = [condition for condition in shown if condition["name"] == "planner"]
        return dict(found)

    found = await planner()
    assert (found["ok"], "role" in found["detail"]) == (ok, not ok)
    await proxy.client.put("/policy", json={"planner": "never"})
    assert (await planner())["ok"]


def ratios_counted(metrics: str) -> dict[str, float]:
    prefix = "warmroute_leg_actual_to_predicted_ratio_count{leg="
    lines = [line for line in metrics.splitlines() if line.startswith(prefix)]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def test_legs_are_recorded_with_what_was_predicted_and_what_it_took(start_proxy: StartProxy) -> None:
    engines = [StubEngine(prefill_s=0.06, pull_s=0.06) for _ in range(2)]
    proxy = await start_proxy(engines=engines, role="kv_both", offload=THRESHOLD, classes=CLASSES)
    light = {**HEAVY, "prompt": list(range(5_000, 5_020))}
    for body in ({**HEAVY, "stream": True}, {**light, "stream": True}, light):
        assert (await proxy.client.post("/v1/completions", json=body)).status_code == 200
    offloaded, co_located, whole = await proxy.rows()
    assert set(offloaded["legs"]) == {"prefill", "transfer"}
    assert set(co_located["legs"]) == {"first_token"}
    assert whole["legs"] == {}  # the first token of an unstreamed answer is not observed
    for times in (*offloaded["legs"].values(), *co_located["legs"].values()):
        assert times["predicted_s"] > 0
        assert times["actual_s"] >= 0.05  # a timer may fire a millisecond early
    assert ratios_counted((await proxy.client.get("/metrics")).text) == {"prefill": 1, "transfer": 1, "first_token": 1}


async def test_an_answer_in_one_piece_teaches_nothing_of_transfers(start_proxy: StartProxy) -> None:
    """Its D leg lasts to the last token; counted as a pull it would make every pull look slow."""
    engines = [StubEngine(pull_s=0.5) for _ in range(2)]
    proxy = await start_proxy(engines=engines, role="kv_both", offload=THRESHOLD, classes=CLASSES)
    assert (await proxy.client.post("/v1/completions", json=HEAVY)).status_code == 200
    costs = proxy.core.router.state.costs
    assert costs.transfer.observations() == {}
    [row] = await proxy.rows()
    assert (row["offload_reason"], list(row["legs"])) == ("chosen", ["prefill"])
    pair = (row["prefill_instance"], row["instance"])
    assert costs.transfer.failure_rate(pair) < costs.transfer.prior_failure_rate
    assert ledger_is_zero(await proxy.settled())
    assert (await proxy.client.post("/v1/completions", json={**HEAVY, "stream": True})).status_code == 200


async def test_a_streamed_pull_is_learned_from(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2, role="kv_both", offload=THRESHOLD, classes=CLASSES)
    assert (await proxy.client.post("/v1/completions", json={**HEAVY, "stream": True})).status_code == 200
    [row] = await proxy.rows()
    observed = proxy.core.router.state.costs.transfer.observations()
    assert list(observed) == [(row["prefill_instance"], row["instance"])]


async def busy_d(proxy: Running, streams: int) -> tuple[str, list[asyncio.Task[Any]]]:
    """One session with ``streams`` unfinished answers: its instance, and the requests."""
    first = await proxy.client.post("/v1/completions", json=body_of_session())
    name = first.headers["x-warmroute-instance"]
    engine = proxy.engines[int(name[-1])]
    engine.tokens, engine.token_delay_s = 10_000, 0.05
    tasks = [
        asyncio.create_task(proxy.client.post("/v1/completions", json={**body_of_session(), "stream": True}))
        for _ in range(streams)
    ]
    await proxy.until(lambda: proxy.core.router.state.ledger.totals()["decoding_tokens"] == 20 * streams)
    return name, tasks


def body_of_session(prompt: list[int] | None = None) -> dict[str, Any]:
    return {**HEAVY, "prompt": prompt or list(range(20)), "user": "busy"}


async def test_the_cost_model_takes_over_and_protects_streams_that_decode(start_proxy: StartProxy) -> None:
    each = [{"host": "h1", "transport": "nvlink"}] * 2
    proxy = await start_proxy(2, role="kv_both", each=each, policy={"name": "session_sticky"}, classes=CLASSES)
    put = {"planner": "cost_model", "planner_params": {"min_new_tokens": 100, "max_own_loss": 50.0, "sigmas": 0.0}}
    switched = await proxy.client.put("/policy", json=put)
    assert switched.status_code == 200
    assert (switched.json()["planner"], switched.json()["planner_params"]["max_own_loss"]) == ("cost_model", 50.0)
    assert switched.json()["known_planners"] == ["cost_model", "never", "static_pd", "threshold"]

    assert (await proxy.client.post("/v1/completions", json=HEAVY)).status_code == 200
    idle = (await proxy.rows())[-1]
    assert (idle["planner"], idle["offload_reason"]) == ("cost_model", "does_not_pay")
    assert set(idle["offload_inputs"]) >= {"colocated_s", "prefill_s", "transfer_s", "own_gain_s", "doubt_s"}

    name, tasks = await busy_d(proxy, 12)
    try:
        engine = proxy.engines[int(name[-1])]
        engine.tokens, engine.token_delay_s = 4, 0.0
        answer = await proxy.client.post("/v1/completions", json=body_of_session(list(range(9_000, 9_400))))
        assert answer.headers["x-warmroute-instance"] == name
        assert answer.headers["x-warmroute-prefill-instance"] != name
        protected = (await proxy.rows())[-1]
        assert protected["offload_reason"] == "chosen"
        assert protected["offload_inputs"]["decode_streams"] == 12
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.parametrize(
    ("put", "says"),
    [
        ({"planner": "cost_modle"}, "known: cost_model, never, static_pd, threshold"),
        ({"planner": "cost_model", "planner_params": {"sigma": 1}}, "it has: max_in_flight"),
        ({"planner": "cost_model", "planner_params": {"stall_share": 2.0}}, "stall_share must be within 0..1"),
    ],
)
async def test_a_switch_that_cannot_be_made_changes_nothing(
    start_proxy: StartProxy, put: dict[str, Any], says: str
) -> None:
    proxy = await start_proxy(1)
    answer = await proxy.client.put("/policy", json=put)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert (await proxy.client.get("/policy")).json()["planner"] == "never"


async def start_pd(start_proxy: StartProxy, producers: int, consumers: int) -> Running:
    each = [{"role": "kv_producer"}] * producers + [{"role": "kv_consumer", "bootstrap_url": None}] * consumers
    return await start_proxy(
        producers + consumers,
        each=each,
        policy={"name": "session_sticky"},
        offload={"planner": "static_pd"},
        health={"interval_s": 0.1, "timeout_s": 2.0, "unhealthy_after": 1},
    )


async def test_static_pd_prefills_on_producers_and_decodes_on_consumers(start_proxy: StartProxy) -> None:
    proxy = await start_pd(start_proxy, 2, 2)
    prompts = {f"s{n}": list(range(n * 100_000, n * 100_000 + 600)) for n in range(4)}
    for _ in range(2):
        for name, prompt in prompts.items():
            body = {**HEAVY, "prompt": prompt, "user": name, "stream": True}
            assert (await proxy.client.post("/v1/completions", json=body)).status_code == 200
            prompt.extend(range(90_000_000 + len(prompt), 90_000_000 + len(prompt) + 300))
    rows = await proxy.rows()
    assert {row["offload_reason"] for row in rows} == {"chosen"}
    for producer, consumer in zip(proxy.engines[:2], proxy.engines[2:], strict=True):
        assert set(legs_seen(producer)) == {"P"}
        assert set(legs_seen(consumer)) == {"D"}
    reported = (await proxy.client.post("/explain", json=HEAVY)).json()
    assert [view["instance"] for view in reported["prefill_only"]] == ["inst-0", "inst-1"]
    assert [view["instance"] for view in reported["fleet"]] == ["inst-2", "inst-3"]
    first = {row["session_id"]: row["prefill_instance"] for row in rows[:4]}
    assert {row["session_id"]: row["prefill_instance"] for row in rows[4:]} == first
    assert all(row["predicted_cached_tokens"] == 592 for row in rows[4:])
    assert ledger_is_zero(await proxy.settled())


async def test_without_producers_consumers_run_co_located_and_without_consumers_requests_fail(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_pd(start_proxy, 2, 2)
    for producer in proxy.engines[:2]:
        await producer.stop()
    await proxy.until(lambda: proxy.core.instances.healthy() == {"inst-2", "inst-3"})
    answer = await proxy.client.post("/v1/completions", json=HEAVY)
    assert answer.status_code == 200
    assert answer.headers["x-warmroute-instance"] in {"inst-2", "inst-3"}
    assert (await proxy.rows())[-1]["offload_reason"] == "no_prefill_candidate"
    for producer in proxy.engines[:2]:
        await producer.restart()
    for consumer in proxy.engines[2:]:
        await consumer.stop()
    await proxy.until(lambda: proxy.core.instances.healthy() == {"inst-0", "inst-1"})
    assert (await proxy.client.post("/v1/completions", json=HEAVY)).status_code == 503
    assert [legs_seen(producer) for producer in proxy.engines[:2]] == [[], []]
