"""The body parser on arbitrary input: a parsed request or a client error, never another exception."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.errors import RequestError
from proxy.request.bodies import decode_leg, extended, prefill_leg
from proxy.request.parse import Endpoint, Parsed, request_view
from tests.chaos.rig.profiles import fuzz
from tests.proxy.request.parsing import parse_request

FIELDS = [
    *("model", "prompt", "messages", "tools", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
    *("prompt_cache_key", "user", "cache_salt", "n", "best_of", "echo", "prompt_logprobs", "kv_transfer_params"),
    *("temperature", "stop", "x", ""),
]
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        2**31,
        2**32,
        2**63,
        2**64,
        -(2**63),
        10**400,
        1e308,
        0.5,
        -0.0,
        "",
        "\0",
        "é",
        "世",
        "\U0001f9ed",
        True,
        None,
        {},
        [],
    ]
)
VALUES = st.recursive(
    ODD | st.text(max_size=20) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8)
GOOD = st.fixed_dictionaries(
    {"model": st.text(min_size=1, max_size=10)},
    optional={
        "prompt": st.text(max_size=50)
        | st.lists(st.integers(0, 2**32), max_size=40)
        | st.lists(st.text(max_size=9), max_size=4),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.text(max_size=4), "content": st.text(max_size=40)}), max_size=4
        ),
        "stream": st.booleans() | st.none(),
        "max_tokens": st.integers(-5, 10**6) | st.none(),
        "user": st.text(max_size=300),
        "n": st.integers(0, 3),
        "temperature": st.floats(0, 2),
        "stop": st.lists(st.text(max_size=4), max_size=2),
    },
)
ENDPOINTS = st.sampled_from(Endpoint)
PROMPTS = {
    Endpoint.COMPLETIONS: b"prompt",
    Endpoint.CHAT: b"messages",
    Endpoint.MESSAGES: b"messages",
    Endpoint.RESPONSES: b"input",
}


def parse(endpoint: Endpoint, body: bytes) -> Parsed | None:
    """Process a body like the proxy before a decision; None if it is rejected, in OpenAI's shape."""
    refusal: RequestError | None = None
    try:
        parsed = parse_request(endpoint, body, 16, 64, lambda _: True)
    except RequestError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        assert set(json.loads(refusal.body())["error"]) == {"message", "type", "param", "code"}
        return None
    view = request_view(parsed, "r", None, 16, 64, 4.0)
    assert view.prompt_tokens >= 1
    assert view.max_tokens >= 0
    return parsed


@fuzz
@given(ENDPOINTS, st.binary(max_size=200))
@example(Endpoint.COMPLETIONS, b"\xef\xbb\xbf" + b'{"model":"m","prompt":"x"}')
@example(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"x"}\0')
@example(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"\xff"}')
@example(Endpoint.CHAT, b'{"model":"m","messages":[\xff]}')
@example(Endpoint.CHAT, b'{"model":"m","messages":[}')
@example(Endpoint.COMPLETIONS, '{"model":"m","prompt":"x"}'.encode("utf-16"))
def test_arbitrary_bytes_are_parsed_or_refused(endpoint: Endpoint, body: bytes) -> None:
    parse(endpoint, body)


@fuzz
@given(ENDPOINTS, BODIES)
def test_arbitrary_json_is_parsed_or_refused(endpoint: Endpoint, body: dict[str, Any]) -> None:
    parse(endpoint, json.dumps(body).encode())


