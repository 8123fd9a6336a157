"""Conversations without an id: recognised by their prompts, never merged, in bounded memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.request.parse import Endpoint
from proxy.sessions.kept_turn import TurnText
from proxy.sessions.prefix_chain import PrefixChains
from proxy.sessions.turn_texts import turn_text
from tests.proxy.conftest import StartProxy
from tests.proxy.request.parsing import parse_request
from tests.proxy.sessions.turns import BLOCK_BYTES, Messages, conversation, words

SYSTEM = words(400, 5)


def text_of(messages: Messages, indent: int | None = None, **fields: Any) -> TurnText:
    body = json.dumps({"model": "m", "messages": messages, **fields}, indent=indent).encode()
    turn = turn_text(parse_request(Endpoint.CHAT, body, 16, BLOCK_BYTES, seed=3), BLOCK_BYTES)
    assert turn is not None
    return turn


def chat(*texts: str, system: str = SYSTEM) -> Messages:
    """A system prompt and texts of user and assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_turn_that_begins_with_the_whole_prompt_before_has_its_id(indent: int | None) -> None:
    chains = PrefixChains(100)
    other = chains.session_of(text_of(conversation(1, seed=9), indent))
    messages = conversation(30)
    ids = {chains.session_of(text_of(messages[:count], indent)) for count in range(2, len(messages) + 1, 2)}
    assert len(ids) == 1
    assert other not in ids
    assert len(chains) == 2


def test_a_conversation_with_tools_is_recognised() -> None:
    chains = PrefixChains(100)
    tools = [{"type": "function", "function": {"name": "f", "description": words(300, 1)}}]
    messages = conversation(4)
    assert len({chains.session_of(text_of(messages[:count], tools=tools)) for count in (2, 4, 6)}) == 1
    assert chains.session_of(text_of(messages[:2])) != chains.session_of(text_of(messages[:2], tools=tools))


def test_turns_with_tool_calls_and_many_results_are_recognised() -> None:
    chains = PrefixChains(100)
    messages: Messages = chat("look")
    first = chains.session_of(text_of(messages))
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": {"b": [{}, {}]}})}}
        for n in range(20)
    ]
    messages.append({"role": "assistant", "content": None, "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": f"c{n}", "content": words(200, n)} for n in range(20)]
    assert chains.session_of(text_of(messages)) == first


@pytest.mark.parametrize("length", range(0, 2000, 97))
def test_a_shared_system_prompt_makes_no_two_conversations_one(length: int) -> None:
    """Wherever the system prompt ends in its block, and whatever part of the first message lies in it."""
    chains = PrefixChains(100)
    system = "s" * (2000 + length)
    prompts = [chat("hi", system=system), chat("hi there", system=system), chat("hello", system=system)]
    ids = [chains.session_of(text_of(prompt)) for prompt in prompts]
    assert len(set(ids)) == 3
    longer = [[*prompt, *chat("a", "b")[1:]] for prompt in prompts]
    assert [chains.session_of(text_of(prompt)) for prompt in longer] == ids


def test_the_same_prompt_again_is_the_same_conversation() -> None:
    chains = PrefixChains(100)
    assert len({chains.session_of(text_of(chat("hi"))) for _ in range(5)}) == 1


def test_two_continuations_of_one_prompt_become_two_sessions() -> None:
    chains = PrefixChains(100)
    first = chains.session_of(text_of(chat("hi")))
    one, other = chat("hi", "a", "b"), chat("hi", "a", "c")
    assert chains.session_of(text_of(one)) == first
    fork = chains.session_of(text_of(other))
    assert fork != first
    assert chains.session_of(text_of([*other, *chat("d", "e")[1:]])) == fork
    assert chains.session_of(text_of([*one, *chat("d", "e")[1:]])) == first


def test_an_edited_or_shortened_history_is_another_session() -> None:
    chains = PrefixChains(100)
    first = chains.session_of(text_of(chat("hi", "a", "b")))
    assert chains.session_of(text_of(chat("hi", "X", "b", "c", "d"))) != first
    assert chains.session_of(text_of(chat("hi"))) != first
    assert chains.session_of(text_of(chat("hi", "a", "b", "c", "d"))) == first


def test_prompts_of_less_than_a_block_have_no_session() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 500}]}).encode()
    assert turn_text(parse_request(Endpoint.CHAT, body, 16, BLOCK_BYTES), BLOCK_BYTES) is None


