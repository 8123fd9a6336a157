"""Traces of requests through the proxy, as a receiver of OTLP over HTTP decodes them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.conftest import Running, StartProxy
from tests.proxy.exchange.test_held_requests import GatedEngine
from tests.proxy.resume.rig import GREEDY
from tests.proxy.stub_engine import StubEngine
from tests.proxy.tokens.engine import TokenEngine
from tests.proxy.tracing.receiver import ReceivedSpan, TraceReceiver, trace_receiver

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
BODY: dict[str, Any] = {"model": "stub", "prompt": list(range(200)), "max_tokens": 4}
HAND_OFF = {
    "role": "kv_both",
    "offload": {"planner": "threshold", "params": {"min_decode_requests": 0}},
    "classes": {"medium_tokens": 50, "heavy_tokens": 100},
}
SERVER, CLIENT = 2, 3


@pytest.fixture
async def receiver() -> AsyncIterator[TraceReceiver]:
    async with trace_receiver() as running:
        yield running


def traced(receiver: TraceReceiver, **more: Any) -> dict[str, Any]:
    return {"tracing": {"enabled": True, "endpoint": receiver.url, "sample_ratio": 1, "interval_s": 0.05, **more}}


async def post(proxy: Running, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    return await proxy.client.post("/v1/completions", json={**BODY, **more}, headers=headers)


def assert_one_tree(spans: list[ReceivedSpan]) -> None:
    """All spans belong to one trace, every parent but the root's is a span, and times are in order."""
    assert len({span.trace_id for span in spans}) == 1
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans)
    [root] = [span for span in spans if span.kind == SERVER]
    for span in spans:
        assert span.start_ns <= span.end_ns, span
        if span is not root:
            assert span.parent_id in ids, span
            assert root.start_ns <= span.start_ns + 1000, span
            assert span.end_ns <= root.end_ns + 1000, span


@pytest.mark.parametrize("stream", [False, True])
async def test_a_co_located_request_is_one_trace_with_genai_names(
    start_proxy: StartProxy, receiver: TraceReceiver, stream: bool
) -> None:
    proxy = await start_proxy(engines=[StubEngine(cached_tokens=64), StubEngine(cached_tokens=64)], **traced(receiver))
    answer = await post(proxy, stream=stream, headers={"x-session-id": "s1"})
    assert answer.status_code == 200
    await receiver.got()
    assert_one_tree(receiver.spans)
    assert sorted(span.name for span in receiver.spans) == [
        "co-located leg",
        "first token",
        "route",
        "text_completion stub",
    ]
    root, [leg], [route] = receiver.root(), receiver.named("co-located leg"), receiver.named("route")
    instance = answer.headers["x-warmroute-instance"]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "stub",
        "gen_ai.request.stream": stream,
        "gen_ai.conversation.id": "s1",
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "warmroute.new_tokens": 136,
        "warmroute.held_seconds": 0.0,
        "warmroute.outcome": "ok",
        "warmroute.instance": instance,
        "warmroute.reason": answer.headers["x-warmroute-reason"],
        "warmroute.class": answer.headers["x-warmroute-class"],
        "warmroute.request_id": answer.headers["x-request-id"],
    }
    assert {key: root.attributes.get(key) for key in expected} == expected
    assert (root.parent_id, root.failed) == ("", False)
    assert root.attributes["gen_ai.response.time_to_first_chunk"] > 0  # type: ignore[operator]
    engine = proxy.engines[int(instance[-1])]
    assert (leg.kind, leg.attributes["warmroute.instance"]) == (CLIENT, instance)
    assert leg.attributes["server.port"] == engine.port
    scores = json.loads(str(route.attributes["warmroute.scores"]))
    assert {score["instance"] for score in scores} == {"inst-0", "inst-1"}
    assert all({"score", "cached_tokens", "inputs"} <= set(score) for score in scores)
    assert receiver.named("first token")[0].parent_id == leg.span_id
    assert engine.seen_headers[-1]["traceparent"] == f"00-{root.trace_id}-{leg.span_id}-03"
    assert receiver.resources[0]["service.name"] == "warmroute"
    assert (await proxy.rows())[0]["trace_id"] == root.trace_id


