"""Routing by model: engines that serve different models and adapters behind one proxy."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from proxy.fleet.breaker import BreakerState
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

ROUND_ROBIN = {"name": "round_robin"}
PROBED_BY_HAND = {"interval_s": 600.0}
RESUME = {"enabled": "always"}


async def ask(proxy: Running, model: str = "other", **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": list(range(200)), "max_tokens": 4, **more.pop("body", {})}
    return await proxy.client.post("/v1/completions", json=body, **more)


async def explained(proxy: Running, model: str) -> httpx.Response:
    return await proxy.client.post("/explain", json={"model": model, "prompt": list(range(200))})


def models_of(engine: StubEngine) -> list[str]:
    return [body["model"] for body in engine.seen]


async def test_only_engines_that_serve_the_model_are_candidates(start_proxy: StartProxy) -> None:
    engines = [StubEngine(), StubEngine(adapters=["other"]), StubEngine(model="third")]
    proxy = await start_proxy(engines=engines, policy=ROUND_ROBIN)
    for model in ("other", "stub", "third") * 6:
        assert (await ask(proxy, model)).status_code == 200
    assert [sorted(set(models_of(engine))) for engine in engines] == [["stub"], ["other", "stub"], ["third"]]
    assert len(engines[1].seen) == 6 + 3, "those that may be shared are shared"
    assert not any(row["attempts"] for row in await proxy.rows())
    decisions = (await explained(proxy, "other")).json()["decisions"]
    assert {decision["instance"] for decision in decisions.values()} == {"inst-1"}
    assert {row["instance"] for decision in decisions.values() for row in decision["scores"]} == {"inst-1"}


async def test_prompts_that_an_engine_refuses_go_to_one_with_a_longer_context(start_proxy: StartProxy) -> None:
    engines = [StubEngine(max_model_len=400), StubEngine(max_model_len=4000), StubEngine(max_model_len=400)]
    proxy = await start_proxy(engines=engines, policy=ROUND_ROBIN)
    for _ in range(6):
        assert (await ask(proxy, "stub", body={"prompt": list(range(397))})).status_code == 200  # 401 with its output
    assert [len(engine.seen) for engine in engines] == [0, 6, 0]
    question = {"model": "stub", "prompt": list(range(397)), "max_tokens": 4}
    decisions = (await proxy.client.post("/explain", json=question)).json()["decisions"]
    assert {row["instance"] for decision in decisions.values() for row in decision["scores"]} == {"inst-1"}
    several = {"prompt": [list(range(number, number + 300)) for number in range(2)]}  # each is served on its own
    for body in ({"prompt": list(range(396))}, several):
        for _ in range(6):
            assert (await ask(proxy, "stub", body=body)).status_code == 200
    assert [len(engine.seen) for engine in engines] == [4, 6 + 4, 4]
    await proxy.client.post("/instances/inst-1/drain")
    assert (await ask(proxy, "stub", body={"prompt": list(range(900))})).status_code == 200, "the engine decides"


async def test_a_session_on_an_engine_without_the_model_continues_elsewhere(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[StubEngine(), StubEngine(model="other")], policy={"name": "session_sticky"})
    mine = {"headers": {"x-session-id": "mine"}}
    for model, name in (("stub", "inst-0"), ("other", "inst-1"), ("stub", "inst-0")):
        answer = await ask(proxy, model, **mine)
        assert (answer.status_code, answer.headers["x-warmroute-instance"]) == (200, name)


async def test_the_refusal_of_an_unknown_model_names_aliases_of_those_that_are_served(start_proxy: StartProxy) -> None:
    aliases = {"gpt-4o": "stub", "gone": "elsewhere", "claude-*": "stub"}
    proxy = await start_proxy(1, models={"aliases": aliases})
    assert "available: gpt-4o, stub" in (await ask(proxy, "gpt-9")).text


async def test_a_model_known_nowhere_is_refused_without_an_engine(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    for name in ("gpt-9", "x" * 150):
        answer = await ask(proxy, name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "available: stub" in answer.text
        assert len(answer.content) < 500
    assert (await explained(proxy, "gpt-9")).status_code == 404
    assert not any(engine.seen for engine in proxy.engines)


async def test_a_model_that_an_engine_out_of_reach_may_serve_is_unavailable_and_not_unknown(
    start_proxy: StartProxy,
) -> None:
    away = StubEngine(model="other")
    proxy = await start_proxy(engines=[StubEngine(), away])
    await away.stop()
    await proxy.until(lambda: not proxy.core.instances["inst-1"].healthy)
    answer = await ask(proxy, "other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")
    assert "retry-after" in answer.headers
    same = await explained(proxy, "other")
    assert (same.status_code, same.json()["error"]) == (503, answer.json()["error"])
    assert same.headers["retry-after"] == answer.headers["retry-after"]
    proxy.core.instances["inst-1"].listed_s -= 3600  # out of reach for long: it may come back with other models
    assert (await ask(proxy, "third")).status_code == 503
    assert (await ask(proxy, "stub")).status_code == 200
    await away.start()
    await proxy.until(lambda: proxy.core.instances["inst-1"].healthy)
    assert (await ask(proxy, "third")).status_code == 404
    proxy.operations.fleet.drain("inst-1")
    assert (await ask(proxy, "other")).status_code == 503


async def test_an_engine_that_comes_back_with_another_model_is_named_in_the_log(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(2, health=PROBED_BY_HAND)
    proxy.engines[1].model = "other"
    proxy.engines[1].started_unix_s += 1
    for _ in range(2):
        await proxy.operations.fleet.probe(proxy.core.instances["inst-1"])
    assert [text for text in caplog.messages if " serves " in text] == ["inst-1 serves other; before: stub"]
    assert (await ask(proxy)).headers["x-warmroute-instance"] == "inst-1"


async def test_models_loaded_at_run_time_are_noticed_by_the_next_probe(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2, health=PROBED_BY_HAND)
    assert (await ask(proxy)).status_code == 404
    proxy.engines[1].adapters.append("other")
    await proxy.operations.fleet.probe(proxy.core.instances["inst-1"])
    for _ in range(3):
        assert (await ask(proxy)).headers["x-warmroute-instance"] == "inst-1"


async def test_a_model_unloaded_at_run_time_is_noticed_at_the_first_404_and_the_request_is_served_elsewhere(
    start_proxy: StartProxy,
) -> None:
    engines = [StubEngine(adapters=["other"]), StubEngine(adapters=["other"])]
    health = {**PROBED_BY_HAND, "unhealthy_after": 1}
    proxy = await start_proxy(engines=engines, policy=ROUND_ROBIN, health=health, limits={"retry_min_per_s": 0.0})
    before = engines[0].listings
    engines[0].adapters.clear()
    answers = await asyncio.gather(*(ask(proxy, body={"stream": bool(number % 2)}) for number in range(8)))
    assert {(answer.status_code, answer.headers["x-warmroute-instance"]) for answer in answers} == {(200, "inst-1")}
    await proxy.until(lambda: engines[0].listings == before + 1)
    reached = len(engines[0].seen)
    for _ in range(4):
        assert (await ask(proxy)).status_code == 200
    assert len(engines[0].seen) == reached <= 8, "none is sent there any more"
    assert engines[0].listings == before + 1, "read once for all of them"
    breaker = proxy.core.instances["inst-0"].breaker
    assert (breaker.state, breaker.openings, breaker.failures_in_a_row) == (BreakerState.CLOSED, 0, 0)
    assert {(await ask(proxy, "stub")).headers["x-warmroute-instance"] for _ in range(4)} == {"inst-0", "inst-1"}
    assert ledger_is_zero(await proxy.settled())


async def test_a_model_unloaded_everywhere_is_the_engines_404(start_proxy: StartProxy) -> None:
    engines = [StubEngine(adapters=["other"]), StubEngine(adapters=["other"])]
    proxy = await start_proxy(engines=engines, policy=ROUND_ROBIN, health=PROBED_BY_HAND)
    for engine in engines:
        engine.adapters.clear()
    answer = await ask(proxy)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    [row] = await proxy.rows()
    assert (row["outcome"], row["status"], len(row["attempts"])) == ("engine_refused", 404, 2)
    assert (await ask(proxy)).status_code == 404
    assert sum(len(engine.seen) for engine in engines) == 2, "the second request was refused by the proxy"
    assert ledger_is_zero(await proxy.settled())


async def test_a_client_that_wants_a_single_attempt_gets_the_404(start_proxy: StartProxy) -> None:
    engines = [StubEngine(adapters=["other"]), StubEngine(adapters=["other"])]
    proxy = await start_proxy(engines=engines, policy=ROUND_ROBIN, health=PROBED_BY_HAND)
    engines[0].adapters.clear()
    answer = await ask(proxy, headers={"x-warmroute-no-retry": "1"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert not engines[1].seen


async def test_an_engine_that_lists_a_model_and_answers_404_for_it_is_asked_for_its_list_once_a_second(
    start_proxy: StartProxy,
) -> None:
    engines = [StubEngine(adapters=["other"]), StubEngine(adapters=["other"])]
    proxy = await start_proxy(engines=engines, policy=ROUND_ROBIN, health=PROBED_BY_HAND)
    proxy.core.instances["inst-0"].refreshed_s = float("-inf")
    before, began_s = engines[0].listings, asyncio.get_running_loop().time()
    answer_to = engines[0]._answer

    async def refuses(request: Any, body: dict[str, Any]) -> Any:
        return await answer_to(request, {**body, "model": "unloaded"})

    engines[0]._answer = refuses  # type: ignore[method-assign]
    for _ in range(20):
        assert (await ask(proxy)).status_code == 200
    lasted_s = asyncio.get_running_loop().time() - began_s
    assert engines[0].listings - before <= 1 + lasted_s
    assert ledger_is_zero(await proxy.settled())


async def test_a_failure_of_an_engine_with_the_model_is_not_hidden_by_one_without_it(start_proxy: StartProxy) -> None:
    engines = [StubEngine(adapters=["other"], mode="error"), StubEngine(adapters=["other"])]
    proxy = await start_proxy(engines=engines, policy=ROUND_ROBIN, health=PROBED_BY_HAND)
    engines[1].adapters.clear()
    assert (await ask(proxy)).status_code == 502
    [row] = await proxy.rows()
    assert (row["outcome"], [each["instance"] for each in row["attempts"]]) == ("upstream_error", ["inst-0", "inst-1"])


async def test_requests_cannot_take_a_model_from_everybody(start_proxy: StartProxy) -> None:
    """Answers that only seem to be about the model: the list is read again, and the model stays where it is listed."""
    engine = StubEngine(checks_model=False)
    proxy = await start_proxy(engines=[engine], health=PROBED_BY_HAND)
    answer_to = engine._answer

    async def refuses_some(request: Any, body: dict[str, Any]) -> Any:
        engine.checks_model = body["max_tokens"] == 1
        return await answer_to(request, {**body, "model": "x"})

    engine._answer = refuses_some  # type: ignore[method-assign]
    proxy.core.instances["inst-0"].refreshed_s = float("-inf")
    assert (await ask(proxy, "stub", body={"max_tokens": 1})).status_code == 404
    await proxy.until(lambda: "stub" in proxy.core.instances.served.names)
    proxy.core.instances["inst-0"].refreshed_s = float("inf")  # the second lasts until the end of the test
    for _ in range(5):
        assert (await ask(proxy, "stub", body={"max_tokens": 1})).status_code == 404
        assert (await ask(proxy, "stub")).status_code == 200


async def test_an_engine_that_has_never_listed_its_models_may_serve_any(start_proxy: StartProxy) -> None:
    silent = StubEngine(model="other")
    silent.mode = "unlisted"
    proxy = await start_proxy(engines=[StubEngine(), silent], policy=ROUND_ROBIN)
    assert (await ask(proxy, "other")).headers["x-warmroute-instance"] == "inst-1"
    answer = await ask(proxy, "third")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert models_of(silent) == ["other", "third"]


async def test_both_engines_of_a_hand_off_serve_the_model(start_proxy: StartProxy) -> None:
    producer, decode = StubEngine(), StubEngine(adapters=["other"])
    proxy = await start_proxy(
        engines=[producer, decode],
        each=[{"role": "kv_producer"}, {"role": "kv_consumer"}],
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
        classes={"medium_tokens": 50, "heavy_tokens": 100},
        health=PROBED_BY_HAND,
    )
    ids = list(range(5_000))
    answer = await ask(proxy, "stub", body={"prompt": ids, "stream": True})
    assert answer.headers["x-warmroute-prefill-instance"] == "inst-0"
    answer = await ask(proxy, "other", body={"prompt": ids[1:], "stream": True})
    assert (answer.status_code, "x-warmroute-prefill-instance" in answer.headers) == (200, False)
    assert models_of(producer) == ["stub"]
    # P unloads a model: the request is served by D, and P is not used for that model any more.
    producer.adapters.append("other")
    await proxy.operations.fleet.probe(proxy.core.instances["inst-0"])
    producer.adapters.clear()
    before = producer.listings
    assert (await ask(proxy, "other", body={"prompt": ids[2:], "stream": True})).status_code == 200
    assert models_of(producer) == ["stub", "other"]
    await proxy.until(lambda: producer.listings == before + 1)
    await proxy.until(lambda: "inst-0" not in proxy.core.instances.healthy("other"))
    assert (await ask(proxy, "other", body={"prompt": ids[3:], "stream": True})).status_code == 200
    assert models_of(producer) == ["stub", "other"]
    assert proxy.core.instances["inst-0"].breaker.openings == 0
    assert ledger_is_zero(await proxy.settled())


async def test_a_broken_stream_is_not_resumed_on_an_engine_without_the_model(start_proxy: StartProxy) -> None:
    broken = StubEngine(adapters=["other"], mode="break_stream")
    proxy = await start_proxy(engines=[broken, StubEngine(checks_model=False)], resume=RESUME, health=PROBED_BY_HAND)
    answer = await ask(proxy, body={"stream": True, "temperature": 0})
    assert "stream_broken" in answer.text
    [row] = await proxy.rows()
    assert (row["resume"], proxy.engines[1].seen) == ("no_instance", [])
    assert ledger_is_zero(await proxy.settled())


async def test_a_model_whose_engines_are_full_does_not_block_another(start_proxy: StartProxy) -> None:
    engines = [StubEngine(mode="hang"), StubEngine(model="other")]
    proxy = await start_proxy(engines=engines, health=PROBED_BY_HAND, limits={"max_in_flight_per_instance": 1})
    stuck = [asyncio.create_task(ask(proxy, "stub")) for _ in range(3)]
    await proxy.until(lambda: proxy.core.admission.waiting == 2)
    for _ in range(3):
        assert (await ask(proxy, "other")).status_code == 200
    assert proxy.core.admission.waiting == 2
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
    assert ledger_is_zero(await proxy.settled())
