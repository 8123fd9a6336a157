"""Accounts of requests in plain words, from rows that the proxy wrote."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from aiohttp import web

from policies.admission.base import AdmissionReason
from policies.row import RequestOutcome
from policies.types import OffloadReason, Reason
from proxy.console.account import RequestAccount, account_of
from proxy.console.explain import started_of
from proxy.console.phrases import ADMISSIONS, OFFLOADS, OUTCOMES, REASONS, RESUMES
from proxy.resume.plan import ResumeResult
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.stub_engine import StubEngine
from tests.proxy.typed_engine import TypedEngine

SMALL_CLASSES = {"medium_tokens": 50, "heavy_tokens": 100}
HAND_OFF = {"planner": "threshold", "params": {"min_decode_requests": 0}}


def body(tokens: int = 400, **fields: Any) -> dict[str, Any]:
    return {"model": "stub", "prompt": list(range(tokens)), "max_tokens": 4, **fields}


async def account_after(proxy: Running, request: dict[str, Any], session: str = "s1") -> RequestAccount:
    """The account of one request that is sent and ends now."""
    name = f"r{len(await proxy.rows())}"
    await proxy.client.post("/v1/completions", json=request, headers={"x-session-id": session, "x-request-id": name})
    await proxy.settled()
    [row] = await proxy.rows(request_id=name)
    return account_of(row, [proxy.core.breakdown.started_unix_s])


def part(account: RequestAccount, subject: str) -> str:
    return " ".join(" ".join(each.sentences) for each in account.parts if each.subject == subject)


async def test_a_heavy_and_then_a_warm_request(start_proxy: StartProxy) -> None:
    engines = [StubEngine(cached_tokens=384), StubEngine(cached_tokens=384)]
    proxy = await start_proxy(2, engines=engines, classes=SMALL_CLASSES, policy={"name": "linear"})
    heavy = await account_after(proxy, body())
    assert "HEAVY: of 400 prompt tokens, 0 were predicted to be cached on inst-" in part(heavy, "class")
    assert "and 400 to be new." in part(heavy, "class")
    assert "because it had the lowest score (policy linear)." in part(heavy, "instance")
    assert "Session s1 (named by x-session-id)." in part(heavy, "request")
    assert "earlier process" not in part(heavy, "request")
    assert part(heavy, "outcome").startswith("It was answered. Status 200.")
    assert part(heavy, "hand-off") == "None: the planner never hands off (planner never)."
    assert part(heavy, "attempts") == ""
    assert "0 cached tokens were predicted by the shadow index. The engine reported 384: 384 more." in part(
        heavy, "cache"
    )
    warm = await account_after(proxy, body(stream=True))
    assert "WARM: of 400 prompt tokens, 384 were predicted" in part(warm, "class")
    assert "/v1/completions, streamed, received 20" in part(warm, "request")
    assert "The engine reported the same number." in part(warm, "cache")
    assert [each.chosen for each in warm.candidates] == [True, False]
    assert "the best of the others" in part(warm, "instance")
    assert "until the first byte of the answer." in part(warm, "times")
    assert "routing decision." in part(warm, "times")


def test_more_predicted_than_the_prompt_has_leaves_nothing_new() -> None:
    # The prediction is of an estimated length, the prompt's tokens are the engine's count.
    row = {"class": "WARM", "prompt_tokens": 14_500, "instance": "e0", "predicted_cached_tokens": 14_665}
    row["scores"] = [{"instance": "e0", "score": 1.0, "inputs": {}, "skipped": False, "cached_tokens": 14_665}]
    assert part(account_of(row, [1.0]), "class").endswith("on e0 and 0 to be new.")


@pytest.mark.parametrize(
    ("count", "generated"), [(1, "1 token was"), (0, "0 tokens were"), (1_200, "1,200 tokens were")]
)
def test_one_token_is_spoken_of_in_the_singular(count: int, generated: str) -> None:
    row = {"outcome": "ok", "prompt_tokens": count, "predicted_cached_tokens": count, "completion_tokens": count}
    account = account_of(row, [1.0])
    assert part(account, "outcome").endswith(f" {generated} generated.")
    assert part(account, "class").endswith(f"The prompt has {generated.rpartition(' ')[0]}.")
    assert part(account, "cache").startswith(generated.replace("token", "cached token") + " predicted.")
    row |= {"class": "WARM", "instance": "e0"}
    of = generated.rpartition(" ")[0].replace("token", "prompt token")
    was = "was" if count == 1 else "were"
    assert part(account_of(row, [1.0]), "class").startswith(
        f"WARM: of {of}, {count:,} {was} predicted to be cached on e0"
    )


async def test_a_request_that_was_handed_off_and_one_whose_hand_off_failed(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2, role="kv_both", offload=HAND_OFF, classes=SMALL_CLASSES)
    account = await account_after(proxy, body(stream=True))
    assert "computed the prompt, and inst-" in part(account, "hand-off")
    assert "pulled its KV and decoded (planner threshold)." in part(account, "hand-off")
    assert "Prefill leg: " in part(account, "times")
    assert ", predicted " in part(account, "times")
    for engine in proxy.engines:
        engine.mode = "p_error"
    account = await account_after(proxy, body(500), "s2")
    assert "A hand-off was tried and failed: the prefill leg failed (planner threshold)." in part(account, "hand-off")
    assert "(hand-off): " in part(account, "attempts")


async def test_a_retried_a_failed_and_a_rejected_request(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2, policy={"name": "round_robin"})
    proxy.engines[0].mode = "reset"
    accounts = [await account_after(proxy, body(40 + number)) for number in range(2)]
    retried = next(each for each in accounts if part(each, "attempts"))
    assert part(retried, "attempts").startswith("Failed attempt 1, on inst-0: ")
    assert part(retried, "instance").startswith("inst-1, because ")
    assert "It was answered." in part(retried, "outcome")
    for engine in proxy.engines:
        engine.mode = "error"
    failed = await account_after(proxy, body(60))
    assert "Every attempt failed, and none was left. Status 502. Error: " in part(failed, "outcome")
    assert "Failed attempt 2, on inst-" in part(failed, "attempts")
    rejected = await account_after(proxy, {"model": "stub"})
    assert part(rejected, "outcome").startswith("The proxy rejected it, because of what the client sent. Status 400.")
    assert (part(rejected, "class"), part(rejected, "instance"), part(rejected, "admission")) == ("", "", "")
    assert rejected.candidates == ()


@dataclasses.dataclass
class _WaitingEngine(StubEngine):
    """Answers no request before ``go`` is set."""

    go: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self.go.wait()
        return await super()._answer(request, body)


async def test_a_held_request(start_proxy: StartProxy) -> None:
    engine = _WaitingEngine()
    admission = {"name": "session_cap", "params": {"sessions": 1, "keep_s": 0.0}}
    proxy = await start_proxy(1, engines=[engine], admission=admission)
    first = asyncio.create_task(account_after(proxy, body(), "s1"))
    await proxy.until(lambda: engine.running == 1)
    send = proxy.client.post("/v1/completions", json=body(), headers={"x-session-id": "s2", "x-request-id": "held"})
    second = asyncio.create_task(send)
    await proxy.until(lambda: len(proxy.core.holding) == 1)
    engine.go.set()
    await asyncio.gather(first, second)
    [row] = await proxy.rows(request_id="held")
    text = part(account_of(row), "admission")
    assert "It was held for " in text
    assert "as many sessions as permitted are in flight or kept, first in line." in text
    assert "It was sent then because fewer sessions than permitted were in flight or kept." in text
    assert "held by admission." in part(account_of(row), "times")
    [row] = await proxy.rows(session_id="s1")
    assert "It was not held: " in part(account_of(row), "admission")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"endpoint": "/v1/messages", "planner": "threshold"},
            "None: requests to /v1/messages are never handed off (planner threshold).",
        ),
        (
            {"endpoint": "/v1/responses", "planner": "joint"},
            "None: requests to /v1/responses are never handed off (planner joint).",
        ),
        ({"endpoint": "/v1/messages", "planner": "never"}, "None: the planner never hands off (planner never)."),
        (
            {"endpoint": "/v1/completions", "planner": "threshold", "resumed": 1},
            "None: the rest of a broken stream is never handed off (planner threshold).",
        ),
        (
            {"endpoint": "/v1/completions", "planner": "threshold"},
            "None: a hand-off cannot carry it: several prompts or choices, a beam search, an echo or log probabilities "
            "of its prompt, a body over 8 MiB, or the rest of a broken stream (planner threshold).",
        ),
    ],
)
def test_a_request_that_no_planner_was_asked_about_has_its_own_reason(fields: dict[str, Any], sentence: str) -> None:
    row = {"outcome": "ok", "instance": "e1", "reason": "drawn", "offload_reason": "request_shape", **fields}
    assert part(account_of(row), "hand-off") == sentence


async def test_a_message_is_not_said_to_have_several_prompts(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[TypedEngine(), TypedEngine()], role="kv_both", offload=HAND_OFF)
    message = {"model": "stub", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    assert (await proxy.client.post("/v1/messages", json=message)).status_code == 200
    [row] = await proxy.rows()
    expected = "None: requests to /v1/messages are never handed off (planner threshold)."
    assert part(account_of(row), "hand-off") == expected


def test_a_row_of_an_earlier_process_and_an_earlier_version() -> None:
    row = {"request_id": "x", "outcome": "ok", "class": "WARM", "instance": "e1", "reason": "brand_new_reason"}
    account = account_of(row, [1_700_000_000.0])
    assert "earlier process of the proxy, which started at an unknown time." in part(account, "request")
    assert part(account, "class") == "WARM."
    assert part(account, "instance") == "e1, because brand new reason (policy None)."
    account = account_of({**row, "proxy_started_unix_s": 1_600_000_000.0}, [1_700_000_000.0])
    assert "which started 2020-09-13 12:26:40 UTC." in part(account, "request")


def test_rows_of_every_worker_that_runs_are_of_no_earlier_process() -> None:
    answer = {"proxy_started_unix_s": 1.0, "workers_started_unix_s": [1.0, 1.25]}
    row = {"request_id": "x", "outcome": "ok", "instance": "e1"}
    said = {
        started: "earlier process"
        in part(account_of({**row, "proxy_started_unix_s": started}, started_of(answer)), "request")
        for started in (0.5, 1.0, 1.25)
    }
    assert said == {0.5: True, 1.0: False, 1.25: False}
    assert started_of({"proxy_started_unix_s": 1.0}) == (1.0,)
    assert started_of({}) == ()


def test_scores_are_compared_with_those_of_the_other_instances() -> None:
    row = {
        "outcome": "ok",
        "class": "WARM",
        "instance": "e1",
        "reason": "affinity",
        "policy": "unified",
        "prompt_tokens": 1000,
        "scores": [
            {"instance": "e1", "score": 500.0, "inputs": {"a": 1.0}, "skipped": False, "cached_tokens": 800},
            {"instance": "e2", "score": 20.5, "inputs": {}, "skipped": True, "cached_tokens": 900},
            {"instance": "e3", "score": None, "inputs": {}, "skipped": False, "cached_tokens": 0},
        ],
    }
    account = account_of(row)
    text = part(account, "instance")
    assert "Its score was 500; e2 had the lowest, 20.5, which a rule left out." in text
    assert "e2 was predicted to have more of the prompt cached: 900 tokens, against 800." in text
    assert [each.instance for each in account.candidates] == ["e2", "e1"]


@pytest.mark.parametrize(
    ("phrases", "values"),
    [
        (OUTCOMES, RequestOutcome),
        (REASONS, Reason),
        (ADMISSIONS, AdmissionReason),
        (RESUMES, ResumeResult),
        (OFFLOADS, set(OffloadReason) - {OffloadReason.CHOSEN}),
    ],
    ids=["outcomes", "reasons", "admission", "resume", "offload"],
)
def test_every_value_has_a_phrase(phrases: Any, values: Any) -> None:
    assert set(phrases) == set(values)
