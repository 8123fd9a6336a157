"""The dashboard's feed: shared messages, sampled decisions, bounds on viewers, and nothing while nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from policies.row import RequestOutcome, Row
from proxy.breakdown import Breakdown
from proxy.errors import RequestError
from proxy.ui import feed as feed_module
from proxy.ui.feed import DECISIONS_PER_MESSAGE, MAX_VIEWERS, DashboardFeed, event
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.fleet_client import ask
from tests.proxy.stub_engine import StubEngine


@pytest.fixture(autouse=True)
def _short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PERIOD_S", 0.05)


@contextlib.asynccontextmanager
async def viewing(proxy: Running) -> AsyncIterator[AsyncIterator[tuple[str, dict[str, Any]]]]:
    async with proxy.client.stream("GET", "/ui/feed") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events_of(answer)


async def events_of(answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    kind = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def feed_of(proxy: Running) -> DashboardFeed:
    return DashboardFeed(proxy.core, proxy.operations.fleet)


async def test_a_viewer_gets_the_state_and_what_happens_next(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    before = await ask(proxy)
    async with viewing(proxy) as events:
        kind, message = await anext(events)
        assert kind == "start"
        assert [row["request_id"] for row in message["decisions"]] == [before.headers["x-request-id"]]
        rows = (await proxy.client.get("/instances")).json()["instances"]
        assert [row["name"] for row in message["instances"]] == [row["name"] for row in rows]
        for name in ("kv_usage", "kv_capacity_tokens", "block_tokens"):  # a probe may have seen the request running
            assert message["instances"][0]["engine"][name] == rows[0]["engine"][name]
        conditions = (await proxy.client.get("/ready?verbose")).json()["conditions"]
        assert [each["name"] for each in message["conditions"]] == [each["name"] for each in conditions]
        after = await ask(proxy)
        seen: list[dict[str, Any]] = []
        while not seen:
            kind, message = await anext(events)
            assert kind == "state"
            seen = message["decisions"]
        (decision,) = seen
        (row,) = await proxy.rows(request_id=after.headers["x-request-id"])
        for name in ("request_id", "session_id", "class", "instance", "reason", "prompt_tokens", "outcome"):
            assert decision[name] == row[name]
        assert message["proxy"]["finished"] == 2
        assert message["proxy"]["viewers"] == 1


async def test_requests_in_flight_are_counted_by_class(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[StubEngine(token_delay_s=60, tokens=3)])
    feed = feed_of(proxy)
    body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
    async with proxy.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        (instance,) = data_of(feed.compute(1e9))["instances"]
        assert instance["in_flight"] == {"WARM": 1}
        assert instance["requests"] == 1
    await proxy.until(lambda: not proxy.core.breakdown.open_rows)
    (instance,) = data_of(feed.compute(1e9 + 1))["instances"]
    assert instance["in_flight"] == {}


async def test_requests_that_no_instance_got_are_among_the_failures_of_the_minute(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for outcome in (RequestOutcome.NO_INSTANCE, RequestOutcome.QUEUE_FULL, RequestOutcome.REJECTED, RequestOutcome.OK):
        finish(proxy.core.breakdown, outcome.value, outcome)
    message = data_of(feed_of(proxy).compute(1e9 + 1))
    assert message["minute"] == {"finished": 4, "failed": 2, "seconds": 60}


async def test_the_minute_names_the_seconds_that_the_first_viewers_rows_cover(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_READ_AT_START", 3)
    proxy = await start_proxy(1)
    feed = feed_of(proxy)
    for number in range(8):
        finish(proxy.core.breakdown, f"r{number}")
    assert data_of(feed.compute(1e9 + 20))["minute"] == {"finished": 3, "failed": 0, "seconds": 20}
    assert data_of(feed.compute(1e9 + 70))["minute"]["seconds"] == 60


async def test_viewers_share_one_computation(start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PERIOD_S", 60.0)
    proxy = await start_proxy(1)
    feed = feed_of(proxy)
    viewers = [feed.events() for _ in range(5)]
    starts = [await anext(viewer) for viewer in viewers]
    assert feed.viewers == 5
    assert feed.messages == 1
    assert len(set(starts)) == 1
    feed._computed_s -= 61  # a period has passed, though not ten
    messages = await asyncio.gather(*map(anext, viewers))
    assert len({id(message) for message in messages}) == 1
    assert feed.messages == 2
    for viewer in viewers:
        await viewer.aclose()  # type: ignore[attr-defined]
    assert feed.viewers == 0


async def test_a_viewer_that_missed_messages_of_others_gets_the_start_again(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "PERIOD_S", 60.0)
    proxy = await start_proxy(1)
    feed = feed_of(proxy)
    quick, slow = feed.events(), feed.events()
    await asyncio.gather(anext(quick), anext(slow))
    for number in range(2):
        finish(proxy.core.breakdown, f"r{number}")
        feed._computed_s -= 61
        assert (await anext(quick)).startswith(b"event: state\r\n")
    feed._computed_s -= 61
    caught_up = await anext(slow)
    assert caught_up.startswith(b"event: start\r\n")
    assert [row["request_id"] for row in data_of(caught_up)["decisions"]] == ["r0", "r1"]
    feed._computed_s -= 61
    assert (await anext(slow)).startswith(b"event: state\r\n")
    for viewer in (quick, slow):
        await viewer.aclose()  # type: ignore[attr-defined]


async def test_the_number_of_viewers_is_bounded(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    feed = feed_of(proxy)
    feed.viewers = MAX_VIEWERS
    with pytest.raises(RequestError) as refused:
        feed.check_room()
    assert (refused.value.status, refused.value.code) == (503, "too_many_viewers")
    with pytest.raises(RequestError):
        await anext(feed.events())
    assert feed.viewers == MAX_VIEWERS


async def test_a_burst_is_sampled_and_what_nobody_saw_is_not_kept(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    feed = feed_of(proxy)
    feed.compute(1e9)
    for number in range(200):
        finish(proxy.core.breakdown, f"r{number}")
    message = data_of(feed.compute(1e9 + 1))
    assert len(message["decisions"]) == DECISIONS_PER_MESSAGE
    assert message["decisions_left_out"] == 200 - DECISIONS_PER_MESSAGE
    assert data_of(feed.compute(1e9 + 2))["decisions"] == []


def finish(breakdown: Breakdown, request_id: str, outcome: RequestOutcome = RequestOutcome.OK) -> None:
    row = breakdown.open_row(Row(request_id, "/v1/completions", 1e9, prompt_tokens=3, outcome=outcome))
    breakdown.close_row(row)


def data_of(message: bytes) -> dict[str, Any]:
    lines = message.decode().splitlines()
    found: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))
    return found


async def test_the_stream_ends_when_the_proxy_shuts_down(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    async with viewing(proxy) as events:
        await anext(events)
        proxy.core.draining = True
        kinds = [kind async for kind, _ in events]
        assert kinds[-1] == "end"


async def test_nothing_is_computed_while_nobody_looks(start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0

    def count(self: DashboardFeed, now_unix_s: float) -> bytes:
        nonlocal computed
        computed += 1
        return original(self, now_unix_s)

    original = DashboardFeed.compute
    monkeypatch.setattr(DashboardFeed, "compute", count)
    proxy = await start_proxy(1)
    await ask(proxy)
    assert computed == 0
    async with viewing(proxy) as events:
        await anext(events)
    await ask(proxy)
    reached = computed
    for _ in range(5):
        await ask(proxy)
    assert reached >= 1
    assert computed <= reached + 1  # the viewer's connection may be noticed as closed after its next message


def test_rows_are_read_once_and_in_order() -> None:
    breakdown = Breakdown(capacity=5, rejected_capacity=2)
    for number in range(8):
        finish(breakdown, f"r{number}")
    rejected = breakdown.open_row(Row("bad", "/v1/completions", 1.0, outcome=RequestOutcome.REJECTED))
    assert breakdown.open_rows == {rejected}
    breakdown.close_row(rejected)
    assert breakdown.open_rows == set()
    assert [number for number, _ in breakdown.after(0, 100)] == [4, 5, 6, 7, 8, 9]
    assert [number for number, _ in breakdown.after(6, 100)] == [7, 8, 9]
    assert [number for number, _ in breakdown.after(0, 2)] == [7, 8, 9]
    assert breakdown.after(9, 100) == []


def test_texts_that_are_not_unicode_are_sent() -> None:
    assert b"\\" not in event("state", 1, {"error": "a \udcff path"})
    assert event("state", 1, {"error": "\n\n"}).count(b"\n") == 4
