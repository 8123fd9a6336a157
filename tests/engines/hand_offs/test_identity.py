"""A hand-off between real engines does not change the answer, for any shape of request."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.engines.conftest import StartProxy
from tests.engines.rig import BLOCK, REAL_ENGINES, Engines, Proxy, Said, fresh_prompt, fresh_text, many, until

pytestmark = REAL_ENGINES

WORKERS = (0, 1, 2)
JUDGE = 3
"""Takes no part in hand-offs: its answers are those of a co-located engine with a cold cache."""
REQUESTS = 50
FALLBACKS = 3
"""Hand-offs that may fall back: on two busy processors D's queue can outlast P's transfer. Answers stay the same."""
STREAMS = 4
BOUNDS = {"prefill_timeout_s": 30.0, "first_token_timeout_s": 25.0}
"""Answers are compared here, not times: the bounds allow for two busy processors."""
PULLED = "vllm:external_prefix_cache_hits_total"
MIGRATE = {
    "name": "migrate",
    "params": {
        # On two processors engines cannot be loaded as GPUs are: four streams are an overload, whatever a move costs.
        **{"priced": False, "stream_s": 1.0, "overload_s": STREAMS - 0.5, "min_cached_tokens": 512},
        # Requests go to the longest prefix, however many are there.
        **{"others_weight": 0.0, "queue_crowd": 0.0, "step_s": 0.0},
    },
}


def requests(proxy: Proxy) -> list[dict[str, Any]]:
    """Completions and chat, streamed and not, 500 to 3,000 tokens."""
    draw = random.Random(5)
    found = []
    for number in range(REQUESTS):
        stream = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
        if number % 4 < 2:
            found.append(proxy.body(fresh_prompt(draw.randrange(520, 3000)), **stream))
        else:
            found.append(proxy.body(fresh_text(draw.randrange(4000, 9000)), chat=number % 8 < 4, **stream))
    return found


async def say_all(proxy: Proxy, bodies: list[dict[str, Any]], at_once: int) -> list[Said]:
    gate = asyncio.Semaphore(at_once)

    async def gated(body: dict[str, Any]) -> Said:
        async with gate:
            return await proxy.say(body)

    return await asyncio.gather(*(gated(body) for body in bodies))


async def test_offloaded_answers_are_those_of_a_co_located_engine(engines: Engines, start_proxy: StartProxy) -> None:
    proxy = await start_proxy(*WORKERS, offload=BOUNDS)
    alone = await start_proxy(JUDGE, offload={"planner": "never", "params": {}})
    bodies = requests(proxy)
    pulled_before = await engines.total(PULLED, *WORKERS)
    offloaded = await say_all(proxy, bodies, at_once=6)
    pulled = await engines.total(PULLED, *WORKERS) - pulled_before
    co_located = await say_all(alone, bodies, at_once=2)

    rows = {row["request_id"]: row for row in await proxy.rows()}
    mine_rows = [rows[said.request_id] for said in offloaded]
    handed = [row for row in mine_rows if row["offload_reason"] == "chosen"]
    others = [row for row in mine_rows if row["offload_reason"] != "chosen"]
    assert len(others) <= FALLBACKS, [row["attempts"] for row in others]
    assert all(row["offload_reason"].startswith("fell_back_") for row in others)
    assert all(row["prefill_instance"] != row["instance"] for row in handed)
    for mine, theirs in zip(offloaded, co_located, strict=True):
        assert mine.answer == theirs.answer
        assert mine.usage is not None
        assert theirs.usage is not None
        for count in ("prompt_tokens", "completion_tokens"):
            assert mine.usage[count] == theirs.usage[count]
    # Every D pulled the missing blocks: the prompt, except a beginning it may have had already.
    prompts = [said.usage["prompt_tokens"] for said in offloaded if said.usage]
    pairs = zip(prompts, mine_rows, strict=True)
    surely = sum(tokens for tokens, row in pairs if row["offload_reason"] == "chosen")
    assert surely - len(handed) * BLOCK <= pulled <= sum(prompts)
    await proxy.settled()
    await engines.until_idle(*WORKERS)


async def test_the_answer_depends_on_all_parts_of_the_prompt(engines: Engines, start_proxy: StartProxy) -> None:
    """Precondition of the tests above: a lost or swapped block must change the answer, nearly wherever it is."""
    alone = await start_proxy(JUDGE, offload={"planner": "never", "params": {}})
    draw = random.Random(1)
    prompt = [draw.randrange(10, 2000) for _ in range(1200)]
    whole = await alone.say(alone.body(prompt))
    places = range(0, len(prompt), 100)
    other = [draw.randrange(10, 2000) for _ in range(BLOCK)]
    changed = [await alone.say(alone.body([*prompt[:at], *other, *prompt[at + BLOCK :]])) for at in places]
    shows = [said.answer != whole.answer for said in changed]
    assert sum(shows) >= 0.75 * len(shows), shows


async def test_d_has_the_whole_prompt_cached_after_the_pull(engines: Engines, start_proxy: StartProxy) -> None:
    proxy = await start_proxy(0, 1, roles={0: "kv_producer", 1: "kv_consumer"}, offload=BOUNDS)
    prompt = fresh_prompt(1501)
    said = await proxy.say(proxy.body(prompt))
    row = await proxy.row(said.request_id)
    assert row is not None
    assert (row["offload_reason"], row["instance"]) == ("chosen", engines.name(1))
    # The client gets P's cached tokens: none, the prompt was new.
    assert said.usage is not None
    assert (said.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) in {0, None}
    again = await engines.post(1, proxy.body(prompt))
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(prompt) - 1 - BLOCK


async def test_the_legs_as_the_engines_see_them(engines: Engines, start_proxy: StartProxy) -> None:
    """Every D leg names P's engine and bootstrap server: one without would hang 0.18.1 and kill later versions."""
    p_relay = await start_proxy.relay(engines.file.url(0))
    d_relay = await start_proxy.relay(engines.file.url(1))
    roles = {0: "kv_producer", 1: "kv_consumer"}
    proxy = await start_proxy(0, 1, roles=roles, urls={0: p_relay.url, 1: d_relay.url}, offload=BOUNDS)
    engine_id = (await proxy.instance(engines.name(0)))["engine_id"]
    bodies = [proxy.body(fresh_prompt(600), stream=number % 2 == 0, max_tokens=9) for number in range(6)]
    bodies += [proxy.body(fresh_text(4000), chat=True, max_completion_tokens=9), proxy.body(fresh_prompt(50))]
    said = await say_all(proxy, bodies, at_once=4)
    assert all(each.answer for each in said)
    p_legs, d_legs = p_relay.bodies, [body for body in d_relay.bodies if "kv_transfer_params" in body]
    assert (len(p_legs), len(d_legs), len(d_relay.bodies)) == (7, 7, 8)
    for leg in p_legs:
        assert (leg["max_tokens"], leg["min_tokens"], leg["stream"]) == (1, 1, False)
        params = leg["kv_transfer_params"]
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    for leg in d_legs:
        params = leg["kv_transfer_params"]
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (False, True)
        assert params["remote_engine_id"] == engine_id
        assert params["remote_bootstrap_addr"] == engines.file.bootstrap_url(0)
    sent = [leg["kv_transfer_params"]["transfer_id"] for leg in p_legs]
    assert sorted(sent) == sorted(leg["kv_transfer_params"]["transfer_id"] for leg in d_legs)
    assert len(set(sent)) == len(sent)


