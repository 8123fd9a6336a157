"""Tokens that a request takes from its key's limit, also where the engine does not report them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from policies.row import Row
from proxy.access.keys import KeyName
from proxy.access.quotas import Quota
from proxy.exchange.charges import output_tokens
from proxy.request.parse import Endpoint
from proxy.settings import ClientKey
from tests.proxy.access.test_keys import ADMIN, KEY, OK, bearer, entry, started
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.request.parsing import parse_request
from tests.proxy.stub_engine import StubEngine

LIMITED = {"client": [entry("one", KEY, max_tokens_per_min=1_000_000)], "admin": [entry("root", ADMIN)]}
PROMPT = 3
"""Tokens of the prompt of ``OK``."""


def counted(proxy: Running) -> int:
    """Tokens counted for the key so far."""
    return proxy.core.keys.quota(KeyName("one")).use(time.monotonic()).tokens


def charge(endpoint: Endpoint, fields: bytes, *, events: int = 0, whole_tokens: float = 0.0) -> int:
    body = b'{"model":"m","prompt":"x","messages":[{"role":"user","content":"x"}],"input":"x",%b}' % fields
    row = Row("r", endpoint.value, 0.0)
    row.events = events
    return output_tokens(row, parse_request(endpoint, body, 16, 1024), whole_tokens)


@pytest.mark.parametrize(
    ("endpoint", "fields", "bound"),
    [
        (Endpoint.COMPLETIONS, b'"max_tokens":5', 5),
        (Endpoint.COMPLETIONS, b'"max_tokens":5,"n":3', 15),
        (Endpoint.COMPLETIONS, b'"max_tokens":100,"max_completion_tokens":1', 40),
        (Endpoint.COMPLETIONS, b'"stream":true', 40),
        (Endpoint.CHAT, b'"max_tokens":100,"max_completion_tokens":1', 1),
        (Endpoint.CHAT, b'"max_tokens":7', 7),
        (Endpoint.MESSAGES, b'"max_tokens":100,"max_completion_tokens":1', 40),
        (Endpoint.MESSAGES, b'"max_tokens":7', 7),
        (Endpoint.RESPONSES, b'"max_output_tokens":100,"max_tokens":1', 40),
        (Endpoint.RESPONSES, b'"max_output_tokens":7', 7),
    ],
)
def test_an_estimate_is_bounded_by_the_field_that_the_engine_reads(
    endpoint: Endpoint, fields: bytes, bound: int
) -> None:
    assert charge(endpoint, fields, events=40) == bound
    assert charge(endpoint, fields, whole_tokens=40.2) == bound
    assert charge(endpoint, fields) == 0


async def start(start_proxy: StartProxy, engine: StubEngine, **settings: Any) -> Running:
    return await started(start_proxy, engines=[engine], keys=LIMITED, **settings)


async def test_a_stream_that_its_client_leaves_counts_by_its_events(start_proxy: StartProxy) -> None:
    engine = StubEngine(tokens=50, mode="stall_stream")
    proxy = await start(start_proxy, engine)
    for number in (1, 2):
        body = {**OK, "stream": True, "max_tokens": 50}
        async with proxy.client.stream("POST", "/v1/completions", json=body, headers=bearer(KEY)) as answer:
            seen = b""
            async for piece in answer.aiter_raw():
                seen += piece
                if seen.count(b"data: ") == 2:
                    break
        await proxy.settled()
        assert counted(proxy) == number * (PROMPT + 2)
    assert {row["outcome"] for row in await proxy.rows()} == {"client_gone"}


async def test_answers_without_usage_use_the_limit_up(start_proxy: StartProxy) -> None:
    keys = {"client": [entry("one", KEY, max_tokens_per_min=10)], "admin": [entry("root", ADMIN)]}
    proxy = await started(start_proxy, engines=[StubEngine(tokens=500)], keys=keys, inject_usage=False)
    body = {**OK, "stream": True, "max_tokens": 500}
    statuses = [
        (await proxy.client.post("/v1/completions", json=body, headers=bearer(KEY))).status_code for _ in range(2)
    ]
    assert statuses == [200, 429]


async def test_a_stream_that_breaks_counts_by_its_events(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, StubEngine(tokens=50, mode="break_stream"))
    body = {**OK, "stream": True, "max_tokens": 50}
    answer = await proxy.client.post("/v1/completions", json=body, headers=bearer(KEY))
    assert "stream_broken" in answer.text
    assert counted(proxy) == PROMPT + 2


async def test_a_stream_without_usage_counts_by_its_events(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, StubEngine(tokens=50), inject_usage=False)
    for bound, tokens in ((200, 51), (20, 20)):  # 51 with its [DONE]
        before = counted(proxy)
        body = {**OK, "stream": True, "max_tokens": bound}
        await proxy.client.post("/v1/completions", json=body, headers=bearer(KEY))
        assert counted(proxy) - before == PROMPT + tokens


class SilentEngine(StubEngine):
    """An engine that reports no usage."""

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}


async def test_a_whole_answer_without_usage_counts_by_its_length(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, SilentEngine(tokens=2_000))
    for bound in (10_000, 20):
        before = counted(proxy)
        answer = await proxy.client.post("/v1/completions", json={**OK, "max_tokens": bound}, headers=bearer(KEY))
        ratio = proxy.core.router.text_ratios.of(Endpoint.COMPLETIONS)
        assert counted(proxy) - before == PROMPT + min(bound, round(len(answer.content) / ratio))


async def test_an_answer_with_usage_counts_as_reported_and_a_refusal_counts_no_output(start_proxy: StartProxy) -> None:
    engine = StubEngine(tokens=50)
    proxy = await start(start_proxy, engine)
    for stream in (True, False):
        before = counted(proxy)
        await proxy.client.post("/v1/completions", json={**OK, "stream": stream}, headers=bearer(KEY))
        assert counted(proxy) - before == PROMPT + 50
    engine.mode = "refuse_input"
    before = counted(proxy)
    assert (await proxy.client.post("/v1/completions", json=OK, headers=bearer(KEY))).status_code == 400
    assert counted(proxy) - before == PROMPT


@pytest.mark.parametrize("bytes_per_token", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_estimated_prompt_is_corrected_by_the_engines_count(
    start_proxy: StartProxy, bytes_per_token: float, stream: bool
) -> None:
    proxy = await start(start_proxy, StubEngine(), index={"bytes_per_token": bytes_per_token})
    body = {**OK, "prompt": "x" * 8_000, "stream": stream}
    await proxy.client.post("/v1/completions", json=body, headers=bearer(KEY))
    [row] = await proxy.rows()
    assert counted(proxy) == row["prompt_tokens"] + row["completion_tokens"] == 8_002 // 4 + 4


async def test_an_estimate_stays_where_the_engine_reports_nothing(start_proxy: StartProxy) -> None:
    proxy = await start(start_proxy, StubEngine(mode="refuse_input"), index={"bytes_per_token": 4.0})
    await proxy.client.post("/v1/completions", json={**OK, "prompt": "x" * 8_000}, headers=bearer(KEY))
    assert counted(proxy) == 2_000


async def test_a_request_that_a_limit_refuses_counts_no_tokens(start_proxy: StartProxy) -> None:
    keys = {"client": [entry("one", KEY, max_tokens_per_min=10**6, max_sessions=1)], "admin": [entry("root", ADMIN)]}
    proxy = await started(start_proxy, engines=[StubEngine(tokens=4)], keys=keys)
    statuses = []
    for session in ("a", "b"):
        headers = {**bearer(KEY), "x-session-id": session}
        statuses.append((await proxy.client.post("/v1/completions", json=OK, headers=headers)).status_code)
    assert statuses == [200, 429]
    assert counted(proxy) == PROMPT + 4


def test_what_is_given_back_does_not_exceed_the_minute() -> None:
    quota = Quota(ClientKey(name="one", sha256="0" * 64, max_tokens_per_min=600), 0.0)
    quota.spend(1_000, 0.0)
    quota.spend(-900, 0.0)
    assert (quota.use(0.0).tokens, quota.use(0.0).tokens_left) == (100, 500)
    quota.spend(-900, 0.0)
    assert quota.use(0.0).tokens_left == 600
