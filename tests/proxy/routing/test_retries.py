"""The retry budget alone, and its effect on a fleet where everything fails."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from proxy.routing.retries import RetryBudget
from proxy.settings import LimitSettings
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

OK = {"model": "stub", "prompt": list(range(200)), "max_tokens": 4}
NEVER_OUT = {"interval_s": 60.0, "timeout_s": 2.0, "unhealthy_after": 1000, "window_min_requests": 1000}


@given(
    events=st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=200),
    ratio=st.floats(0, 1),
    per_s=st.floats(0, 3),
)
@hypothesis_settings(max_examples=80, deadline=None)
def test_retries_are_a_share_of_recent_requests_and_a_few_more(
    events: list[tuple[float, bool]], ratio: float, per_s: float
) -> None:
    window_s = 10.0
    budget = RetryBudget(LimitSettings(retry_ratio=ratio, retry_min_per_s=per_s, retry_window_s=window_s))
    now_s = 100.0
    requests: list[float] = []
    retries: list[float] = []
    for wait_s, is_request in events:
        now_s += wait_s
        # Nothing older than the window counts, all of its last nine tenths does.
        requests_s = [time_s for time_s in requests if time_s > now_s - window_s]
        retries_s = [time_s for time_s in retries if time_s > now_s - 0.9 * window_s]
        if is_request:
            budget.arrived(now_s)
            requests.append(now_s)
        elif budget.take(now_s, seen=True):
            retries.append(now_s)
            assert len(retries_s) + 1 <= ratio * len(requests_s) + per_s * window_s
        else:
            lately = [time_s for time_s in requests if time_s > now_s - 0.9 * window_s]
            all_retries = [time_s for time_s in retries if time_s > now_s - window_s]
            assert len(all_retries) + 1 > ratio * len(lately) + per_s * window_s, "refused without need"
    assert budget.made == len(retries)


def test_what_no_engine_has_seen_may_always_be_sent_elsewhere() -> None:
    budget = RetryBudget(LimitSettings(retry_ratio=0, retry_min_per_s=0))
    assert not budget.take(0.0, seen=True)
    assert all(budget.take(0.0, seen=False) for _ in range(100))
    assert (budget.made, budget.unbudgeted, budget.exhausted) == (0, 100, 1)


async def flood(proxy: Running, count: int, **more: Any) -> list[httpx.Response]:
    return list(
        await asyncio.gather(
            *(
                proxy.client.post("/v1/completions", json={**OK, "prompt": [number] * 200}, **more)
                for number in range(count)
            )
        )
    )


async def test_a_fleet_that_fails_everything_is_not_sent_everything_twice(start_proxy: StartProxy) -> None:
    engines = [StubEngine(mode="error") for _ in range(3)]
    limits = {"retry_ratio": 0.2, "retry_min_per_s": 0.1, "retry_window_s": 50.0}
    proxy = await start_proxy(engines=engines, limits=limits, health=NEVER_OUT)
    answers = await flood(proxy, 40)
    assert {answer.status_code for answer in answers} == {502}
    # For the first arrivals there are few requests to take a share of, so it can be less than 40 * 0.2 + 5.
    retries = sum(len(engine.seen) for engine in engines) - 40
    assert 5 <= retries <= 13
    reported = [answer for answer in answers if "retry budget is exhausted" in answer.json()["error"]["message"]]
    assert len(reported) >= 40 - 13
    stats = await proxy.settled()
    assert stats["retries"]["retried"] == retries
    assert stats["retries"]["budget_exhausted"] == len(reported)
    metrics = (await proxy.client.get("/metrics")).text
    assert f'warmroute_retries_total{{result="retried"}} {retries}.0' in metrics
    assert f'warmroute_retries_total{{result="budget_exhausted"}} {len(reported)}.0' in metrics
    assert ledger_is_zero(stats)


async def test_refused_connections_are_retried_without_a_budget(start_proxy: StartProxy) -> None:
    limits = {"retry_ratio": 0, "retry_min_per_s": 0}
    proxy = await start_proxy(2, limits=limits, policy={"name": "round_robin"}, health=NEVER_OUT)
    await proxy.engines[0].stop()
    answers = await flood(proxy, 10)
    assert {answer.status_code for answer in answers} == {200}
    assert (await proxy.settled())["retries"]["retried_unseen"] >= 1


@pytest.mark.parametrize(
    ("limits", "headers", "attempts"),
    [
        ({}, {}, 2),
        ({}, {"x-warmroute-no-retry": "0"}, 2),
        ({}, {"x-warmroute-no-retry": "1"}, 1),
        ({"max_attempts": 1}, {}, 1),
        ({"retry_ratio": 0, "retry_min_per_s": 0}, {}, 1),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_one_attempt_only_where_that_is_asked_for(
    start_proxy: StartProxy, limits: dict[str, Any], headers: dict[str, str], attempts: int, stream: bool
) -> None:
    engines = [StubEngine(mode="reset") for _ in range(2)]
    proxy = await start_proxy(engines=engines, limits=limits, health=NEVER_OUT)
    answer = await proxy.client.post("/v1/completions", json={**OK, "stream": stream}, headers=headers)
    assert answer.status_code == 502
    assert f"{attempts} attempt(s) failed" in answer.json()["error"]["message"]
    [row] = await proxy.rows()
    assert len(row["attempts"]) == attempts
    assert all("x-warmroute-no-retry" not in seen for engine in engines for seen in engine.seen_headers)


async def test_a_failure_without_another_instance_does_not_use_the_budget(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[StubEngine(mode="error")], health=NEVER_OUT)
    answers = await flood(proxy, 5)
    assert {answer.status_code for answer in answers} == {502}
    assert len(proxy.engines[0].seen) == 5
    stats = await proxy.settled()
    assert (stats["retries"]["retried"], stats["retries"]["budget_exhausted"]) == (0, 0)


async def test_retries_keep_to_the_caps_of_the_others(start_proxy: StartProxy) -> None:
    bad, good = StubEngine(mode="reset"), StubEngine(prefill_s=0.1)
    peak = 0
    proxy = await start_proxy(
        engines=[bad, good], limits={"max_in_flight_per_instance": 2}, health=NEVER_OUT, policy={"name": "round_robin"}
    )

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, good.running)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    answers = await flood(proxy, 12)
    watching.cancel()
    assert {answer.status_code for answer in answers} == {200}
    assert peak == 2
    assert ledger_is_zero(await proxy.settled())