@fuzz
@given(ENDPOINTS, GOOD, st.data())
def test_a_good_body_with_bytes_changed_is_parsed_or_refused(
    endpoint: Endpoint, body: dict[str, Any], data: Any
) -> None:
    raw = bytearray(json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not raw:
            return
    parse(endpoint, bytes(raw))


@fuzz
@given(ENDPOINTS, GOOD, st.integers(0, 3))
def test_what_is_forwarded_is_what_came_but_for_the_fields_that_must_change(
    endpoint: Endpoint, body: dict[str, Any], indent: int
) -> None:
    raw = json.dumps(body, indent=indent or None).encode() + b"\n" * indent
    parsed = parse(endpoint, raw)
    if parsed is None:
        return
    assert parsed.body is raw
    asked = json.loads(extended(raw, usage=True))
    assert asked.pop("stream_options") == {"include_usage": True}
    assert asked == body
    params = {"do_remote_decode": True}
    legs = json.loads(prefill_leg(raw, params)), json.loads(decode_leg(raw, params))
    changed = {"max_tokens", "min_tokens", "stream", "kv_transfer_params", "max_completion_tokens", "stream_options"}
    assert {key: value for key, value in legs[0].items() if key not in changed} == {
        key: value for key, value in body.items() if key not in changed
    }
    assert {key: value for key, value in legs[1].items() if key != "kv_transfer_params"} == body


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","%b":' + b"[" * 200_000,
        b'{"model":"m","%b":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model":"m","%b":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"model":"m","%b":[' + b"1," * 100_000 + b"1]}",
        b'{"model":"m","%b":[' + b"[1]," * 100_000 + b"[1]]}",
        b'{"model":"m","%b":"' + b"\\u0000" * 100_000 + b'"}',
        b'{"model":"m","%b":[' + b"9" * 100_000 + b"]}",
        b'{"model":"m","%b":' + b"-" * 100_000 + b"}",
        b'{"model":"m","%b":1e999999}',
        b'{"model":"m","%b":"\\ud800"}',
        b'{"model":"m","%b":["\\ud800\\ud800"]}',
        b'{"model":"m","%b":["\\udc00x"]}',
        b'{"model":"m","%b":"x","x":NaN}',
        b'{"model":"m","%b":[NaN]}',
        b'{"model":"m","%b":[Infinity]}',
        b'{"model":"m","%b":"x","%b":5}',
        b'{"model":"m","%b":5,"%b":"x"}',
        b'{"model":"m","model":5,"%b":"x"}',
        b'{"model":"m","%b":"x","kv_transfer_params":null,"kv_transfer_params":{"a":1}}',
        b'{"model":"m","%b":"x","kv_transfer_params":{"a":1},"kv_transfer_params":null}',
        b'{"model":"m","%b":"x","KV_TRANSFER_PARAMS":{"a":1}}',
        b'{"model":"m","%b":"x","kv_transfer\\u005fparams":{"a":1}}',
        b'{"model":"m","%b":"x","stream_options":5}',
        b'{"model":"m","%b":"x"} {}',
        b'{"model":"m","%b":"x"}garbage',
        b'{"model":"m","%b":"x",}',
        b'{"model":"m","%b":[1,]}',
        b"{'model':'m'}",
        b'{"model":"m" /* c */,"%b":"x"}',
        b'{"model":"m","%b":"\t"}',
        b'{"model":"m","%b":[-1]}',
        b'{"model":"m","%b":[4294967296]}',
        b'{"model":"m","%b":[1.5]}',
        b'{"model":"m","%b":[true]}',
        b'{"model":"m","%b":[null]}',
        b'{"model":"m","%b":[[]]}',
        b'{"model":"m","%b":[""]}',
        b'{"model":"m","%b":["a",[1]]}',
        b'{"model":"m","%b":"x","max_tokens":-9223372036854775808}',
        b'{"model":"m","%b":"x","max_tokens":99999999999999999999}',
        b'{"model":"m","%b":"x","max_tokens":1.0}',
        b'{"model":"","%b":"x"}',
        b'{"model":"\\u0000","%b":"x"}',
    ],
    ids=lambda body: body[:60].decode(),
)
def test_a_pathological_body_is_parsed_or_refused(endpoint: Endpoint, body: bytes) -> None:
    field = PROMPTS[endpoint]
    parse(endpoint, body.replace(b"%b", field))


@pytest.mark.parametrize(
    "name", [b'"kv_transfer_params"', b'"kv_transfer\\u005fparams"', b'"\\u006bv_transfer_params"']
)
@pytest.mark.parametrize("after", [b"", b',"kv_transfer_params":null'])
def test_transfer_parameters_cannot_be_smuggled_in(name: bytes, after: bytes) -> None:
    """With any escaping of the name, and for any of two occurrences (Python's json takes the last)."""
    body = b'{"model":"m","prompt":"x",' + name + b':{"do_remote_prefill":true}' + after + b"}"
    if json.loads(body).get("kv_transfer_params") is None:
        return
    assert parse(Endpoint.COMPLETIONS, body) is None


@fuzz
@given(
    st.floats() | st.integers(),
    st.sampled_from(["max_tokens", "n", "best_of", "prompt_logprobs", "max_completion_tokens"]),
)
def test_any_number_in_any_numeric_field_is_parsed_or_refused(number: float, field: str) -> None:
    text = repr(number) if not isinstance(number, float) or math.isfinite(number) else "NaN"
    parse(Endpoint.COMPLETIONS, f'{{"model":"m","prompt":"x","{field}":{text}}}'.encode())