async def test_a_first_token_that_ends_the_text_is_handed_over_anyway(
    engines: Engines, start_proxy: StartProxy
) -> None:
    """P sends only what ended by length. Its leg must therefore not stop at an end-of-text, where D's does."""
    proxy = await start_proxy(0, 1, roles={0: "kv_producer", 1: "kv_consumer"}, offload=BOUNDS)
    alone = await start_proxy(JUDGE, offload={"planner": "never", "params": {}})
    forced = {"logit_bias": {"0": 100}}  # token 0 is the end of text
    prompt = fresh_prompt(700)
    said = await proxy.say(proxy.body(prompt, **forced))
    row = await proxy.row(said.request_id)
    assert row is not None
    assert row["offload_reason"] == "chosen", row["attempts"]
    assert said.finish_reason == "stop"
    assert said.answer == (await alone.say(alone.body(prompt, **forced))).answer


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def comparable(part: Any) -> Any:
    """A part of an answer without ids, with log probabilities rounded."""
    if isinstance(part, dict):
        return {key: comparable(value) for key, value in part.items() if key != "id"}
    if isinstance(part, list):
        return [comparable(each) for each in part]
    return round(part, 3) if isinstance(part, float) else part


async def test_fields_have_their_effect_after_a_hand_off(engines: Engines, start_proxy: StartProxy) -> None:
    roles = {0: "kv_producer", 1: "kv_consumer"}
    proxy = await start_proxy(0, 1, roles=roles, offload=BOUNDS)
    alone = await start_proxy(JUDGE, offload={"planner": "never", "params": {}})
    fields: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"stop": ["a", "e", "i"], "max_tokens": 40, "include_stop_str_in_output": True},
        {"seed": 4, "temperature": 1.0, "frequency_penalty": 1.0},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ]
    bodies = [("/v1/completions", proxy.body(fresh_prompt(600), **each)) for each in fields]
    chats: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 5},
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
    ]
    bodies += [("/v1/chat/completions", proxy.body(fresh_text(3000), chat=True, **each)) for each in chats]
    for path, body in bodies:
        answer, other = await proxy.client.post(path, json=body), await alone.client.post(path, json=body)
        assert (answer.status_code, other.status_code) == (200, 200), answer.text + other.text
        assert answer.headers["x-warmroute-prefill-instance"] == engines.name(0)
        assert comparable(answer.json()["choices"]) == comparable(other.json()["choices"]), body


