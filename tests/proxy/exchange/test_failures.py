"""Errors, records and clean-up when input, engines or clients misbehave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.conftest import StartProxy, ledger_is_zero
from tests.proxy.exchange.test_held_requests import GatedEngine
from tests.proxy.stub_engine import StubEngine

OK = {"model": "stub", "prompt": list(range(200)), "max_tokens": 4}


BAD_INPUT: list[tuple[str, bytes, int, str | None, str]] = [
    ("/v1/completions", b"{nope", 400, None, "not valid JSON"),
    ("/v1/completions", b"", 400, None, "the body is empty: send a JSON object"),
    ("/v1/completions", b" \n", 400, None, "the body is empty: send a JSON object"),
    ("/tokenize", b"", 400, None, "the body is empty: send a JSON object"),
    ("/v1/completions", b'{"model": "stub", "prompt": "x', 400, None, "truncated"),
    ("/v1/completions", b'{"model": "stub", "prompt": "x\\ud83d', 400, None, "truncated"),
    ("/v1/completions", b'{"model": "stub", "prompt": "x\\ud83d\\ude00", "a": "}', 400, None, "truncated"),
    *(
        (path, b'{"model": "stub", "prompt": "x%b}%b' % (end, blanks), 400, None, "one half of a surrogate pair")
        for path in ("/v1/completions", "/tokenize")
        for end in (
            rb'\ud83d"',
            rb'\uD83D"',
            rb'\ud83d" ',
            rb'\ud83d!"',
            rb'\ud83d and more"',
            rb'\ud83d\n"',
            rb'\ude00"',
        )
        for blanks in (b"", b"\n", b" " * 20)
    ),
    ("/v1/completions", b"[1]", 400, None, "Expected `object`"),
    ("/v1/completions", b'{"model": "stub"}', 400, "prompt", "'prompt' is missing"),
    ("/v1/completions", b'{"model": "stub", "prompt": ""}', 400, "prompt", "non-empty"),
    ("/v1/completions", b'{"model": "stub", "prompt": []}', 400, "prompt", "empty list"),
    ("/v1/completions", b'{"model": "stub", "prompt": [1, "a"]}', 400, "prompt", "list of token ids"),
    ("/v1/completions", b'{"model": "stub", "prompt": [-1]}', 400, "prompt", "out of range"),
    ("/v1/completions", b'{"model": "stub", "prompt": {"a": 1}}', 400, "prompt", "string or list"),
    ("/v1/completions", b'{"model": 5, "prompt": "x"}', 400, "model", "Expected `str | null`"),
    ("/v1/completions", b'{"model": "stub", "prompt": "x", "stream": "maybe"}', 400, "stream", "Expected `bool"),
    ("/v1/completions", b'{"model": "stub", "prompt": "x", "max_tokens": "many"}', 400, "max_tokens", "int"),
    ("/v1/completions", b'{"model": "gpt-9", "prompt": "x"}', 404, "model", "available: stub"),
    (
        "/v1/completions",
        b'{"model": "stub", "prompt": "x", "kv_transfer_params": {"do_remote_prefill": true}}',
        400,
        "kv_transfer_params",
        "set by the proxy only",
    ),
    ("/v1/chat/completions", b'{"model": "stub"}', 400, "messages", "'messages' is missing"),
    ("/v1/chat/completions", b'{"model": "stub", "messages": "hi"}', 400, "messages", "list of messages"),
    ("/v1/chat/completions", b'{"model": "stub", "messages": []}', 400, "messages", "non-empty"),
]


async def test_bad_input_is_refused_in_openai_shape_and_reaches_no_engine(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path, body, status, param, says in BAD_INPUT:
        answer = await proxy.client.post(path, content=body)
        assert answer.status_code == status, body
        error = answer.json()["error"]
        assert says in error["message"], body
        assert error["param"] == param, body
        assert set(error) == {"message", "type", "param", "code"}
    assert proxy.engines[0].seen == []
    outcomes = [(row["outcome"], row["status"]) for row in await proxy.rows()]
    assert sorted(outcomes) == sorted(("rejected", status) for _, _, status, _, _ in BAD_INPUT)


async def test_oversize_body_is_refused_whether_or_not_its_length_is_announced(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, limits={"body_bytes": 2048})

    async def pieces() -> Any:
        for _ in range(10):
            yield b" " * 1000

    announced = await proxy.client.post("/v1/completions", content=b" " * 5000)
    chunked = await proxy.client.post("/v1/completions", content=pieces())
    for answer in (announced, chunked):
        assert answer.status_code == 413
        assert "limits.body_bytes" in answer.json()["error"]["message"]


async def test_unknown_paths_and_methods_answer_in_openai_shape(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    unknown = await proxy.client.get("/v1/nope")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_path")
    wrong = await proxy.client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "POST only" in wrong.json()["error"]["message"]


async def test_unknown_paths_and_methods_below_messages_answer_in_anthropics_shape(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    unknown = await proxy.client.post("/v1/messages/batches", json={"requests": []})
    assert (unknown.status_code, unknown.json()["type"]) == (404, "error")
    assert unknown.json()["error"]["type"] == "not_found_error"
    wrong = await proxy.client.get("/v1/messages")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["type"] == "invalid_request_error"
    assert "POST only" in wrong.json()["error"]["message"]


async def test_engine_4xx_passes_unchanged_is_never_retried_and_never_counts_against_it(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(1, engines=[StubEngine(mode="refuse_input")])
    for _ in range(6):
        answer = await proxy.client.post("/v1/completions", json=OK)
        assert answer.status_code == 400
        assert answer.json() == {"error": {"message": "too long", "type": "BadRequestError"}}
    assert len(proxy.engines[0].seen) == 6
    assert (await proxy.client.get("/ready")).status_code == 200
    assert {row["outcome"] for row in await proxy.rows()} == {"engine_refused"}
    assert (await proxy.client.get("/instances")).json()["instances"][0]["index_blocks"] == 0


@pytest.mark.parametrize(
    ("mode", "stream"),
    [
        ("error", False),
        ("error", True),
        ("reset", False),
        ("reset", True),
        ("empty_stream", True),
        ("page", False),
        ("empty", False),
        ("empty", True),
        ("cut_json", False),
        ("page", True),
    ],
)
async def test_failure_before_the_first_byte_is_retried_elsewhere(
    start_proxy: StartProxy, mode: str, stream: bool
) -> None:
    proxy = await start_proxy(2, policy={"name": "round_robin"})
    proxy.engines[0].mode = mode
    for _ in range(2):
        answer = await proxy.client.post("/v1/completions", json={**OK, "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-warmroute-instance"] == "inst-1"
    rows = await proxy.rows()
    assert sum(len(row["attempts"]) for row in rows) >= 1
    assert rows[0]["attempts"][0]["instance"] == "inst-0"
    assert ledger_is_zero(await proxy.settled())
    assert (await proxy.client.get("/instances")).json()["instances"][0]["index_blocks"] == 0


async def test_dead_instance_is_avoided_at_once_and_taken_back_when_it_returns_with_an_empty_index(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(2, policy={"name": "round_robin"})
    for _ in range(2):
        await proxy.client.post("/v1/completions", json=OK)
    victim = proxy.engines[0]
    await victim.stop()
    for _ in range(4):
        assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 200
    assert proxy.core.instances.healthy() == {"inst-1"}
    await victim.restart()
    await proxy.until(lambda: proxy.core.instances.healthy() == {"inst-0", "inst-1"})
    first = (await proxy.client.get("/instances")).json()["instances"][0]
    assert (first["restarts"], first["index_blocks"]) == (1, 0)


async def test_all_down_answers_503_with_retry_after_and_is_not_ready(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    for engine in proxy.engines:
        await engine.stop()
    answers = [await proxy.client.post("/v1/completions", json=OK) for _ in range(3)]
    assert answers[-1].status_code == 503
    assert answers[-1].headers["retry-after"] == "1"
    assert answers[-1].json()["error"]["code"] == "no_instance"
    assert (await proxy.client.get("/ready")).status_code == 503
    assert (await proxy.client.get("/health")).status_code == 200
    assert ledger_is_zero(await proxy.settled())


async def test_every_instance_failing_answers_502_naming_the_last(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2, engines=[StubEngine(mode="error"), StubEngine(mode="error")])
    answer = await proxy.client.post("/v1/completions", json=OK)
    assert answer.status_code == 502
    assert "2 attempt(s) failed" in answer.json()["error"]["message"]
    assert "boom" in answer.json()["error"]["message"]


async def test_first_byte_has_a_bound_and_the_engines_request_is_aborted(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, engines=[StubEngine(mode="hang")], timeouts={"first_byte_s": 0.2, "total_s": 5})
    answer = await proxy.client.post("/v1/completions", json={**OK, "stream": True})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "upstream_timeout"
    await proxy.until(lambda: proxy.engines[0].aborted == 1)
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.parametrize("mode", ["break_stream", "stall_stream"])
async def test_stream_that_breaks_ends_in_an_error_event_and_is_not_retried(start_proxy: StartProxy, mode: str) -> None:
    proxy = await start_proxy(2, timeouts={"idle_s": 0.3})
    for engine in proxy.engines:
        engine.mode = mode
    answer = await proxy.client.post("/v1/completions", json={**OK, "stream": True})
    events = [event for event in answer.text.split("\n\n") if event]
    assert events[0].startswith("data: ")
    assert json.loads(events[-1][len("data: ") :])["error"]["code"] == "stream_broken"
    assert len(proxy.engines[0].seen) + len(proxy.engines[1].seen) == 1
    [row] = await proxy.rows()
    assert row["outcome"] == "stream_broken"
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["prefill", "decode"])
async def test_client_that_leaves_aborts_the_engine_at_any_moment(
    start_proxy: StartProxy, stream: bool, when: str
) -> None:
    engine = StubEngine(prefill_s=30 if when == "prefill" else 0, token_delay_s=30, tokens=5)
    if not stream and when == "decode":
        engine.prefill_s = 30
    proxy = await start_proxy(1, engines=[engine])
    request = asyncio.create_task(
        httpx.AsyncClient(base_url=proxy.url, timeout=60, trust_env=False).post(
            "/v1/completions", json={**OK, "stream": stream}
        )
    )
    await proxy.until(lambda: engine.running == 1)
    await asyncio.sleep(0.05)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await proxy.until(lambda: engine.aborted == 1)
    assert ledger_is_zero(await proxy.settled())
    [row] = await proxy.rows()
    assert row["outcome"] == "client_gone"


async def test_client_that_leaves_before_its_body_is_complete_is_accounted_for(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    await writer.drain()
    await proxy.until(lambda: proxy.core.breakdown.started == 1)
    writer.close()
    await proxy.until(lambda: proxy.core.breakdown.finished == 1)
    assert proxy.core.breakdown.outcomes == {"client_gone": 1}
    assert await reader.read() == b""


async def test_a_defect_of_our_own_is_a_clean_500_a_row_and_no_leak(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start_proxy(1)

    def broken(*_: Any) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(proxy.core, "forwarded_headers", broken)
    answer = await proxy.client.post("/v1/completions", json=OK)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    [row] = await proxy.rows()
    assert (row["outcome"], row["status"], row["error"]) == ("internal_error", 500, "RuntimeError('defect')")
    assert ledger_is_zero(await proxy.settled())


async def test_sick_probes_take_an_instance_out_and_good_ones_bring_it_back(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    proxy.engines[0].mode = "sick"
    await proxy.until(lambda: proxy.core.instances.healthy() == {"inst-1"})
    proxy.engines[0].mode = "ok"
    await proxy.until(lambda: proxy.core.instances.healthy() == {"inst-0", "inst-1"})
    assert (await proxy.client.get("/instances")).json()["instances"][0]["restarts"] == 0


async def test_an_engine_that_answers_nonsense_does_not_end_the_probing_of_the_others(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2, engines=[StubEngine(mode="nonsense"), StubEngine()])
    assert proxy.core.instances.healthy() == {"inst-1"}
    proxy.engines[1].mode = "sick"
    await proxy.until(lambda: not proxy.core.instances.healthy())
    for engine in proxy.engines:
        engine.mode = "ok"
    await proxy.until(lambda: proxy.core.instances.healthy() == {"inst-0", "inst-1"})


async def test_a_client_that_stops_reading_is_cut_and_its_engine_is_not_blamed(start_proxy: StartProxy) -> None:
    engine = StubEngine(tokens=2000, padding_bytes=50_000)
    proxy = await start_proxy(1, engines=[engine], timeouts={"client_stall_s": 0.5})
    body = json.dumps({**OK, "stream": True}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]), limit=1024)
    try:
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await proxy.until(lambda: proxy.core.breakdown.finished == 1)
    finally:
        writer.close()
    [row] = await proxy.rows()
    assert (row["outcome"], row["error"]) == ("client_gone", "the client read nothing for 0.5 s")
    await proxy.until(lambda: engine.aborted == 1 or engine.running == 0)
    assert proxy.core.instances["inst-0"].failures_in_a_row == 0
    assert proxy.core.instances["inst-0"].last_error is None
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_costs_the_breakdown_file_and_no_request(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, breakdown={"jsonl_path": "/dev/full"})
    for _ in range(30):
        assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 200
    await proxy.until(lambda: proxy.core.breakdown.file_error is not None)
    conditions = (await proxy.client.get("/ready", params={"verbose": "1"})).json()["conditions"]
    assert [each["name"] for each in conditions if not each["ok"]] == ["records"]
    assert "warmroute_breakdown_file_failing 1.0" in (await proxy.client.get("/metrics")).text
    assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 200
    assert len(await proxy.rows()) == 31


async def test_two_requests_of_one_tick_see_each_other(start_proxy: StartProxy) -> None:
    engines = [GatedEngine() for _ in range(4)]
    proxy = await start_proxy(4, engines=engines, policy={"name": "least_loaded"})
    bodies = [{**OK, "prompt": list(range(k, k + 300))} for k in range(4)]
    asking = [asyncio.create_task(proxy.client.post("/v1/completions", json=body)) for body in bodies]
    await proxy.until(lambda: sum(engine.running for engine in engines) == 4)
    for engine in engines:
        engine.open.set()
    await asyncio.gather(*asking)
    assert [len(engine.seen) for engine in engines] == [1, 1, 1, 1]
