"""Pages and live streams of ``GET /breakdown``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from policies.row import RequestOutcome, Row
from proxy.breakdown import Breakdown
from proxy.gather.records import PageQuery
from proxy.records.filters import RowFilter
from proxy.settings import load_settings
from tests.proxy.conftest import Running, StartProxy, serving
from tests.proxy.stub_engine import StubEngine

BODY = {"model": "stub", "prompt": list(range(40)), "max_tokens": 4}
ALL = RowFilter({})


def end(breakdown: Breakdown, request_id: str, outcome: RequestOutcome = RequestOutcome.OK, **fields: Any) -> None:
    breakdown.close_row(breakdown.open_row(Row(request_id, "/v1/completions", 1.0, outcome=outcome, **fields)))


async def ids(breakdown: Breakdown, *args: Any, **query: Any) -> list[str]:
    return [json.loads(line)["request_id"] for _, line in (await breakdown.page(*args, **query)).rows]


async def test_pages_go_back_to_the_oldest_row_and_repeat_none() -> None:
    breakdown = Breakdown(100)
    for number in range(1, 26):
        end(breakdown, f"r{number}", RequestOutcome.REJECTED if number % 5 == 0 else RequestOutcome.OK)
    page = await breakdown.page(10, ALL)
    seen = [number for number, _ in page.rows]
    while page.before is not None:
        page = await breakdown.page(10, ALL, before=page.before)
        seen = [number for number, _ in page.rows] + seen
    served = [number for number in range(1, 26) if number % 5]
    assert seen == sorted(set(seen))
    assert set(served) <= set(seen)
    assert page.rows[0][0] == 1


async def test_pages_go_forward_in_order_and_end_with_the_cursor_of_the_next_row() -> None:
    breakdown = Breakdown(100)
    for number in range(1, 8):
        end(breakdown, f"r{number}", RequestOutcome.REJECTED if number == 4 else RequestOutcome.OK)
    page = await breakdown.page(3, ALL, after=2)
    assert ([number for number, _ in page.rows], page.after) == ([3, 4, 5], 5)
    page = await breakdown.page(3, ALL, after=page.after)
    assert ([number for number, _ in page.rows], page.after) == ([6, 7], 7)
    end(breakdown, "r8")
    assert await ids(breakdown, 3, ALL, after=page.after) == ["r8"]
    nothing = await breakdown.page(3, RowFilter({"outcome": "shutdown"}), after=2)
    assert (nothing.rows, nothing.after) == ([], 8)


async def test_a_cursor_of_a_process_whose_rows_are_lost_gives_all_rows() -> None:
    breakdown = Breakdown(10)
    end(breakdown, "r1")
    assert await ids(breakdown, 10, ALL, after=500) == ["r1"]


async def test_filters_by_policy_reason_age_and_duration(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, policy={"name": "round_robin"})
    for _ in range(3):
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    rows = await proxy.rows(policy="round_robin")
    assert len(rows) == 3
    assert [row["row"] for row in rows] == [1, 2, 3]
    assert len(await proxy.rows(reason=rows[0]["reason"])) == 3
    assert await proxy.rows(reason="affinity") == []
    assert await proxy.rows(policy="linear") == []
    assert len(await proxy.rows(since_s=3600)) == 3
    assert await proxy.rows(min_e2e_s=3600) == []
    bound_s = max(row["stages_ms"]["total"] for row in rows) / 1e3 - 1e-6
    slow = [row["row"] for row in rows if row["stages_ms"]["total"] / 1e3 >= bound_s]  # several, if they took as long
    assert [row["row"] for row in await proxy.rows(min_e2e_s=bound_s)] == slow
    end(proxy.core.breakdown, "of 1970")
    assert [row["row"] for row in await proxy.rows()] == [1, 2, 3, 4]
    assert [row["row"] for row in await proxy.rows(since_s=3600)] == [1, 2, 3]


async def test_classes_in_any_case_are_filters_and_unknown_classes_and_outcomes_are_refused(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(1)
    await proxy.client.post("/v1/completions", json=BODY)
    await proxy.settled()
    [row] = (await proxy.client.get("/breakdown")).json()["rows"]
    for written in (row["class"], row["class"].lower()):
        assert (await proxy.client.get("/breakdown", params={"class": written})).json()["rows"] == [row]
    for name, wrong, known in (("class", "LIGHT", "WARM"), ("outcome", "failed", "upstream_error")):
        refused = await proxy.client.get("/breakdown", params={name: wrong})
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert f"query.{name}" in message
        assert known in message


async def test_a_live_stream_has_no_format(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    refused = await proxy.client.get("/breakdown", params={"follow": "true", "format": "jsonl"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "format")


def test_workers_get_every_parameter_of_a_page_but_the_download() -> None:
    """A format that is unknown is theirs to refuse."""
    assert PageQuery(b"limit=3&format=jsonl", 0.0).target == "/breakdown?limit=3"
    assert PageQuery(b"limit=3&format=xml", 0.0).target == "/breakdown?limit=3&format=xml"


async def test_the_answer_has_cursors(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for _ in range(5):
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    answer = (await proxy.client.get("/breakdown", params={"limit": 2})).json()
    assert [row["row"] for row in answer["rows"]] == [4, 5]
    assert answer["next"] == {"before": 4, "after": 5}
    assert answer["proxy_started_unix_s"] == answer["rows"][0]["proxy_started_unix_s"]
    answer = (await proxy.client.get("/breakdown", params={"limit": 3, "before": 4})).json()
    assert [row["row"] for row in answer["rows"]] == [1, 2, 3]
    assert answer["next"] == {"before": None, "after": 3}
    for after, before in ((0, None), (99_999, None), (2, 3)):
        page = (await proxy.client.get("/breakdown", params={"limit": 1, "after": after})).json()
        assert page["next"]["before"] == before
    lines = (await proxy.client.get("/breakdown", params={"format": "jsonl", "after": 3})).text.splitlines()
    assert [json.loads(line)["row"] for line in lines] == [4, 5]


Event = dict[str, str]


@asynccontextmanager
async def following(proxy: Running, headers: dict[str, str] | None = None, **query: Any) -> AsyncIterator[Any]:
    """Iterator of server-sent events of the breakdown."""

    async def events(answer: httpx.Response) -> AsyncGenerator[Event]:
        event: Event = {}
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if line and name:
                event[name] = value
            elif event:
                yield event
                event = {}

    async with (
        asyncio.timeout(20),
        proxy.client.stream("GET", "/breakdown", params={"follow": "true", **query}, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer)
        try:
            yield found
        finally:
            await found.aclose()


async def test_following_gives_past_rows_after_a_number_then_new_ones_that_match(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for _ in range(3):
        await proxy.client.post("/v1/completions", json=BODY)
    async with following(proxy, {"last-event-id": "1"}, outcome="ok") as events:
        assert [(await anext(events))["id"] for _ in range(2)] == ["2", "3"]
        await proxy.client.post("/v1/completions", content=b"{")
        await proxy.client.post("/v1/completions", json=BODY)
        event = await anext(events)
        assert (event["event"], event["id"]) == ("row", "5")
        assert json.loads(event["data"])["outcome"] == "ok"
    await proxy.until(lambda: proxy.core.breakdown.subscribers == 0)


async def test_following_reports_dropped_rows(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    async with following(proxy, after=0) as events:
        await proxy.until(lambda: proxy.core.breakdown.subscribers == 1)
        for number in range(1500):  # more than a buffer, without letting the stream run
            end(proxy.core.breakdown, f"r{number}")
        assert await anext(events) == {"event": "dropped", "data": '{"rows": 500}'}
        assert (await anext(events))["id"] == "501"
    await proxy.until(lambda: proxy.core.breakdown.subscribers == 0)
    metrics = (await proxy.client.get("/metrics")).text
    assert 'warmroute_breakdown_dropped_rows_total{reader="subscriber"} 500.0' in metrics


async def test_streams_are_bounded_in_number_and_end_at_the_shutdown(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, breakdown={"max_followers": 1})
    async with following(proxy) as events:
        await proxy.until(lambda: proxy.core.breakdown.subscribers == 1)
        refused = await proxy.client.get("/breakdown", params={"follow": "true"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_followers")
        await proxy.client.post("/v1/completions", json=BODY)
        assert (await anext(events))["id"] == "1"
        proxy.core.breakdown.end_subscriptions()
        assert (await anext(events))["event"] == "end"
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_a_subscription_drops_the_oldest_rows_and_ends_with_the_breakdown() -> None:
    breakdown = Breakdown(10)
    async with breakdown.subscribe(buffer_rows=2) as rows:
        for number in range(5):
            end(breakdown, f"r{number}")
        breakdown.close()
        assert [json.loads(row)["request_id"] async for row in rows] == ["r3", "r4"]
        assert rows.dropped == breakdown.feed_dropped == 3
    assert breakdown.feed_dropped == 3
    async with breakdown.subscribe() as rows:
        assert [row async for row in rows] == []


@pytest.mark.parametrize("admin_port", [None, 0], ids=["main listener", "admin listener"])
async def test_a_stream_does_not_delay_the_shutdown(admin_port: int | None) -> None:
    engine = await StubEngine().start()
    fleet: Any = [{"name": "inst-0", "url": engine.url}]
    settings = load_settings(None, port=0, instances=fleet, log_level="error", admin={"port": admin_port})
    ended = asyncio.Event()

    async def follow(url: str) -> str:
        async with (
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
            client.stream("GET", "/breakdown", params={"follow": "true"}) as answer,
        ):
            try:
                return (await answer.aread()).decode()
            finally:
                ended.set()

    async with serving(settings) as (app, url):
        core = app.core
        following = asyncio.create_task(follow(url if admin_port is None else f"http://127.0.0.1:{core.admin_port}"))
        for _ in range(400):
            if core.breakdown.subscribers:
                break
            await asyncio.sleep(0.02)
        assert core.breakdown.subscribers == 1
        assert not ended.is_set()
    async with asyncio.timeout(20):
        assert (await following).endswith('event: end\ndata: {"reason": "shutdown"}\n\n')
    await engine.stop()
