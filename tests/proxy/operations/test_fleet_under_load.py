"""Fleet changes during hand-offs and many streams."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.conftest import StartProxy, ledger_is_zero
from tests.proxy.fleet_client import Start, admins, ask, asked_of, engine, row_of, was_completed


@pytest.fixture
def start(start_proxy: StartProxy) -> Start:
    return admins(start_proxy)


async def test_p_and_d_of_a_hand_off_may_leave_in_the_middle_of_it(start: Start) -> None:
    for leaver in ("p", "d"):
        running = await start(
            2,
            role="kv_both",
            policy={"name": "round_robin"},
            offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
            classes={"medium_tokens": 8, "heavy_tokens": 16},
        )
        pulled = asyncio.Event()
        for each in running.engines:
            each.pulls_end = pulled
        asking = asyncio.create_task(ask(running, prompt=list(range(64))))
        state = running.core.router.state
        await running.until(lambda: state.holds.total() == 64)  # noqa: B023 - awaited in this turn
        p = next(name for name in state.instances if state.holds.tokens(name, 0.0))
        d = next(name for name in state.instances if name != p)
        await running.client.delete(f"/instances/{p if leaver == 'p' else d}", params={"grace_s": 0})
        pulled.set()
        answer = await asking
        assert answer.status_code == 200
        assert ledger_is_zero(await running.settled())
        assert not state.pairs._failures
        assert set(state.holds._kept) <= set(state.instances)


async def test_a_removal_of_p_waits_until_d_has_pulled(start: Start) -> None:
    running = await start(
        2,
        role="kv_both",
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
        classes={"medium_tokens": 8, "heavy_tokens": 16},
    )
    pulled = asyncio.Event()
    for each in running.engines:
        each.pulls_end = pulled
    asking = asyncio.create_task(ask(running, prompt=list(range(64))))
    state = running.core.router.state
    await running.until(lambda: state.holds.total() == 64)
    (p,) = (name for name in state.instances if state.holds.tokens(name, 0.0))
    removing = asyncio.create_task(running.client.delete(f"/instances/{p}", params={"grace_s": 10}))
    await running.until(lambda: running.core.instances[p].draining)
    assert (await row_of(running, p))["held_tokens"] == 64
    pulled.set()
    answer = await asking
    assert answer.headers["x-warmroute-prefill-instance"] == p
    assert (await removing).json()["cut_requests"] == 0
    assert (await running.rows())[0]["offload_reason"] == "chosen"
    assert ledger_is_zero(await running.settled())


async def test_kv_events_may_be_followed_from_some_time_on(start: Start) -> None:
    running = await start(1)
    body = {"url": running.engines[0].url, "events_url": "tcp://127.0.0.1:1"}
    assert (await row_of(running, "inst-0"))["kv_events"] is None
    changed = await running.client.put("/instances/inst-0", json=body)
    assert changed.json()["kv_events"]["not_trusted_because"] == "waiting_for_events"
    again = await running.client.put("/instances/inst-0", json={"url": running.engines[0].url})
    assert again.json()["kv_events"] is None
    assert await asked_of(running, 2) == {"inst-0": 2}


@pytest.mark.parametrize("name", ["a b", "a\r\nx-header: 1", "naïve", "x" * 129])
async def test_a_name_must_fit_into_a_header(start: Start, name: str) -> None:
    running = await start(1)
    answer = await running.client.post("/instances", json={"url": "http://127.0.0.1:1", "name": name})
    assert (answer.status_code, len(running.core.instances)) == (400, 1)


async def test_counters_are_right_after_thirty_streams_met_a_fleet_that_keeps_changing(start: Start) -> None:
    running = await start(3)
    spare = [await engine() for _ in range(3)]
    for each in (*running.engines, *spare):
        each.tokens, each.token_delay_s = 15, 0.02

    async def client(number: int) -> bool:
        await asyncio.sleep(number * 0.02)
        answer = await ask(running, stream=True, prompt=[number % 5] * 64)
        assert answer.status_code == 200
        return was_completed(answer.text, 15)

    clients = [asyncio.create_task(client(number)) for number in range(30)]
    http = running.client
    await asyncio.sleep(0.1)
    assert (await http.post("/instances", json={"url": spare[0].url, "name": "x"})).status_code == 201
    assert (await http.delete("/instances/inst-0", params={"grace_s": 60, "wait": "false"})).status_code == 202
    assert (await http.put("/instances/inst-1", json={"url": spare[1].url})).status_code == 200
    assert (await http.post("/instances/x/drain")).status_code == 200
    assert (await http.post("/instances", json={"url": spare[2].url, "name": "y"})).status_code == 201
    assert (await http.post("/instances/x/undrain")).status_code == 200
    assert (await http.delete("/instances/inst-2", params={"grace_s": 60})).status_code == 200
    assert await asyncio.gather(*clients) == [True] * 30
    await running.until(lambda: not running.operations.fleet.departures)
    assert ledger_is_zero(await running.settled())
    assert sorted(running.core.router.state.instances) == ["inst-1", "x", "y"]
    assert {each.aborted for each in (*running.engines, *spare)} == {0}
    for each in spare:
        await each.stop()
