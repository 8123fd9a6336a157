"""Fields that reach into an engine are refused in any spelling, unless the operator allows them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from proxy.errors import RequestError
from proxy.request.generation_body import ResponsesBody
from proxy.request.parse import Endpoint, Parsed, ParseRules, parse_steps
from proxy.request.steps import at_once
from proxy.request.token_chunks import TokenChunks
from proxy.settings.fields import GUARDED_FIELDS

PADDING = 3 * 1024 * 1024
"""Makes a body large enough to be read in slices."""


def parse(body: str, *allowed: str, endpoint: Endpoint = Endpoint.COMPLETIONS) -> Parsed:
    rules = ParseRules(16, 1024, allowed_fields=frozenset(allowed))
    return at_once(parse_steps(endpoint, body.encode(), rules, lambda _: False, TokenChunks()))


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
@pytest.mark.parametrize("prompt", ["", '"prompt":"",', '"prompt":null,', '"prompt":[],'])
def test_allowed_embeddings_need_no_text_beside_them(prompt: str, padding: int) -> None:
    def embedded(given: str) -> Parsed:
        return parse(f'{{"model":"m","pad":"{"y" * padding}",{prompt}"prompt_embeds":{given}}}', "prompt_embeds")

    one, same, other, two = (embedded(given).prompt for given in ('"AA"', '"AA"', '"AB"', '["AA","AB"]'))
    assert (one.prompts, two.prompts, one.tokens, one.media) == (1, 2, 0, 1)
    assert one.hashes == same.hashes != other.hashes
    assert two.text_bytes == 2 * one.text_bytes
    for absent in ("null", "[]", "0"):
        with pytest.raises(RequestError, match="'prompt' "):
            embedded(absent)
    with pytest.raises(RequestError, match=r"'prompt_embeds' has more than 1024 prompts \(limits.prompts\)"):
        embedded("[" + ",".join(['"AA"'] * 1025) + "]")


def test_embeddings_beside_text_are_further_prompts() -> None:
    beside, alone = (parse(request(more), "prompt_embeds").prompt for more in ('"prompt_embeds":["AA"]', '"a":1'))
    assert (beside.prompts, alone.prompts, beside.hashes == alone.hashes) == (2, 1, True)


@pytest.mark.parametrize("padding", [0, PADDING])
def test_a_whole_float_is_taken_for_an_integer_as_by_vllm(padding: int) -> None:
    body = request('"max_tokens":10.0,"n":1e0,"best_of":null', padding)
    parsed = parse(body)
    assert (parsed.max_tokens, parsed.fields.n, parsed.fields.best_of) == (10, 1, None)
    assert isinstance(parsed.fields.max_tokens, int)
    assert parsed.body == body.encode()


@pytest.mark.parametrize("padding", [0, PADDING])
def test_numbers_and_flags_in_other_types_are_read_as_vllm_reads_them(padding: int) -> None:
    body = request('"max_tokens":"10","n":"1.0","best_of":"2","stream":"true","echo":1,"prompt_logprobs":"0"', padding)
    parsed = parse(body)
    assert (parsed.max_tokens, parsed.fields.n, parsed.fields.best_of, parsed.stream) == (10, 1, 2, True)
    assert (parsed.fields.echo, parsed.fields.prompt_logprobs, parsed.several) == (True, 0, True)
    assert parsed.body == body.encode()
    for off in ("0", '"false"', '"False"', '"0"'):
        assert not parse(request(f'"stream":{off}', padding)).stream


FLAGS = (*("true", "True", "yes", "on", "t", "y", "1"), *("false", "no", "OFF", "f", "n", "0"))
OTHERS = ("", " yes", "maybe", "2", "1.0", "00")


@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize("given", [*FLAGS, *OTHERS, 1, 0, 1.0, 0.0, 2, 0.5, [], {}], ids=repr)
def test_a_flag_is_read_as_pydantic_reads_it(given: object, padding: int) -> None:
    field = f'"stream":{json.dumps(given)}'
    try:
        read = TypeAdapter(bool | None).validate_json(json.dumps(given))
    except ValidationError:
        assert refused(field, padding=padding).param == "stream"
        return
    parsed = parse(body := request(f'{field},"echo":"y"', padding))
    assert (parsed.stream, parsed.fields.echo, parsed.body) == (read, True, body.encode())


@pytest.mark.parametrize(
    ("given", "hidden"),
    [("0", True), ('"false"', True), ('"no"', True), ("0.0", True), ("1", False), ('"true"', False), ('"Yes"', False)],
)
def test_a_usage_option_in_another_type_is_read_as_vllm_reads_it(given: str, hidden: bool) -> None:
    parsed = parse(request(f'"stream":1,"stream_options":{{"include_usage":{given}}}'))
    assert (parsed.hides_usage, parsed.usage_requested) == (hidden, not hidden)


def test_bounds_of_messages_and_responses_may_be_strings() -> None:
    message = '{"model":"m","messages":[{}],"max_tokens":"7","stream":"true"}'
    response = '{"model":"m","input":"x","max_output_tokens":"7","stream":1,"store":"false"}'
    for body, endpoint in ((message, Endpoint.MESSAGES), (response, Endpoint.RESPONSES)):
        parsed = parse(body, endpoint=endpoint)
        assert (parsed.max_tokens, parsed.stream) == (7, True)
    assert isinstance(parsed.fields, ResponsesBody)
    assert parsed.fields.store is False


@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"max_tokens":10.5', "max_tokens"),
        ('"max_tokens":1e300', "max_tokens"),
        ('"max_tokens":"ten"', "max_tokens"),
        ('"max_tokens":"10.5"', "max_tokens"),
        ('"max_tokens":10.0,"stream":3', "stream"),
        ('"stream":"maybe"', "stream"),
        ('"max_tokens":10.0,"kv_transfer_params":{"a":1}', "kv_transfer_params"),
        ('"max_tokens":"10","kv_transfer_params":{"a":1}', "kv_transfer_params"),
    ],
)
def test_other_numbers_are_refused_with_their_field(fields: str, param: str, padding: int) -> None:
    assert refused(fields, padding=padding).param == param
