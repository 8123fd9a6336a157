"""Request bodies: the engine request they become, and the messages of rejected ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sim.core.content import output_bytes, text_token_bytes, token_bytes, token_ids
from sim.core.handoff import LoadFailurePolicy
from sim.core.sequence import KvTransfer
from sim.hardware import ProfileError
from sim.server.faults import Faults
from sim.server.parsing import ApiError, GenerationCall, parse_chat, parse_completion, parse_tokenize, render_chat
from sim.server.settings import EngineSettingsError, ServerSettings

SETTINGS = ServerSettings.resolve(port=0, kv_capacity_tokens=4096, block_size=16)


def completion(**body: Any) -> GenerationCall:
    return parse_completion(json.dumps({"model": "warm-sim", **body}).encode(), SETTINGS, None)


def chat(*messages: dict[str, Any], **body: Any) -> GenerationCall:
    return parse_chat(json.dumps({"messages": messages, **body}).encode(), SETTINGS, "my-id")


def test_token_ids_text_and_lists_of_one_are_prompts() -> None:
    ids = token_ids(text_token_bytes("four byte pieces"))
    as_text = completion(prompt="four byte pieces").request
    for prompt in (ids, [ids], ["four byte pieces"]):
        same = completion(prompt=prompt).request
        assert (same.prompt_tokens, same.block_keys, same.tail) == (4, as_text.block_keys, as_text.tail)
    assert token_bytes(ids) == b"four byte pieces"


def test_equal_text_prefixes_give_equal_token_prefixes() -> None:
    short, long = (completion(prompt="ü" * 100 + tail).request for tail in ("ab", "abcdefgh" * 50))
    assert short.prompt_tokens == 51
    assert short.block_keys == long.block_keys[: len(short.block_keys)]
    assert parse_tokenize(b'{"prompt":"abcde"}') == b"abcde\0\0\0"


def test_a_conversation_begins_like_its_continuation() -> None:
    system = {"role": "system", "content": "You are terse."}
    question = {"role": "user", "content": [{"type": "text", "text": "Why?"}]}
    answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    first = render_chat([system, question], None)
    second = render_chat([system, question, answer, {"role": "tool", "content": "42"}], None)
    assert second.startswith(first.removesuffix("<|assistant|>\n"))
    assert "Why?" in first
    assert '"name":"f"' in second
    assert render_chat([question], [{"b": 1, "a": 2}]) == render_chat([question], [{"a": 2, "b": 1}])


def test_defaults_and_options() -> None:
    call = completion(prompt="abc", temperature=0.3, unknown={"x": 1})
    assert (call.request.max_tokens, call.request.min_tokens, call.stream, call.include_usage) == (16, 0, False, False)
    call = completion(
        prompt="abc", max_tokens=7, min_tokens=2, stream=True, stream_options={"include_usage": True}, ignore_eos=True
    )
    assert (call.request.max_tokens, call.request.min_tokens, call.stream, call.include_usage) == (7, 2, True, True)
    assert chat({"role": "user", "content": "x"}, max_tokens=9, max_completion_tokens=3).request.max_tokens == 3
    assert chat({"role": "user", "content": "x"}).public_id == "chatcmpl-my-id"


def test_numbers_and_flags_in_other_types_are_read_as_vllm_reads_them() -> None:
    options = {"include_usage": "true"}
    call = completion(prompt="abc", max_tokens="7", min_tokens=2.0, stream=1, stream_options=options, n="2", seed="5")
    assert (call.request.max_tokens, call.request.min_tokens, call.stream, call.include_usage) == (7, 2, True, True)
    assert (call.choices, call.request.output_offset) == (2, completion(prompt="abc", seed=5).request.output_offset)
    said = {"role": "user", "content": "x"}
    call = chat(said, max_completion_tokens="3", stream="false", stream_options={"include_usage": None})
    assert (call.request.max_tokens, call.stream, call.include_usage) == (3, False, False)


def test_the_seed_of_the_request_goes_before_the_engines() -> None:
    offsets = {completion(prompt="abc", seed=seed).request.output_offset for seed in (1, 2, -5, 2**70)}
    assert len(offsets) == 4
    assert completion(prompt="abc", seed=0).request.output_offset == completion(prompt="abc").request.output_offset


def test_a_stop_string_ends_the_output_where_it_occurs() -> None:
    request = completion(prompt="abc", max_tokens=20).request
    text = output_bytes(request.output_offset, 0, 20).decode()
    assert completion(prompt="abc", max_tokens=20, stop=text[20:24]).request.stop_after == 6
    assert completion(prompt="abc", max_tokens=20, stop=["!", text[20:24], text[8:11]]).request.stop_after == 3
    assert completion(prompt="abc", max_tokens=20, stop="!").request.stop_after is None


@pytest.mark.parametrize("priority", [0, -3, 1_800_000_000_000, 2**63 - 1, -(2**63)])
def test_a_priority_reaches_the_engine(priority: int) -> None:
    assert completion(prompt="abc", priority=priority, n=2).others[0].priority == priority
    assert chat({"role": "user", "content": "x"}, priority=priority).request.priority == priority
    assert completion(prompt="abc").request.priority == 0


@pytest.mark.parametrize("priority", ["first", 1.5, None, {}, 2**63, -(2**63) - 1])
def test_a_priority_that_is_no_integer_of_64_bits_is_refused(priority: object) -> None:
    with pytest.raises(ApiError) as refused:
        completion(prompt="abc", priority=priority)
    assert refused.value.status == 400


def test_transfer_parameters_reach_the_engine() -> None:
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t", "remote_engine_id": "e"}
    call = completion(prompt="abc", kv_transfer_params={**params, "remote_bootstrap_addr": "http://x:1", "extra": 1})
    assert call.request.kv_transfer == KvTransfer(False, True, "t", "e", "http://x:1")
    assert completion(prompt="abc", kv_transfer_params=None).request.kv_transfer is None


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b'{"prompt": "a", "max_tokens": "ten"}', 400, r"Expected `int \| null`, got `str` - at `\$.max_tokens`"),
        (b'{"max_tokens": 3}', 400, "prompt"),
        (b'{"prompt": {"a": 1}}', 400, "invalid prompt"),
        (b'{"prompt": [1, "a"]}', 400, "invalid prompt"),
        (b'{"prompt": [-1]}', 400, "token ids must be|invalid prompt"),
        (b'{"prompt": [4294967296]}', 400, "token ids must be"),
        (b'{"prompt": ["a", ""]}', 400, "empty"),
        (b'{"prompt": ""}', 400, "empty"),
        (b'{"prompt": []}', 400, "empty"),
        (b'{"prompt": "a", "model": "gpt-9"}', 404, "The model `gpt-9` does not exist."),
        (b'{"prompt": "a", "max_tokens": 0}', 400, "at least 1"),
        (b'{"prompt": "a", "max_tokens": 2, "min_tokens": 3}', 400, "min_tokens"),
        (b'{"prompt": "a", "n": 0}', 400, "n must be at least 1"),
        (b'{"prompt": ["a", "b"], "n": 200}', 400, "at most 256"),
        (
            b'{"prompt": "a", "n": 2, "kv_transfer_params": {"do_remote_decode": true}}',
            400,
            "one prompt and one choice",
        ),
        (b'{"prompt": "a", "logprobs": 21}', 400, "logprobs must be in 0 .. 20"),
        (b'{"prompt": "a", "max_tokens": 4096}', 400, "maximum context length is 4096 tokens"),
    ],
)
def test_bad_completion_bodies_are_refused(body: bytes, status: int, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse_completion(body, SETTINGS, None)
    assert caught.value.status == status
    error = json.loads(caught.value.body)["error"]
    assert error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}


def test_choices_differ_and_the_first_is_the_same_as_alone() -> None:
    alone = completion(prompt="abc").request
    several = completion(prompt=["abc", "xyz"], n=3)
    assert len(several.requests) == 6
    assert several.request.output_offset == alone.output_offset
    assert len({request.output_offset for request in several.requests}) == 6
    assert len({request.request_id for request in several.requests}) == 6
    assert [request.prompt_tokens for request in several.requests] == [1] * 6
    assert (several.choices, alone.output_offset) == (3, completion(prompt="abc", n=1).request.output_offset)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {}),
        ("guided_choice", ["a"]),
        ("prompt_logprobs", 1),
        ("use_beam_search", True),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
    ],
)
def test_features_that_the_simulator_lacks_are_refused_by_name(name: str, value: Any) -> None:
    for body in ({"prompt": "abc"}, {"messages": [{"role": "user", "content": "x"}]}):
        parse = parse_completion if "prompt" in body else parse_chat
        with pytest.raises(ApiError, match=f"does not support this value of '{name}'") as refused:
            parse(json.dumps({**body, name: value}).encode(), SETTINGS, None)
        assert (refused.value.status, json.loads(refused.value.body)["error"]["param"]) == (400, name)


def test_values_that_ask_for_nothing_are_accepted() -> None:
    nothing = {"response_format": {"type": "text"}, "tool_choice": "auto", "best_of": 1, "echo": False, "suffix": None}
    assert completion(prompt="abc", **nothing).logprobs is None
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat({"role": "user", "content": "x"}, tools=tools, tool_choice="none", logprobs=False).logprobs is None
    assert completion(prompt="abc", logprobs=0).logprobs == 0
    assert chat({"role": "user", "content": "x"}, logprobs=True, top_logprobs=3).logprobs == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": [{"content": "hi"}]}', "role"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "content must be"),
    ],
)
def test_bad_chat_bodies_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        parse_chat(body, SETTINGS, None)
    with pytest.raises(ApiError, match="either prompt or messages"):
        parse_tokenize(b"{}")


def test_the_pool_is_the_profiles_less_the_connectors_share() -> None:
    def blocks(**options: Any) -> int:
        return ServerSettings.resolve(port=1, **options).config.num_blocks

    assert blocks(role="none") == 415_061 // 64
    assert blocks() == int(415_061 * 0.95) // 64
    assert blocks(kv_capacity_tokens=6400) == 100
    assert blocks(kv_capacity_tokens=6400, connector_kv_fraction=0.5) == 50
    assert blocks(kv_capacity_tokens=6400, connector_kv_fraction=0.5, role="none") == 100
    assert ServerSettings.resolve(port=1, kv_capacity_tokens=6400).config.max_model_len == 6400
    assert ServerSettings.resolve(port=8101).bootstrap_port == 9101
    assert ServerSettings.resolve(port=8101, role="none").bootstrap_port is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "both"}, "--role"),
        ({"kv_load_failure_policy": "explode"}, "--kv-load-failure-policy"),
        ({"connector_kv_fraction": 1.0}, "--connector-kv-fraction"),
        ({"kv_capacity_tokens": 63}, "holds no block of 64"),
        ({"kv_capacity_tokens": 640, "max_model_len": 641}, "does not fit the KV pool"),
        ({"transport": "pigeon"}, "it has: rdma"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((EngineSettingsError, ProfileError), match=message):
        ServerSettings.resolve(port=1, **options)
    assert ServerSettings.resolve(port=1).config.load_failure_policy is LoadFailurePolicy.HANG


def test_faults_hit_the_leg_they_name_as_often_as_they_say() -> None:
    faults = Faults()
    prefill, decode = KvTransfer(do_remote_decode=True), KvTransfer(do_remote_prefill=True)
    faults.set(b'{"mode": "error", "count": 2, "leg": "prefill"}')
    assert faults.for_request(None) is None
    assert faults.for_request(decode) is None
    assert faults.for_pull() is None
    assert [faults.for_request(prefill) is not None for _ in range(3)] == [True, True, False]
    assert faults.current.mode == "none"
    faults.set(b'{"mode": "kv_pull_hang"}')
    assert faults.for_request(decode) is None
    assert faults.for_pull() is not None
    faults.set(b'{"mode": "p_eos"}')
    assert faults.for_request(None) is None
    assert faults.for_request(prefill) is not None
    faults.set(b'{"mode": "error", "health": true}')
    assert faults.for_health() is not None
