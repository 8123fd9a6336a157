"""Messages and responses as text: a later turn begins with the earlier one, whatever clients change in between."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.types import RequestView
from proxy.errors import RequestError
from proxy.request.conversation import plain_text_blocks, without_cache_marks
from proxy.request.parse import Endpoint, request_view
from proxy.request.steps import at_once
from tests.proxy.request.parsing import parse_request

MARK = {"cache_control": {"type": "ephemeral"}}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def hashes(endpoint: Endpoint = Endpoint.MESSAGES, block_bytes: int = 64, **body: Any) -> list[int]:
    return parse_request(endpoint, compact({"model": "m", **body}), 16, block_bytes).prompt.hashes


def common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def text_block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_the_next_turn_extends_the_chain_although_the_cache_marks_move() -> None:
    system = [text_block("you are an agent " * 30, **MARK)]
    asked = 'read "file" \\ with {braces} and "cache_control":{} in it ' * 9
    first = [{"role": "user", "content": [text_block(asked, **MARK)]}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": "ok " * 99}
    second = [
        {"role": "user", "content": asked},  # a plain string once it is not the last
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {"path": "x"}}]},
        {"role": "user", "content": [{**result, **MARK}]},
    ]
    third = [
        *second[:2],
        {"role": "user", "content": [result]},
        {"role": "user", "content": [text_block("go", **MARK)]},
    ]
    turns = [hashes(system=system, messages=turn) for turn in (first, second, third)]
    for before, after in itertools.pairwise(turns):
        # The last blocks hold the end of the list, which is not the end of the conversation any more.
        assert common(before, after) >= len(before) - 1
        assert len(after) > len(before)


def test_claude_codes_billing_line_does_not_change_the_chain() -> None:
    def turn(line: str) -> list[int]:
        system = [text_block(f"x-anthropic-billing-header: cch={line};"), text_block("you are an agent " * 30)]
        return hashes(system=system, messages=[{"role": "user", "content": "hi " * 99}])

    assert turn("00a1") == turn("ffe2")


def test_system_and_tools_are_counted_and_belong_to_the_chain() -> None:
    messages = [{"role": "user", "content": "hi " * 99}]
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    plain = hashes(system="a" * 999, messages=messages)
    assert common(plain, hashes(system="a" * 999 + "b", messages=messages)) >= 14
    assert common(plain, hashes(system="b", messages=messages)) == 0
    assert common(plain, hashes(system="a" * 999, messages=messages, tools=tools)) == 0
    long = parse_request(Endpoint.MESSAGES, compact({"model": "m", "messages": messages, "system": "a" * 999}), 16, 64)
    assert long.prompt.text_bytes > 999 + 3 * 99


def test_responses_extend_the_chain_and_are_bounded_by_max_output_tokens() -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "hi " * 99}]
    first = hashes(Endpoint.RESPONSES, instructions="be brief " * 30, input=items)
    items += [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}]
    second = hashes(Endpoint.RESPONSES, instructions="be brief " * 30, input=items)
    assert common(first, second) >= len(first) - 1
    body = compact({"model": "m", "input": "hi", "max_output_tokens": 77, "max_tokens": 5})
    view: RequestView = request_view(parse_request(Endpoint.RESPONSES, body, 16, 64), "r", None, 16, 64, 4.0)
    assert (view.max_tokens, view.may_offload, view.exact) == (77, False, False)


def test_images_count_as_a_constant() -> None:
    def size(data: str) -> int:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        body = compact({"model": "m", "max_tokens": 5, "messages": messages})
        return parse_request(Endpoint.MESSAGES, body, 16, 64).prompt.text_bytes

    assert size("A" * 50_000) == size("B" * 300_000) < 10_000


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (Endpoint.MESSAGES, b'{"model":"m","max_tokens":5}', "messages"),
        (Endpoint.MESSAGES, b'{"model":"m","messages":[]}', "messages"),
        (Endpoint.MESSAGES, b'{"model":"m","messages":"x"}', "messages"),
        (Endpoint.MESSAGES, b'{"model":"m","messages":[{}],"kv_transfer_params":{"a":1}}', "kv_transfer_params"),
        (Endpoint.RESPONSES, b'{"model":"m"}', "input"),
        (Endpoint.RESPONSES, b'{"model":"m","input":null}', "input"),
        (Endpoint.RESPONSES, b'{"model":"m","input":5}', "input"),
        (Endpoint.RESPONSES, b'{"model":"m","input":"x","vllm_xargs":{"a":1}}', "vllm_xargs"),
        (Endpoint.RESPONSES, b'{"model":"m","input":"x","previous_response_id":5}', "previous_response_id"),
    ],
)
def test_bodies_that_cannot_be_routed_are_refused_by_field(endpoint: Endpoint, body: bytes, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_request(endpoint, body, 16, 64)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("empty", ['""', "[]"])
def test_a_response_without_input_is_left_to_the_engine(empty: str) -> None:
    """Its prompt may be the instructions alone, or the conversation that it continues."""
    alone = parse_request(Endpoint.RESPONSES, b'{"model":"m","input":%b}' % empty.encode(), 16, 64)
    guided = b'{"model":"m","instructions":"%b","input":%b}' % (b"be brief " * 20, empty.encode())
    assert alone.prompt.hashes == []
    assert len(parse_request(Endpoint.RESPONSES, guided, 16, 64).prompt.hashes) == 2
    continued = b'{"model":"m","previous_response_id":"r","input":%b}' % empty.encode()
    assert parse_request(Endpoint.RESPONSES, continued, 16, 64).prompt.text_bytes == 1


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.RESPONSES])
def test_a_large_body_has_the_prompt_of_a_small_one(endpoint: Endpoint) -> None:
    field = "messages" if endpoint is Endpoint.MESSAGES else "input"
    items = [{"role": "user", "content": [text_block("hello " * 20, **MARK)]}] * 20_000
    large = {"model": "m", "max_tokens": 5, "system": "s", "instructions": "i", field: items}
    parsed = parse_request(endpoint, compact(large), 16, 1024)
    small = parse_request(endpoint, compact({**large, field: items[:100]}), 16, 1024)
    assert len(parsed.body) > 2 * 1024 * 1024
    if endpoint is Endpoint.RESPONSES:
        assert parsed.prompt.hashes[: len(small.prompt.hashes)] == small.prompt.hashes
    else:
        assert common(parsed.prompt.hashes, small.prompt.hashes) >= 8  # up to the last mark that is looked at


JSON_TEXTS = st.text(max_size=30) | st.sampled_from(['"cache_control":{}', '\\"', "[{", '"text":"', "}]"])


@given(st.lists(JSON_TEXTS, min_size=1, max_size=4), st.integers(min_value=0, max_value=3), st.booleans())
def test_text_with_a_mark_equals_the_text_without_one(texts: list[str], marked: int, spaced: bool) -> None:
    def written(*, mark: bool) -> bytes:
        contents: list[Any] = [{"role": "user", "content": text} for text in texts]
        if mark:
            place = marked % len(texts)
            contents[place] = {"role": "user", "content": [text_block(texts[place], **MARK)]}
        return json.dumps(contents, separators=None if spaced else (",", ":")).encode()

    assert at_once(without_cache_marks(written(mark=True))) == written(mark=False)
    assert at_once(without_cache_marks(written(mark=False))) == written(mark=False)


@given(
    st.lists(st.lists(st.text(max_size=60), min_size=1, max_size=3), max_size=5), st.sampled_from([None, (",", ":")])
)
def test_a_list_of_one_text_block_is_as_a_plain_string(
    texts: list[list[str]], separators: tuple[str, str] | None
) -> None:
    messages = [{"role": "user", "content": [text_block(text) for text in content]} for content in texts]
    plain = [
        {"role": "user", "content": content[0] if len(content) == 1 else [text_block(text) for text in content]}
        for content in texts
    ]
    encode = json.JSONEncoder(separators=separators).encode
    assert plain_text_blocks(encode(messages).encode()) == encode(plain).encode()


@pytest.mark.parametrize("text", ['"' * 100, '\\"' * 100, '"}] [{"type":"text","text":"x"}]', "\\", "\\" * 99, "é\n"])
def test_quotes_and_text_that_looks_like_a_block_stay(text: str) -> None:
    assert plain_text_blocks(compact([{"content": [text_block(text)]}])) == compact([{"content": text}])
    marked = compact([{"content": [text_block(text, **MARK)]}])
    assert plain_text_blocks(marked) == marked


def test_a_block_that_ends_early_stays() -> None:
    whole = compact([text_block('a "quoted" text' * 20)])
    for end in range(len(whole)):
        assert plain_text_blocks(whole[:end]) == whole[:end]


def test_a_chats_tools_are_counted_before_its_messages() -> None:
    tools = [{"type": "function", "function": {"name": "read", "description": "d" * 6400}}]
    turns = [[{"role": "user", "content": "u" * 640 * count}] for count in (1, 2)]
    plain, first, other = (
        parse_request(Endpoint.CHAT, compact({"model": "m", **body}), 16, 64).prompt
        for body in (
            {"messages": turns[0]},
            {"messages": turns[0], "tools": tools},
            {"messages": turns[1], "tools": tools},
        )
    )
    assert first.text_bytes == plain.text_bytes + len(compact(tools))
    assert first.lead_blocks == len(compact(tools)) // 64
    assert len(first.hashes) == first.lead_blocks + len(plain.hashes)
    assert common(first.hashes, other.hashes) >= first.lead_blocks + len(plain.hashes) - 1
    assert common(plain.hashes, first.hashes) == 0