def test_memory_is_bounded_and_the_least_recently_used_conversation_is_forgotten() -> None:
    chains = PrefixChains(10)
    ids = [chains.session_of(text_of(chat(f"question {number}"))) for number in range(10)]
    assert chains.session_of(text_of(chat("question 0", "a", "b"))) == ids[0]
    chains.session_of(text_of(chat("another")))
    assert len(chains) == 10
    assert chains.session_of(text_of(chat("question 0", "a", "b", "c", "d"))) == ids[0]
    assert chains.session_of(text_of(chat("question 1", "a", "b"))) not in ids
    chains.set_capacity(0)
    assert len(chains) == 0
    assert chains.session_of(text_of(chat("another"))) is None


def test_looking_changes_nothing() -> None:
    chains = PrefixChains(10)
    assert chains.known(text_of(chat("hi"))) is None
    first = chains.session_of(text_of(chat("hi")))
    for _ in range(2):
        assert chains.known(text_of(chat("hi", "a", "b"))) == first
    assert chains.known(text_of(chat("hello"))) is None
    assert len(chains) == 1


def test_processes_give_different_ids() -> None:
    assert PrefixChains(1).session_of(text_of(chat("hi"))) != PrefixChains(1).session_of(text_of(chat("hi")))


@given(st.lists(st.integers(0, 7), max_size=60), st.integers(1, 12))
def test_interleaved_conversations_keep_their_ids_and_never_share_one(order: list[int], capacity: int) -> None:
    """Whatever the order of turns, and also when conversations are forgotten: an id has one conversation."""
    chains = PrefixChains(capacity)
    turns: dict[int, int] = {}
    owner: dict[str, int] = {}
    latest: dict[int, str] = {}
    used: list[int] = []
    for number in order:
        turns[number] = turns.get(number, 0) + 1
        texts = [
            f"{'q' if turn % 2 == 0 else 'a'}{number if turn == 0 else turn}" for turn in range(2 * turns[number] - 1)
        ]
        found = chains.session_of(text_of(chat(*texts)))
        assert found is not None
        assert owner.setdefault(found, number) == number
        remembered = number in used[-capacity:]
        if remembered:
            assert latest[number] == found
        latest[number] = found
        used = [*(each for each in used if each != number), number]
        assert len(chains) <= capacity


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=30))
def test_a_session_is_one_line_of_prompts(paths: list[list[int]]) -> None:
    """Prompts form a tree. Of two with the same id, one must be the beginning of the other."""
    chains = PrefixChains(1000)
    by_id: dict[str, list[list[int]]] = {}
    for path in paths:
        texts = [text for step in path for text in (f"q{step}", f"a{step}")][:-1]
        found = chains.session_of(text_of(chat(*texts)))
        assert found is not None
        line = by_id.setdefault(found, [])
        assert all(path[: len(other)] == other or other[: len(path)] == path for other in line)
        line.append(path)


@pytest.mark.parametrize("by_prefix", [True, False])
async def test_conversations_without_an_id_are_recognised_through_the_proxy(
    start_proxy: StartProxy, by_prefix: bool
) -> None:
    proxy = await start_proxy(2, policy={"name": "session_sticky"}, sessions={"by_prefix": by_prefix})

    async def send(messages: Messages, path: str = "/v1/chat/completions", **headers: str) -> Any:
        body = {"model": "stub", "messages": messages, "max_tokens": 2}
        return await proxy.client.post(path, json=body, headers=headers)

    first = await send(chat("hi"))
    await send(chat("hello"))
    explained = (await send(chat("hi", "a", "b"), "/explain")).json()["request"]
    second = await send(chat("hi", "a", "b"))
    await send(chat("named"), **{"x-session-id": "mine"})
    await proxy.client.post("/v1/completions", json={"model": "stub", "prompt": "x" * 3000})
    rows = await proxy.rows()
    sources = [row["session_source"] for row in rows]
    if not by_prefix:
        assert sources == [None, None, None, "x-session-id", None]
        return
    assert sources == ["prefix", "prefix", "prefix", "x-session-id", None]
    assert rows[0]["session_id"] == rows[2]["session_id"] != rows[1]["session_id"]
    assert (explained["session_id"], explained["session_source"]) == (rows[0]["session_id"], "prefix")
    assert second.headers["x-warmroute-instance"] == first.headers["x-warmroute-instance"]
    assert second.headers["x-warmroute-reason"] == "session_pinned"
