"""Requests that every engine fails at in the same words count against none; an engine that fails at everything does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.engines.status import may_be_the_requests_fault
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

OK = {"model": "stub", "prompt": list(range(200)), "max_tokens": 4}
QUIET: dict[str, Any] = {"interval_s": 3600, "unhealthy_after": 2, "window_min_requests": 1000}


def breakers(proxy: Running) -> list[tuple[str, int]]:
    return [(str(each.breaker.state), each.breaker.failures_in_a_row) for each in proxy.core.instances]


def set_mode(proxy: Running, mode: str) -> None:
    """Of all engines."""
    for engine in proxy.engines:
        engine.mode = mode


@pytest.mark.parametrize(("mode", "streamed"), [("error", False), ("error", True), ("empty_stream", True)])
async def test_a_request_that_all_engines_fail_at_alike_closes_the_fleet_to_nobody(
    start_proxy: StartProxy, mode: str, streamed: bool
) -> None:
    """A stream that ends before its first byte is the answer of vLLM 0.18 to a streamed response with a JSON schema."""
    proxy = await start_proxy(2, health=QUIET)
    set_mode(proxy, mode)
    for _ in range(4):
        answer = await proxy.client.post("/v1/completions", json={**OK, "stream": streamed})
        assert answer.status_code == 502
        assert "2 attempt(s) failed" in answer.json()["error"]["message"]
    assert breakers(proxy) == [("closed", 0), ("closed", 0)]
    set_mode(proxy, "ok")
    assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 200
    assert ledger_is_zero(await proxy.settled())


async def test_such_requests_at_once_do_not_close_the_fleet_either(start_proxy: StartProxy) -> None:
    """Both breakers open before the first of them has been repeated on the other engine."""
    proxy = await start_proxy(2, policy={"name": "round_robin"}, health=QUIET)
    set_mode(proxy, "error")
    answers = await asyncio.gather(*[proxy.client.post("/v1/completions", json=OK) for _ in range(12)])
    assert {answer.status_code for answer in answers} <= {502, 503}
    assert "closed" in [state for state, _ in breakers(proxy)]
    set_mode(proxy, "ok")
    assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 200
    assert ledger_is_zero(await proxy.settled())


async def test_a_known_failure_counts_against_an_engine_if_another_one_answers(start_proxy: StartProxy) -> None:
    """And without a second attempt, as with an exhausted retry budget, against none."""
    proxy = await start_proxy(2, policy={"name": "round_robin"}, health=QUIET)
    set_mode(proxy, "error")
    assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 502
    for _ in range(6):
        answer = await proxy.client.post("/v1/completions", json=OK, headers={"x-warmroute-no-retry": "1"})
        assert answer.status_code == 502
    assert breakers(proxy) == [("closed", 0), ("closed", 0)]
    proxy.engines[1].mode = "ok"
    for _ in range(4):
        assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 200
    assert [state for state, _ in breakers(proxy)] == ["open", "closed"]


@pytest.mark.parametrize("mode", ["error", "empty_stream"])
async def test_two_broken_engines_are_left_out_where_a_third_answers(start_proxy: StartProxy, mode: str) -> None:
    proxy = await start_proxy(3, policy={"name": "round_robin"}, health=QUIET)
    for engine in proxy.engines[:2]:
        engine.mode = mode
    for _ in range(6):
        assert (await proxy.client.post("/v1/completions", json={**OK, "stream": True})).status_code == 200
    assert [state for state, _ in breakers(proxy)] == ["open", "open", "closed"]


@pytest.mark.parametrize("mode", ["reset", "page"])
async def test_failures_that_differ_count(start_proxy: StartProxy, mode: str) -> None:
    proxy = await start_proxy(2, health=QUIET)
    proxy.engines[0].mode, proxy.engines[1].mode = "error", mode
    for _ in range(2):
        assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 502
    assert [state for state, _ in breakers(proxy)] == ["open", "open"]


@pytest.mark.parametrize(("mode", "streamed"), [("error", False), ("error", True), ("empty_stream", True)])
async def test_the_only_engine_in_reach_is_not_left_out_for_requests_that_it_cannot_answer(
    start_proxy: StartProxy, mode: str, streamed: bool
) -> None:
    """Nobody else could answer the others, and an OpenAI client's own retries are three such requests."""
    other = StubEngine(model="other")
    proxy = await start_proxy(engines=[StubEngine(mode=mode), other], health=QUIET)
    for _ in range(4):
        answer = await proxy.client.post("/v1/completions", json={**OK, "stream": streamed})
        assert (answer.status_code, other.seen) == (502, [])
    assert breakers(proxy) == [("closed", 0), ("closed", 0)]
    proxy.engines[0].mode = "ok"
    assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 200
    assert ledger_is_zero(await proxy.settled())


@pytest.mark.parametrize("mode", ["reset", "page", "cut_json"])
async def test_the_only_engine_is_left_out_for_failures_of_its_own(start_proxy: StartProxy, mode: str) -> None:
    proxy = await start_proxy(engines=[StubEngine(mode=mode)], health=QUIET)
    for _ in range(2):
        assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 502
    assert [state for state, _ in breakers(proxy)] == ["open"]


@pytest.mark.parametrize(
    ("status", "content", "may"),
    [
        (500, b'{"error":{"message":"","type":"InternalServerError","param":null,"code":500}}', True),
        (500, b"Internal Server Error", True),
        (500, b'{"error":{"message":"EngineCore encountered an issue."}}', False),
        (500, b'{"error":{"message":"Internal server error"}}', False),
        (503, b'{"error":{"message":"overloaded"}}', False),
        (500, b"x" * 65_537, False),
        (200, b"", True),
        (200, b'data: {"error":{"message":"list index out of range","code":500}}\n\n', True),
        (200, b'data: {"error":{"message":"EngineCore encountered an issue.","code":500}}\n\n', False),
        (200, b"<html>sign in</html>", False),
    ],
)
def test_what_may_be_the_requests_fault(status: int, content: bytes, may: bool) -> None:
    assert may_be_the_requests_fault(status, content, streamed=status == 200) is may
    assert not may_be_the_requests_fault(200, content)
