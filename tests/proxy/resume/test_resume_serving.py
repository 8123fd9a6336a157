"""Resumed streams through the real server: engines break off in every possible way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.resume.rig import CHAT, GREEDY, IDS, USAGE, read
from tests.proxy.tokens.engine import TokenEngine

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


async def started(start_proxy: StartProxy, engines: Sequence[TokenEngine], **settings: Any) -> Running:
    """Engines that are tried in order, each named by its number.

    Based on the turns of round_robin over the remaining engines: the first of all, the second of the rest, the first of
    the rest.
    """
    resume = {"enabled": "always", **settings.pop("resume", {})}
    fleet = list(engines)
    fleet[1:3] = fleet[2:0:-1] if len(fleet) > 2 else fleet[1:3]
    each = [{"name": f"inst-{engines.index(engine)}"} for engine in fleet]
    return await start_proxy(engines=fleet, each=each, resume=resume, policy={"name": "round_robin"}, **settings)


async def ask(proxy: Running, body: dict[str, Any], **headers: str) -> bytes:
    path = CHATS if "messages" in body else COMPLETIONS
    answer = await proxy.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200
    return answer.content


def unbroken(body: dict[str, Any], **engine: Any) -> dict[str, Any]:
    return read(b"\n\n".join([*TokenEngine(port=1, **engine).events(body, "r"), b""]))


async def check_quiet(proxy: Running) -> dict[str, Any]:
    """Check that nothing is left of the request; returns its row."""
    assert ledger_is_zero(await proxy.settled())
    [row] = await proxy.rows()
    return row


def counted(metrics: str) -> dict[str, float]:
    lines = [line for line in metrics.splitlines() if line.startswith("warmroute_resumes_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


BODIES = {
    "completion": GREEDY | USAGE,
    "chat": CHAT | USAGE,
    "ids asked": GREEDY | USAGE | IDS,
    "repeated": GREEDY | USAGE | {"stop": "nowhere"},
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("way", ["reset", "stall", "error_event", "end", "torn"])
async def test_the_client_does_not_see_the_break(start_proxy: StartProxy, kind: str, way: str) -> None:
    body = BODIES[kind]
    engines = [TokenEngine(break_after=7, break_by=way), TokenEngine()]
    # Short only where it is reached: a machine that stalls must not break the other streams.
    proxy = await started(start_proxy, engines, timeouts={"idle_s": 0.3 if way == "stall" else 60.0})
    assert read(await ask(proxy, body)) == unbroken(body)
    row = await check_quiet(proxy)
    assert (row["outcome"], row["status"], row["error"]) == ("ok", 200, None)
    assert (row["resumed"], row["resume"], row["instance"]) == (1, "resumed", "inst-1")
    assert [attempt["instance"] for attempt in row["attempts"]] == ["inst-0"]
    assert row["completion_tokens"] == 30
    assert row["prompt_tokens"] == unbroken(body)["usage"][0][0]
    assert row["actual_cached_tokens"] <= row["prompt_tokens"]
    assert row["stages_ms"]["resume"] > 0
    assert len(engines[1].seen) == 1
    assert ("prompt" in engines[1].seen[0]) is (kind != "repeated" or "prompt" in body)
    assert (engines[1].seen[0] == engines[0].seen[0]) is (kind == "repeated")
    # The session's and request's ids go to the second engine too.
    assert engines[1].seen_headers[0]["x-request-id"] == row["request_id"]
    assert counted((await proxy.client.get("/metrics")).text) == {"resumed": 1.0}


async def test_usage_that_the_client_did_not_ask_for_stays_with_the_proxy(start_proxy: StartProxy) -> None:
    proxy = await started(start_proxy, [TokenEngine(break_after=7), TokenEngine()])
    said = await ask(proxy, GREEDY)
    assert read(said) == unbroken(GREEDY)
    assert b"usage" not in said
    row = await check_quiet(proxy)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (5, 30)


@pytest.mark.parametrize("body", [GREEDY, CHAT], ids=["completion", "chat"])
async def test_a_stream_that_does_not_break_is_as_the_engine_wrote_it(
    start_proxy: StartProxy, body: dict[str, Any]
) -> None:
    engine = TokenEngine()
    proxy = await started(start_proxy, [engine])
    said = await ask(proxy, body, **{"x-request-id": "r"})
    assert engine.seen[0] == body | IDS | USAGE
    without = [event for event in engine.events(body, "r") if b'"usage"' not in event]
    assert said == b"\n\n".join([*without, b""])
    row = await check_quiet(proxy)
    assert (row["resumed"], row["resume"]) == (0, None)
    assert counted((await proxy.client.get("/metrics")).text) == {}


@pytest.mark.parametrize(
    ("enabled", "header", "resumed"),
    [
        ("never", {"x-warmroute-resume": "1"}, False),
        ("on_request", {}, False),
        ("on_request", {"x-warmroute-resume": "1"}, True),
        ("always", {}, True),
        ("always", {"x-warmroute-resume": "0"}, False),
    ],
)
async def test_requests_are_not_resumed_unless_requested(
    start_proxy: StartProxy, enabled: str, header: dict[str, str], resumed: bool
) -> None:
    engines = [TokenEngine(break_after=7), TokenEngine()]
    proxy = await started(start_proxy, engines, resume={"enabled": enabled})
    said = await ask(proxy, GREEDY | USAGE, **header)
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resume"]) == (("ok", "resumed") if resumed else ("stream_broken", None))
    assert (b"stream_broken" in said) is not resumed
    assert ("return_token_ids" in engines[0].seen[0]) is resumed
    assert engines[0].raw_bodies[0] == json.dumps(GREEDY | USAGE, separators=(",", ":")).encode() or resumed


@pytest.mark.parametrize(
    ("change", "engine", "settings", "result"),
    [
        ({"temperature": 0.7}, {}, {}, "sampled"),
        ({"n": 2}, {}, {}, "shape"),
        ({"logprobs": 1}, {}, {}, "logprobs"),
        ({"stop": "nowhere"}, {"break_after": 20}, {"repeat_tokens": 19}, "too_long_to_repeat"),
        ({"temperature": 0.7}, {"per_event": 4}, {"sampled": True}, "no_clean_position"),
        ({}, {"framing": b"\r\n\r\n"}, {}, "unreadable"),
    ],
)
async def test_what_may_not_be_resumed_ends_with_the_error_event(
    start_proxy: StartProxy,
    change: dict[str, Any],
    engine: dict[str, Any],
    settings: dict[str, Any],
    result: str,
) -> None:
    engines = [TokenEngine(**{"break_after": 7, **engine}), TokenEngine()]
    proxy = await started(start_proxy, engines, resume=settings)
    said = await ask(proxy, GREEDY | change)
    last = json.loads(said.rstrip().rsplit(b"data: ", 1)[1])
    assert last["error"]["code"] == "stream_broken"
    assert b"[DONE]" not in said
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resume"], row["resumed"]) == ("stream_broken", result, 0)
    assert engines[1].seen == []
    assert counted((await proxy.client.get("/metrics")).text) == {result: 1.0}
    asked = result in {"too_long_to_repeat", "no_clean_position", "unreadable"}
    assert ("return_token_ids" in engines[0].seen[0]) is asked  # no overhead where resuming is ruled out


async def test_an_unfinished_tool_call_is_not_resumed(start_proxy: StartProxy) -> None:
    proxy = await started(start_proxy, [TokenEngine(break_after=9, tool_after=4), TokenEngine()])
    assert b"stream_broken" in await ask(proxy, CHAT | {"tools": [{}]})
    assert (await check_quiet(proxy))["resume"] == "tool_call"


async def test_a_second_break_is_resumed_too(start_proxy: StartProxy) -> None:
    engines = [TokenEngine(break_after=7), TokenEngine(break_after=6, break_by="torn"), TokenEngine()]
    proxy = await started(start_proxy, engines)
    assert read(await ask(proxy, CHAT | USAGE)) == unbroken(CHAT | USAGE)
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resumed"], row["resume"], row["instance"]) == ("ok", 2, "resumed", "inst-2")
    assert [attempt["instance"] for attempt in row["attempts"]] == ["inst-0", "inst-1"]


async def test_there_is_an_end_to_resuming(start_proxy: StartProxy) -> None:
    engines = [TokenEngine(break_after=7) for _ in range(4)]
    proxy = await started(start_proxy, engines, resume={"max_resumes": 2})
    said = await ask(proxy, GREEDY)
    assert said.count(b"stream_broken") == 1
    texts = [json.loads(line[6:]) for line in said.splitlines() if line.startswith(b"data: {")]
    text = "".join(event["choices"][0]["text"] for event in texts[:-1])
    assert unbroken(GREEDY)["text"].startswith(text)
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resumed"], row["resume"]) == ("stream_broken", 2, "exhausted")
    assert [attempt["instance"] for attempt in row["attempts"]] == ["inst-0", "inst-1", "inst-2"]
    assert engines[3].seen == []


@pytest.mark.parametrize("engine", [{"mode": "error"}, {"mode": "reset"}, {"status": 400}, {"break_after": 0}])
async def test_after_an_engine_that_refuses_to_continue_the_next_is_tried(
    start_proxy: StartProxy, engine: dict[str, Any]
) -> None:
    engines = [TokenEngine(break_after=7), TokenEngine(**engine), TokenEngine()]
    proxy = await started(start_proxy, engines)
    assert read(await ask(proxy, GREEDY | USAGE)) == unbroken(GREEDY | USAGE)
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resumed"], row["instance"]) == ("ok", 1, "inst-2")
    assert [attempt["instance"] for attempt in row["attempts"]] == ["inst-0", "inst-1"]


@pytest.mark.parametrize(("others", "result"), [([], "no_instance"), ([{"status": 500}, {"status": 400}], "failed")])
async def test_without_an_engine_to_continue_the_client_gets_the_error_event(
    start_proxy: StartProxy, others: list[dict[str, Any]], result: str
) -> None:
    proxy = await started(start_proxy, [TokenEngine(break_after=7), *(TokenEngine(**other) for other in others)])
    said = await ask(proxy, GREEDY)
    assert b"the stream from inst-0 broke off" in said
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resumed"], row["resume"]) == ("stream_broken", 0, result)


async def test_resumes_come_out_of_the_retry_budget(start_proxy: StartProxy) -> None:
    engines = [TokenEngine(break_after=7), TokenEngine()]
    proxy = await started(start_proxy, engines, limits={"retry_ratio": 0.0, "retry_min_per_s": 0.0})
    assert b"stream_broken" in await ask(proxy, GREEDY)
    assert (await check_quiet(proxy))["resume"] == "budget"
    assert engines[1].seen == []


async def test_an_engine_that_would_say_something_else_is_not_passed_on(start_proxy: StartProxy) -> None:
    engines = [TokenEngine(break_after=12), TokenEngine(salt="another model"), TokenEngine()]
    proxy = await started(start_proxy, engines)
    said = await ask(proxy, GREEDY | {"stop": "nowhere"})
    assert b"stream_broken" in said
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resume"]) == ("stream_broken", "diverged")
    # The engine's breaker is unaffected, and its request is aborted.
    assert proxy.core.instances["inst-1"].last_error is None
    assert engines[2].seen == []


@pytest.mark.parametrize("body", [GREEDY, GREEDY | USAGE, CHAT | USAGE, GREEDY | IDS | USAGE])
@pytest.mark.parametrize("missing", [1, 2])
async def test_a_stream_that_lacks_only_its_end_is_completed_without_another_engine(
    start_proxy: StartProxy, body: dict[str, Any], missing: int
) -> None:
    count = len(TokenEngine(port=1).events(body | USAGE, "r"))
    engines = [TokenEngine(break_after=count - missing), TokenEngine()]
    proxy = await started(start_proxy, engines)
    said = await ask(proxy, body)
    assert said.endswith(b"data: [DONE]\n\n")
    got, whole = read_without_details(said), unbroken(body)
    assert got == whole
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resumed"], row["resume"]) == ("ok", 0, "completed")
    assert engines[1].seen == []


@pytest.mark.parametrize("body", [GREEDY | USAGE, CHAT | USAGE, GREEDY])
async def test_an_engine_that_writes_no_end_mark_is_not_blamed(start_proxy: StartProxy, body: dict[str, Any]) -> None:
    """It ended its stream in order, with a finish reason; the client gets the end mark."""
    count = len(TokenEngine(port=1).events(body | USAGE, "r"))
    engines = [TokenEngine(break_after=count - 1, break_by="end"), TokenEngine()]
    proxy = await started(start_proxy, engines)
    said = await ask(proxy, body)
    assert said.endswith(b"data: [DONE]\n\n")
    assert read_without_details(said) == unbroken(body)
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resume"], row["attempts"]) == ("ok", "completed", [])
    assert proxy.core.instances["inst-0"].failures_in_a_row == 0


async def test_a_stream_that_breaks_after_its_end_mark_is_complete(start_proxy: StartProxy) -> None:
    count = len(TokenEngine(port=1).events(GREEDY | USAGE, "r"))
    engines = [TokenEngine(break_after=count - 1, break_by="after_done"), TokenEngine()]
    proxy = await started(start_proxy, engines)
    said = await ask(proxy, GREEDY | USAGE)
    assert said.count(b"[DONE]") == 1
    assert b"error" not in said
    assert (await check_quiet(proxy))["outcome"] == "ok"
    assert engines[1].seen == []


def read_without_details(said: bytes) -> dict[str, Any]:
    """The proxy's own usage event has no cached tokens, which are unknown to it."""
    if b"prompt_tokens_details" not in said:
        said = said.replace(
            b'"completion_tokens":30}', b'"completion_tokens":30,"prompt_tokens_details":{"cached_tokens":0}}'
        )
    return read(said)