async def test_the_clients_context_is_continued_and_each_leg_passes_its_own(
    start_proxy: StartProxy, receiver: TraceReceiver
) -> None:
    proxy = await start_proxy(**HAND_OFF, **traced(receiver, sample_ratio=0))
    assert (await post(proxy, headers=SAMPLED)).headers["x-warmroute-prefill-instance"]
    await receiver.got()
    assert_one_tree(receiver.spans)
    root, [prefill], [decode] = receiver.root(), receiver.named("prefill leg"), receiver.named("decode leg")
    assert (root.trace_id, root.parent_id, root.state) == (TRACE, SPAN, "vendor=1")
    assert root.flags == 0x301
    assert prefill.end_ns <= decode.start_ns
    seen = {
        json.dumps(body["kv_transfer_params"]["do_remote_prefill"]): headers
        for engine in proxy.engines
        for body, headers in zip(engine.seen, engine.seen_headers, strict=True)
    }
    assert seen["false"]["traceparent"] == f"00-{TRACE}-{prefill.span_id}-01"
    assert seen["true"]["traceparent"] == f"00-{TRACE}-{decode.span_id}-01"
    assert {headers["tracestate"] for headers in seen.values()} == {"vendor=1"}
    assert receiver.named("first token")[0].parent_id == decode.span_id
    assert root.attributes["warmroute.offload.reason"] == "chosen"
    assert root.attributes["warmroute.prefill_instance"] == prefill.attributes["warmroute.instance"]


async def test_a_hand_off_that_fails_shows_its_leg_as_failed_and_the_plain_one_after_it(
    start_proxy: StartProxy, receiver: TraceReceiver
) -> None:
    engines = [StubEngine(mode="p_error") for _ in range(2)]
    proxy = await start_proxy(engines=engines, **HAND_OFF, **traced(receiver))
    assert (await post(proxy)).status_code == 200
    await receiver.got()
    assert_one_tree(receiver.spans)
    [prefill], [plain] = receiver.named("prefill leg"), receiver.named("co-located leg")
    assert (prefill.failed, plain.failed, receiver.root().failed) == (True, False, False)
    assert "P answered 500" in prefill.message
    assert receiver.root().attributes["warmroute.offload.reason"] == "fell_back_p_error"


async def test_a_retried_request_has_a_decision_and_a_leg_for_each_attempt(
    start_proxy: StartProxy, receiver: TraceReceiver
) -> None:
    proxy = await start_proxy(engines=[StubEngine(mode="error"), StubEngine(mode="error")], **traced(receiver))
    answer = await post(proxy)
    assert answer.status_code == 502
    await receiver.got()
    assert_one_tree(receiver.spans)
    legs, root = receiver.named("co-located leg"), receiver.root()
    assert [leg.failed for leg in legs] == [True, True]
    assert {leg.attributes["warmroute.instance"] for leg in legs} == {"inst-0", "inst-1"}
    assert len(receiver.named("route")) == 2
    assert receiver.named("first token") == []
    assert root.failed
    assert root.attributes["error.type"] == root.attributes["warmroute.outcome"] == "upstream_error"
    assert root.attributes["warmroute.attempts_failed"] == 2


async def test_a_held_request_shows_how_long_and_why(start_proxy: StartProxy, receiver: TraceReceiver) -> None:
    slow = GatedEngine()
    rule = {"name": "session_cap", "params": {"sessions": 1, "keep_s": 0.0}}
    proxy = await start_proxy(engines=[slow], admission=rule, **traced(receiver))
    first = asyncio.create_task(post(proxy, headers={"x-session-id": "a"}))
    await proxy.until(lambda: slow.running == 1)
    second = asyncio.create_task(post(proxy, headers={"x-session-id": "b"}))
    await proxy.until(lambda: len(proxy.core.holding) == 1)
    slow.open.set()
    await asyncio.gather(first, second)
    await receiver.got(2)
    [hold] = receiver.named("hold")
    of_held = [span for span in receiver.spans if span.trace_id == hold.trace_id]
    assert_one_tree(of_held)
    [leg], [root] = ([s for s in of_held if s.kind == CLIENT], [s for s in of_held if s.kind == SERVER])
    assert hold.attributes["warmroute.admission.reason"] == root.attributes["warmroute.admission.reason"]
    assert (hold.end_ns - hold.start_ns) / 1e9 == pytest.approx(root.attributes["warmroute.held_seconds"], abs=1e-6)
    assert root.start_ns <= hold.start_ns
    assert hold.end_ns <= leg.start_ns + 1000


async def test_a_client_that_leaves_ends_its_trace_without_an_error_of_the_server(
    start_proxy: StartProxy, receiver: TraceReceiver
) -> None:
    engine = StubEngine(mode="hang")
    proxy = await start_proxy(engines=[engine], **traced(receiver))
    asking = asyncio.create_task(post(proxy))
    await proxy.until(lambda: engine.running == 1)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await receiver.got()
    assert_one_tree(receiver.spans)
    root = receiver.root()
    assert (root.attributes["warmroute.outcome"], root.failed) == ("client_gone", False)
    assert receiver.named("co-located leg")[0].end_ns == root.end_ns