async def test_what_p_ends_at_once_and_what_is_refused_costs_no_wait_and_no_pair(
    engines: Engines, start_proxy: StartProxy
) -> None:
    """Only the end of text is allowed, so P frees its KV, and D would wait for it until its bound."""
    proxy = await start_proxy(0, 1, roles={0: "kv_producer", 1: "kv_consumer"}, offload=BOUNDS)
    ended = await proxy.say(proxy.body(fresh_prompt(700), allowed_token_ids=[0]))
    assert (ended.status, ended.finish_reason) == (200, "stop"), ended.error
    wrong: list[dict[str, Any]] = [
        {"logprobs": 100},
        {"temperature": -1},
        {"use_beam_search": True, "stream": True},
        {"min_tokens": 100},
        {"max_tokens": 65536},
        {"prompt": fresh_text(4000), "max_tokens": 65536},
    ]
    refused = [await proxy.say({**proxy.body(fresh_prompt(700)), **each}) for each in wrong]
    assert [said.status for said in refused] == [400] * len(wrong)
    last = await proxy.say(proxy.body(fresh_prompt(700)))
    rows = {row["request_id"]: row["offload_reason"] for row in await proxy.rows()}
    assert [rows[said.request_id] for said in (ended, *refused, last)] == [
        *("fell_back_p_error", "fell_back_p_error", "fell_back_p_error", "request_shape", "request_shape"),
        *("request_shape", "fell_back_d_error", "chosen"),
    ]


@pytest.mark.parametrize(
    "shape",
    [
        {"n": 2, "temperature": 0.7, "seed": 1},
        {"echo": True, "max_tokens": 4},
        {"prompt_logprobs": 1},
        {"prompt": "two"},
        {"use_beam_search": True},
    ],
    ids=["n", "echo", "prompt_logprobs", "several_prompts", "beam_search"],
)
async def test_what_one_hand_off_cannot_carry_stays_on_one_engine(
    engines: Engines, start_proxy: StartProxy, shape: dict[str, Any]
) -> None:
    proxy = await start_proxy(*WORKERS)
    body = proxy.body(fresh_prompt(800)) | shape
    if shape.get("prompt"):
        body["prompt"] = [fresh_prompt(800), fresh_prompt(800)]
    said = await proxy.say(body)
    assert said.status == 200, said.error
    row = await proxy.row(said.request_id)
    assert row is not None
    assert (row["offload_reason"], row["prefill_instance"]) == ("request_shape", None)
    stats = await proxy.settled()
    assert stats["requests"]["outcomes"] == {"ok": 1}


async def said_turn(proxy: Proxy, prompt: list[int]) -> tuple[Said, dict[str, Any]]:
    said = await proxy.say(proxy.body(prompt))
    row = await proxy.row(said.request_id)
    assert row is not None
    return said, row


async def test_a_session_migrates_with_its_prefix_and_answers_the_same_tokens(
    engines: Engines, start_proxy: StartProxy
) -> None:
    proxy = await start_proxy(0, 1, policy=MIGRATE, offload={"planner": "never", "params": {}, **BOUNDS})
    alone = await start_proxy(JUDGE, offload={"planner": "never", "params": {}})
    first = fresh_prompt(1_600)
    said, row = await said_turn(proxy, first)
    assert row["prefill_instance"] is None
    answers = [said]
    home = row["instance"]
    places = (engines.number(home), 1 - engines.number(home))
    other = engines.name(places[1])
    second = [*first, *said.token_ids, *fresh_prompt(100)]

    bodies = [
        proxy.body([*first, *fresh_prompt(30)], max_tokens=30_000, ignore_eos=True, stream=True) for _ in range(STREAMS)
    ]
    async with many([proxy.say(body) for body in bodies]):

        async def busy() -> bool:
            row = await proxy.instance(home)
            return bool(row["requests"] == STREAMS and not row["prefilling"])

        await until(busy, "the home decodes its streams")
        pulled = [await engines.total(PULLED, number) for number in places]
        said, row = await said_turn(proxy, second)
        pulled = [await engines.total(PULLED, number) - before for number, before in zip(places, pulled, strict=True)]
        answers.append(said)
        assert (row["instance"], row["prefill_instance"]) == (other, home), row
        assert (row["reason"], row["offload_reason"]) == ("session_migrated", "chosen")
        assert row["planner"] == "migrate"
        # Home computed the new tokens after the prefix that it had; the target pulled all of it and computed nothing.
        assert row["actual_cached_tokens"] >= len(first) - BLOCK
        assert pulled[0] == 0
        assert pulled[1] >= len(second) - 1 - BLOCK

        third = [*second, *said.token_ids, *fresh_prompt(100)]
        said, row = await said_turn(proxy, third)
        answers.append(said)
        # The session lives there now: the turn is co-located, and its prefix is what was pulled.
        assert (row["instance"], row["prefill_instance"]) == (other, None)
        assert row["actual_cached_tokens"] >= len(second) - BLOCK

    for prompt, mine in zip((first, second, third), answers, strict=True):
        assert (await alone.say(alone.body(prompt))).answer == mine.answer
    await proxy.settled()
    await engines.until_idle(0, 1)
