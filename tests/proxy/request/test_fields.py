"""Fields that reach into an engine are refused in any spelling, unless the operator allows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.errors import RequestError
from proxy.request.parse import Endpoint, Parsed, ParseRules, parse_steps
from proxy.request.steps import at_once
from proxy.request.token_chunks import TokenChunks
from proxy.settings.fields import GUARDED_FIELDS

PADDING = 3 * 1024 * 1024
"""Makes a body large enough to be read in slices."""


def parse(body: str, *allowed: str) -> Parsed:
    rules = ParseRules(16, 1024, allowed_fields=frozenset(allowed))
    return at_once(parse_steps(Endpoint.COMPLETIONS, body.encode(), rules, lambda _: False, TokenChunks()))


def request(fields: str, padding: int = 0) -> str:
    return f'{{"model":"m","prompt":"x","pad":"{"y" * padding}",{fields}}}'


def refused(fields: str, *allowed: str, padding: int = 0) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(request(fields, padding), *allowed)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize("name", GUARDED_FIELDS)
def test_a_guarded_field_needs_the_operators_consent(name: str, padding: int) -> None:
    error = refused(f'"{name}":"x"', padding=padding)
    assert (error.param, error.code) == (name, "field_not_allowed")
    assert "fields.allow" in error.message
    value = '{"a":1}' if name in {"vllm_xargs", "extra_args", "sampling_params"} else '"x"'
    parse(request(f'"{name}":{value}', padding), name)
    for absent in ("null", "{}", "[]", "0"):
        parse(request(f'"{name}":{absent}', padding))


@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize(
    "fields",
    [
        '"kv_transfer_params":"x"',
        '"kv_transfer_params":null,"kv_transfer_params":{"a":1}',
        r'"kv_transfer_\u0070arams":{"a":1}',
        r'"kv_transfer_params":null,"\u006bv_transfer_params":{"a":1}',
        '"vllm_xargs":null,"vllm_xargs":{"kv_transfer_params":"x"}',
        '"vllm_xargs":{"kv_transfer_params":"x"}',
        r'"vllm_xarg\u0073":{"a":1}',
    ],
)
def test_no_spelling_of_the_name_passes(fields: str, padding: int) -> None:
    refused(fields, padding=padding)


@pytest.mark.parametrize(
    "inner",
    [
        '{"kv_transfer_params":"x"}',
        r'{"kv_transfer_\u0070arams":{}, "kv_transfer_params":1}',
        '{"ec_transfer_params":{"a":1}}',
        '{"extra_args":{"kv_transfer_params":"x"}}',
        '{"vllm_xargs":{"a":1}}',
        '{"a":"%s"}' % ("x" * 70_000),
        '"x"',
        "[1]",
    ],
)
def test_an_allowed_container_does_not_carry_others_in(inner: str) -> None:
    refused(f'"vllm_xargs":{inner}', "vllm_xargs", "extra_args")


def test_an_allowed_container_passes_with_its_own_keys() -> None:
    fields: dict[str, Any] = {"ngram_size": 30, "window_size": 90}
    body = request(f'"vllm_xargs":{json.dumps(fields)}')
    assert json.loads(parse(body, "vllm_xargs").body)["vllm_xargs"] == fields


def test_names_inside_the_prompt_or_other_fields_are_no_concern() -> None:
    parse(request('"metadata":{"kv_transfer_params":1},"priority":0,"user":"vllm_xargs"'))


@pytest.mark.parametrize("padding", [0, PADDING])
def test_a_whole_float_is_taken_for_an_integer_as_by_vllm(padding: int) -> None:
    body = request('"max_tokens":10.0,"n":1e0,"best_of":null', padding)
    parsed = parse(body)
    assert (parsed.max_tokens, parsed.fields.n, parsed.fields.best_of) == (10, 1, None)
    assert isinstance(parsed.fields.max_tokens, int)
    assert parsed.body == body.encode()


@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"max_tokens":10.5', "max_tokens"),
        ('"max_tokens":1e300', "max_tokens"),
        ('"max_tokens":"10"', "max_tokens"),
        ('"max_tokens":10.0,"stream":3', "stream"),
        ('"max_tokens":10.0,"kv_transfer_params":{"a":1}', "kv_transfer_params"),
    ],
)
def test_other_numbers_are_refused_with_their_field(fields: str, param: str, padding: int) -> None:
    assert refused(fields, padding=padding).param == param