async def test_a_request_that_waits_in_the_queue_shows_it(start_proxy: StartProxy, receiver: TraceReceiver) -> None:
    slow = GatedEngine()
    proxy = await start_proxy(engines=[slow], limits={"max_in_flight": 1}, **traced(receiver))
    first = asyncio.create_task(post(proxy))
    await proxy.until(lambda: slow.running == 1)
    second = asyncio.create_task(post(proxy))
    await proxy.until(lambda: proxy.core.admission.waiting == 1)
    slow.open.set()
    await asyncio.gather(first, second)
    await receiver.got(2)
    [queue] = receiver.named("queue")
    assert_one_tree([span for span in receiver.spans if span.trace_id == queue.trace_id])
    assert queue.end_ns > queue.start_ns


async def test_a_resumed_stream_has_a_leg_for_each_engine_and_its_first_token_below_the_first(
    start_proxy: StartProxy, receiver: TraceReceiver
) -> None:
    engines: list[StubEngine] = [TokenEngine(break_after=7, break_by="reset"), TokenEngine()]
    resume = {"enabled": "always"}
    proxy = await start_proxy(engines=engines, resume=resume, policy={"name": "round_robin"}, **traced(receiver))
    assert (await proxy.client.post("/v1/completions", json=GREEDY)).status_code == 200
    await receiver.got()
    assert_one_tree(receiver.spans)
    broken, last = sorted(receiver.named("co-located leg"), key=lambda leg: leg.start_ns)
    assert (broken.failed, last.failed, receiver.root().failed) == (True, False, False)
    assert broken.end_ns <= last.start_ns
    assert receiver.named("first token")[0].parent_id == broken.span_id
    assert receiver.root().attributes["warmroute.resume"] == "resumed"


async def test_a_stream_that_breaks_off_is_an_error_of_leg_and_request(
    start_proxy: StartProxy, receiver: TraceReceiver
) -> None:
    proxy = await start_proxy(engines=[StubEngine(mode="break_stream")], **traced(receiver))
    await post(proxy, stream=True)
    await receiver.got()
    assert_one_tree(receiver.spans)
    [leg], root = receiver.named("co-located leg"), receiver.root()
    assert (leg.failed, root.failed, root.attributes["error.type"]) == (True, True, "stream_broken")


async def test_the_page_on_observability_names_every_span_and_attribute(
    start_proxy: StartProxy, receiver: TraceReceiver
) -> None:
    proxy = await start_proxy(**HAND_OFF, **traced(receiver))
    await post(proxy, headers={"x-session-id": "s"}, stream=True)
    await post(proxy, prompt=[1, 2, 3])
    await receiver.got(2)
    page = (Path(__file__).parents[3] / "docs" / "observability.md").read_text(encoding="utf-8")
    names = {span.name for span in receiver.spans if span.kind != SERVER}
    names |= {name for span in receiver.spans for name in span.attributes}
    assert len(names) > 25
    assert {name for name in names if f"`{name}`" not in page} == set()


async def test_rejected_and_passed_on_requests_are_traced_too(start_proxy: StartProxy, receiver: TraceReceiver) -> None:
    proxy = await start_proxy(1, **traced(receiver))
    assert (await proxy.client.post("/v1/completions", content=b"{nope")).status_code == 400
    await receiver.got()
    [root] = receiver.spans
    assert (root.name, root.attributes["http.response.status_code"], root.failed) == ("text_completion", 400, False)
    await proxy.client.post("/tokenize", json={"model": "stub", "prompt": "x"}, headers=SAMPLED)
    await receiver.got(2)
    [leg] = receiver.named("short leg")
    assert leg.trace_id == TRACE


async def test_a_request_that_is_not_sampled_passes_a_context_on_and_exports_nothing(
    start_proxy: StartProxy, receiver: TraceReceiver
) -> None:
    proxy = await start_proxy(1, **traced(receiver, sample_ratio=0))
    await post(proxy)
    await post(proxy, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    await post(proxy, headers={"traceparent": "nonsense", "tracestate": "a=b"})
    own, continued, invalid = [headers["traceparent"] for headers in proxy.engines[0].seen_headers]
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-02", own)
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-00", continued)
    assert SPAN not in continued
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-02", invalid)
    assert "tracestate" not in proxy.engines[0].seen_headers[2]
    assert {row["trace_id"] for row in await proxy.rows()} == {None}
    await proxy.core.tracing.close()
    assert receiver.posts == 0


async def test_without_traces_nothing_is_noted_and_the_clients_headers_pass_unchanged(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    await post(proxy, headers=SAMPLED)
    await post(proxy)
    first, second = proxy.engines[0].seen_headers
    assert (first["traceparent"], first["tracestate"]) == (SAMPLED["traceparent"], "vendor=1")
    assert "traceparent" not in second
    assert not any(proxy.core.tracing.results.values())
