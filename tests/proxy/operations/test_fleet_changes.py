"""Adding, removing, draining and changing instances while requests run: over HTTP, against scripted engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.proxy.conftest import StartProxy, ledger_is_zero
from tests.proxy.fleet_client import KEYS, Start, admins, ask, asked_of, engine, events_of, row_of, was_completed


@pytest.fixture
def start(start_proxy: StartProxy) -> Start:
    return admins(start_proxy)


async def test_an_instance_that_is_added_gets_requests_and_one_that_is_removed_gets_none(start: Start) -> None:
    running = await start(1)
    more = await engine()
    running.engines.append(more)
    added = await running.client.post("/instances", json={"url": more.url, "name": "late"})
    assert added.status_code == 201
    assert (added.json()["source"], added.json()["healthy"]) == ("api", True)
    assert await asked_of(running) == {"inst-0": 3, "late": 3}
    assert (await row_of(running, "late"))["index_capacity_blocks"] == more.blocks
    gone = await running.client.delete("/instances/late")
    assert (gone.status_code, gone.json()) == (200, {"name": "late", "removed": True, "cut_requests": 0})
    assert await asked_of(running) == {"inst-0": 6}
    names = [row["name"] for row in (await running.client.get("/instances")).json()["instances"]]
    assert names == ["inst-0"]
    assert (await running.client.get("/instances/late")).status_code == 404
    await more.stop()


async def test_nothing_is_left_of_a_removed_instance(start: Start) -> None:
    running = await start(2, policy={"name": "session_sticky"})
    for number in range(8):
        prompt = [number] * 64
        body = {"model": "stub", "prompt": prompt, "max_tokens": 4}
        await running.client.post("/v1/completions", json=body, headers={"x-session-id": f"s{number}"})
    state, core = running.core.router.state, running.core
    assert state.index.blocks("inst-1")
    assert state.sessions.count("inst-1")
    state.pairs.record(("inst-0", "inst-1"), False, 0.0)
    assert 'instance="inst-1"' in (await running.client.get("/metrics")).text
    await running.client.delete("/instances/inst-1")
    assert state.instances == ["inst-0"]
    assert state.sessions.count("inst-1") == 0
    assert "inst-1" not in state.index.match([1])
    assert not state.pairs._failures
    assert "inst-1" not in state.ledger._accounts
    assert "inst-1" not in core.metrics.errors.as_dict()["instances"]  # type: ignore[operator]
    assert "inst-1" not in (await running.client.get("/metrics")).text
    assert running.operations.fleet.departures == ()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"url": "http://127.0.0.1:1", "name": "inst-0"}, 409, "instance_exists"),
        ({"url": "THE_SAME", "name": "other"}, 409, "url_in_use"),
        ({"url": "http://169.254.169.254:80"}, 400, None),
        ({"url": "http://8.8.8.8:80"}, 400, "url_refused"),
        ({"url": "http://127.0.0.1:1", "bootstrap_url": "http://8.8.8.8:80"}, 400, "url_refused"),
        ({"url": "THE_PROXY"}, 400, "url_refused"),
        ({"url": "http://127.0.0.1:1", "api_key_env": "PATH"}, 400, "not_over_http"),
        ({"url": "ftp://127.0.0.1:1"}, 400, None),
        ({"url": "http://127.0.0.1:1", "unknown": 1}, 400, None),
        ({}, 400, None),
    ],
)
async def test_what_cannot_be_added_is_refused_and_changes_nothing(
    start: Start, body: dict[str, Any], status: int, code: str | None
) -> None:
    running = await start(1)
    meant = {"THE_SAME": running.engines[0].url, "THE_PROXY": running.url}
    if body.get("url") in meant:
        body = {**body, "url": meant[body["url"]]}
    answer = await running.client.post("/instances", json=body)
    assert answer.status_code == status
    if code is not None:
        assert answer.json()["error"]["code"] == code
    assert [instance.name for instance in running.core.instances] == ["inst-0"]
    assert running.core.router.state.instances == ["inst-0"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/instances"),
        ("PUT", "/instances/inst-0"),
        ("DELETE", "/instances/inst-0"),
        ("POST", "/instances/inst-0/drain"),
        ("POST", "/instances/inst-0/undrain"),
    ],
)
async def test_the_fleet_is_changed_with_an_admin_key_only(start_proxy: StartProxy, method: str, path: str) -> None:
    for keys, status in (({}, 403), (KEYS, 401)):
        running = await start_proxy(1, keys=keys)
        answer = await running.client.request(method, path, json={"url": "http://127.0.0.1:1"})
        assert answer.status_code == status
        assert [(each.name, each.draining) for each in running.core.instances] == [("inst-0", False)]


async def test_an_engine_that_does_not_answer_is_added_but_waits_for_its_first_good_probe(start: Start) -> None:
    running = await start(1)
    sick = await engine(mode="sick")
    added = await running.client.post("/instances", json={"url": sick.url, "name": "sick"})
    assert (added.status_code, added.json()["healthy"]) == (201, False)
    assert await asked_of(running) == {"inst-0": 6}
    sick.mode = "ok"
    await running.until(lambda: running.core.instances["sick"].healthy)
    assert await asked_of(running) == {"inst-0": 3, "sick": 3}
    await sick.stop()


async def test_a_draining_instance_finishes_its_streams_and_takes_nothing_new(start: Start) -> None:
    running, released = await start(2), asyncio.Event()
    for each in running.engines:
        each.tokens, each.streams_end = 10, released
    streams = [asyncio.create_task(ask(running, stream=True)) for _ in range(4)]
    await running.until(lambda: sum(each.running for each in running.engines) == 4)
    for _ in range(2):
        drained = await running.client.post("/instances/inst-0/drain")
        exported = (await running.client.get("/metrics")).text
        assert 'warmroute_instance_draining{instance="inst-0"} 1.0' in exported
        assert 'warmroute_instance_draining{instance="inst-1"} 0.0' in exported
        assert (drained.status_code, drained.json()["draining"], drained.json()["requests"]) == (200, True, 2)
    assert await asked_of(running, 4, max_tokens=1) == {"inst-1": 4}
    released.set()
    answers = await asyncio.gather(*streams)
    assert all(was_completed(answer.text, 10) for answer in answers)
    assert {answer.headers["x-warmroute-instance"] for answer in answers} == {"inst-0", "inst-1"}
    row = await row_of(running, "inst-0")
    assert (row["draining"], row["healthy"], row["requests"]) == (True, True, 0)
    for _ in range(2):
        assert (await running.client.post("/instances/inst-0/undrain")).json()["draining"] is False
    assert await asked_of(running) == {"inst-0": 3, "inst-1": 3}
    assert ledger_is_zero(await running.settled())


async def test_a_session_moves_on_when_its_instance_drains_and_stays_where_it_went(start: Start) -> None:
    running = await start(2, policy={"name": "session_sticky"})
    running.client.headers["x-session-id"] = "s"
    ((first, _),) = (await asked_of(running, 3)).items()
    await running.client.post(f"/instances/{first}/drain")
    ((second, _),) = (await asked_of(running, 3)).items()
    assert second != first
    await running.client.post(f"/instances/{first}/undrain")
    assert set(await asked_of(running, 3)) == {second}


@pytest.mark.parametrize("path", ["/instances/nobody", "/instances/nobody/drain", "/instances/nobody/undrain"])
async def test_an_unknown_instance_is_a_404(start: Start, path: str) -> None:
    running = await start(1)
    for method in ("DELETE", "PUT") if path.endswith("nobody") else ("POST",):
        answer = await running.client.request(method, path, json={"url": "http://127.0.0.1:1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_such_instance")


async def test_a_fleet_where_all_drain_says_so_and_the_last_instance_may_leave(start: Start) -> None:
    running = await start(1)
    await running.client.post("/instances/inst-0/drain")
    answer = await ask(running)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")
    assert (await running.client.get("/ready")).status_code == 503
    assert (await running.client.delete("/instances/inst-0")).status_code == 200
    answer = await ask(running)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")
    assert answer.headers["retry-after"]
    assert (await running.client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
    shown = (await running.client.get("/ready", params={"verbose": "1"})).json()["conditions"]
    assert [each["ok"] for each in shown if each["name"] == "instances"] == [False]
    back = {"url": running.engines[0].url, "name": "inst-0"}
    assert (await running.client.post("/instances", json=back)).status_code == 201
    assert await asked_of(running) == {"inst-0": 6}


async def test_the_condition_names_draining_as_the_reason_and_the_way_back(start: Start) -> None:
    running = await start(2)
    await running.client.post("/instances/inst-1/drain")
    shown = (await running.client.get("/ready", params={"verbose": "1"})).json()["conditions"]
    [found] = [each for each in shown if each["name"] == "instances"]
    assert found["detail"] == "1 of 2 instances can be sent requests, 1 draining"
    assert found["remedy"] == "POST /instances/inst-1/undrain ends it"


async def test_the_condition_does_not_suggest_to_undrain_what_is_being_removed(start: Start) -> None:
    running = await start(2)
    running.engines[1].mode = "hang"
    await running.client.post("/instances/inst-0/drain")
    waiting = asyncio.create_task(ask(running))
    await running.until(lambda: running.engines[1].running == 1)
    await running.client.post("/instances/inst-0/undrain")
    leaving = await running.client.delete("/instances/inst-1", params={"wait": "false", "grace_s": 60})
    assert leaving.status_code == 202
    shown = (await running.client.get("/ready", params={"verbose": "1"})).json()["conditions"]
    [found] = [each for each in shown if each["name"] == "instances"]
    assert found["detail"] == "1 of 2 instances can be sent requests, 1 being removed"
    assert found["remedy"] == "wait for the end of the removal: GET /instances has it under departing"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_removal_waits_for_running_streams(start: Start) -> None:
    running, released = await start(2), asyncio.Event()
    for each in running.engines:
        each.tokens, each.streams_end = 8, released
    streams = [asyncio.create_task(ask(running, stream=True)) for _ in range(6)]
    await running.until(lambda: sum(each.running for each in running.engines) == 6)
    removing = asyncio.create_task(running.client.delete("/instances/inst-0", params={"grace_s": 60}))
    await running.until(lambda: running.core.instances["inst-0"].draining)
    row = await row_of(running, "inst-0")
    assert (row["leaving"], row["requests"]) == (True, 3)
    refused = await running.client.post("/instances/inst-0/undrain")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "instance_leaving")
    assert await asked_of(running, 2, max_tokens=1) == {"inst-1": 2}
    released.set()
    assert all(was_completed(answer.text, 8) for answer in await asyncio.gather(*streams))
    assert (await removing).json() == {"name": "inst-0", "removed": True, "cut_requests": 0}
    assert ledger_is_zero(await running.settled())


async def test_what_is_left_at_the_end_of_the_grace_is_cut_with_an_error_event(start: Start) -> None:
    running = await start(1)
    running.engines[0].tokens, running.engines[0].token_delay_s = 1000, 0.02
    streams = [asyncio.create_task(ask(running, stream=True)) for _ in range(3)]
    await running.until(lambda: running.core.router.state.ledger.totals()["decoding_tokens"] == 9)
    gone = await running.client.delete("/instances/inst-0", params={"grace_s": 0.1})
    assert gone.json()["cut_requests"] == 3
    for answer in await asyncio.gather(*streams):
        assert not was_completed(answer.text, 1000)
        assert "inst-0 was removed from the fleet" in events_of(answer.text)[-1]
    assert ledger_is_zero(await running.settled())
    assert {row["outcome"] for row in await running.rows()} == {"stream_broken"}
    await running.until(lambda: running.engines[0].aborted == 3)
    assert "inst-0" not in (await running.client.get("/metrics")).text


async def test_a_request_that_has_no_byte_yet_goes_elsewhere_when_its_instance_is_cut(start: Start) -> None:
    running = await start(2)
    running.engines[0].mode = "hang"
    asking = [asyncio.create_task(ask(running)) for _ in range(2)]
    await running.until(lambda: running.engines[0].running == 1)
    gone = await running.client.delete("/instances/inst-0", params={"grace_s": 0})
    assert gone.json()["cut_requests"] == 1
    answers = await asyncio.gather(*asking)
    assert [(each.status_code, each.headers["x-warmroute-instance"]) for each in answers] == [(200, "inst-1")] * 2
    assert ledger_is_zero(await running.settled())


async def test_a_second_removal_brings_the_end_closer_and_one_without_waiting_answers_at_once(start: Start) -> None:
    running = await start(1)
    running.engines[0].tokens, running.engines[0].token_delay_s = 1000, 0.02
    stream = asyncio.create_task(ask(running, stream=True))
    await running.until(lambda: running.engines[0].running == 1)
    begun = await running.client.delete("/instances/inst-0", params={"grace_s": 600, "wait": "false"})
    assert (begun.status_code, begun.json()["requests"]) == (202, 1)
    departing = (await running.client.get("/instances")).json()["departing"]
    assert [(each["name"], each["replaced"]) for each in departing] == [("inst-0", False)]
    assert 590 < departing[0]["left_s"] <= 600
    assert (await running.client.delete("/instances/inst-0", params={"grace_s": 0})).json()["cut_requests"] == 1
    assert not was_completed((await stream).text, 1000)


async def test_another_engine_takes_over_a_name_while_the_old_one_finishes(start: Start) -> None:
    running = await start(1)
    old, new, released = running.engines[0], await engine(), asyncio.Event()
    old.tokens, old.streams_end = 10, released
    prompt = list(range(64))
    streams = [asyncio.create_task(ask(running, stream=True, prompt=prompt)) for _ in range(3)]
    await running.until(lambda: old.running == 3)
    state = running.core.router.state
    assert state.index.blocks("inst-0") == 4
    replaced = await running.client.put("/instances/inst-0", json={"url": new.url})
    assert (replaced.status_code, replaced.json()["url"], replaced.json()["requests"]) == (200, new.url, 0)
    assert replaced.json()["source"] == "file"
    assert state.index.blocks("inst-0") == 0
    departing = (await running.client.get("/instances")).json()["departing"]
    assert [(each["url"], each["requests"], each["replaced"]) for each in departing] == [(old.url, 3, True)]
    assert state.ledger.totals()["requests"] == 3
    assert await asked_of(running, 3, prompt=prompt) == {"inst-0": 3}
    assert len(new.seen) == 3
    released.set()
    assert all(was_completed(answer.text, 10) for answer in await asyncio.gather(*streams))
    await running.until(lambda: not running.operations.fleet.departures)
    assert ledger_is_zero(await running.settled())
    assert 'instance="inst-0"' in (await running.client.get("/metrics")).text
    await new.stop()


async def test_an_instance_that_is_drained_stays_so_with_another_engine(start: Start) -> None:
    running = await start(2)
    more = await engine()
    running.engines.append(more)
    await running.client.post("/instances/inst-0/drain")
    replaced = await running.client.put("/instances/inst-0", json={"url": more.url})
    assert (replaced.status_code, replaced.json()["draining"]) == (200, True)
    assert await asked_of(running) == {"inst-1": 6}
    undrained = await running.client.post("/instances/inst-0/undrain")
    assert undrained.json()["draining"] is False
    assert await asked_of(running) == {"inst-0": 3, "inst-1": 3}
    await more.stop()


async def test_a_rank_is_not_replaced_by_what_is_no_rank(start: Start) -> None:
    running = await start(1)
    more = await engine()
    rank = {"url": more.url, "data_parallel_size": 2, "data_parallel_rank": 0}
    assert (await running.client.post("/instances", json={**rank, "name": "g"})).status_code == 201
    refused = await running.client.put("/instances/g/0", json={"url": more.url})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "instance_has_ranks")
    changed = await running.client.put("/instances/g/0", json={**rank, "host": "elsewhere"})
    assert (changed.status_code, changed.json()["host"]) == (200, "elsewhere")
    await more.stop()


async def test_failures_of_the_engine_that_was_replaced_are_not_held_against_the_new_one(start: Start) -> None:
    running = await start(1, health={"interval_s": 60, "timeout_s": 2.0})
    old, new = running.engines[0], await engine()
    old.tokens, old.token_delay_s = 1000, 0.02
    streams = [asyncio.create_task(ask(running, stream=True)) for _ in range(4)]
    await running.until(lambda: old.running == 4)
    await running.client.put("/instances/inst-0", json={"url": new.url}, params={"grace_s": 0})
    answers = await asyncio.gather(*streams)
    assert not any(was_completed(answer.text, 1000) for answer in answers)
    instance = running.core.instances["inst-0"]
    assert (instance.healthy, instance.failures_in_a_row, instance.last_error) == (True, 0, None)
    assert await asked_of(running, 2) == {"inst-0": 2}
    assert ledger_is_zero(await running.settled())
    await new.stop()


async def test_an_engine_that_does_not_answer_replaces_none_unless_forced(start: Start) -> None:
    running = await start(1)
    sick = await engine(mode="sick")
    refused = await running.client.put("/instances/inst-0", json={"url": sick.url})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "instance_unhealthy")
    assert await asked_of(running, 2) == {"inst-0": 2}
    forced = await running.client.put("/instances/inst-0", json={"url": sick.url}, params={"force": "true"})
    assert (forced.status_code, forced.json()["healthy"]) == (200, False)
    assert (await ask(running)).status_code == 503
    await sick.stop()


async def test_other_settings_for_the_same_engine_keep_its_cache_and_its_requests(start: Start) -> None:
    running = await start(2)
    each, released = running.engines[0], asyncio.Event()
    each.tokens, each.streams_end = 8, released
    stream = asyncio.create_task(ask(running, stream=True, prompt=list(range(64))))
    await running.until(lambda: each.running == 1)
    body = {"url": each.url, "bootstrap_url": each.url, "role": "kv_producer"}
    changed = await running.client.put("/instances/inst-0", json=body)
    assert (changed.json()["role"], changed.json()["requests"], changed.json()["index_blocks"]) == ("kv_producer", 1, 4)
    assert await asked_of(running, 3) == {"inst-1": 3}  # it only prefills from now on
    released.set()
    assert was_completed((await stream).text, 8)
    differs = await running.client.put("/instances/inst-0", json={**body, "name": "else"})
    assert (differs.status_code, differs.json()["error"]["param"]) == (400, "name")
    taken = await running.client.put("/instances/inst-0", json={"url": running.engines[1].url})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "url_in_use")