async def test_a_sampled_answer_is_continued_where_that_is_allowed(start_proxy: StartProxy) -> None:
    engines = [TokenEngine(break_after=20), TokenEngine()]
    proxy = await started(start_proxy, engines, resume={"sampled": True})
    got = read(await ask(proxy, GREEDY | {"temperature": 1.0} | USAGE))
    assert got["usage"] == [(5, 30)]
    assert got["finish"] == ["length"]
    [body] = engines[1].seen
    tokens = bytes(body["prompt"]).decode()
    assert ("hello" + got["text"]).startswith(tokens)
    assert len(tokens) > 8
    assert (await check_quiet(proxy))["resume"] == "resumed"


async def test_a_chat_without_a_limit_is_continued_up_to_the_models_context(start_proxy: StartProxy) -> None:
    body = {name: value for name, value in CHAT.items() if name != "max_tokens"} | USAGE
    engines = [TokenEngine(break_after=9, max_model_len=80), TokenEngine(max_model_len=80)]
    proxy = await started(start_proxy, engines)
    await proxy.until(lambda: proxy.core.context_tokens("stub") == 80)
    assert read(await ask(proxy, body)) == unbroken(body, max_model_len=80)
    [second] = engines[1].seen
    assert second["max_tokens"] + len(second["prompt"]) == 80


async def test_the_stream_of_an_engine_without_token_ids_is_repeated(start_proxy: StartProxy) -> None:
    engines = [TokenEngine(break_after=9, reports_ids=False), TokenEngine()]
    proxy = await started(start_proxy, engines)
    assert read(await ask(proxy, GREEDY | USAGE)) == unbroken(GREEDY | USAGE)
    assert engines[1].seen[0]["prompt"] == "hello"


@pytest.mark.parametrize("engine", [{"mode": "hang"}, {"token_delay_s": 0.2}, {"break_after": 4, "break_by": "stall"}])
async def test_a_client_that_leaves_during_the_resume_leaves_nothing_behind(
    start_proxy: StartProxy, engine: dict[str, Any]
) -> None:
    engines = [TokenEngine(break_after=7), TokenEngine(**engine)]
    proxy = await started(start_proxy, engines)
    asking = asyncio.create_task(ask(proxy, GREEDY))
    try:
        await proxy.until(lambda: engines[1].running == 1)
        await asyncio.sleep(0.05)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await proxy.until(lambda: engines[1].aborted == 1 and not engines[1].running)
    row = await check_quiet(proxy)
    assert row["outcome"] == "client_gone"
    assert row["attempts"][0]["instance"] == "inst-0"


class BreaksPulls(TokenEngine):
    """Breaks the stream of every D leg."""

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.break_after = 7 if body.get("kv_transfer_params") else None
        return await super()._stream(request, body)


async def test_a_hand_off_whose_d_dies_is_resumed_co_located(start_proxy: StartProxy) -> None:
    engines = [BreaksPulls(cached_tokens=3) for _ in range(3)]
    proxy = await start_proxy(
        engines=list(engines),
        role="kv_both",
        resume={"enabled": "always"},
        classes={"medium_tokens": 5, "heavy_tokens": 10},
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
    )
    body = GREEDY | USAGE | {"prompt": list(range(97, 97 + 20))}
    assert read_without_details(await ask(proxy, body)) == unbroken(body)
    row = await check_quiet(proxy)
    assert (row["outcome"], row["resume"], row["resumed"], row["prefill_instance"]) == ("ok", "resumed", 1, None)
    legs = [(seen.get("kv_transfer_params") or {}) for engine in engines for seen in engine.seen]
    assert sorted(len(leg) > 0 for leg in legs) == [False, True, True]
    assert row["offload_reason"] == "request_shape"
