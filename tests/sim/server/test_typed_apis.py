"""Messages and responses of the simulated engine: the token accounting of chat, events in order, clear refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sim.server.answers import Answers, Api, OpenAiApi
from sim.server.driver import Delivery
from sim.server.messages import MessagesApi, count_tokens
from sim.server.parsing import ApiError, GenerationCall
from sim.server.responses import ResponsesApi
from sim.server.settings import ServerSettings

SETTINGS = ServerSettings.resolve(port=8000)
SAID = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hi"}]


def begin(api: Api, **body: Any) -> tuple[GenerationCall, Answers]:
    return api.begin(json.dumps({"model": "warm-sim", **body}).encode(), SETTINGS, "r")


def test_responses_have_a_priority_and_messages_ignore_it() -> None:
    assert begin(ResponsesApi(), input="hello", priority=7)[0].request.priority == 7
    messages = [{"role": "user", "content": "hello"}]
    assert begin(MessagesApi(), messages=messages, max_tokens=5, priority=7)[0].request.priority == 0


def test_numbers_and_flags_in_other_types_are_read_as_vllm_reads_them() -> None:
    response, _ = begin(ResponsesApi(), input="hello", max_output_tokens="7", stream="true", store="false")
    message, _ = begin(MessagesApi(), messages=[{"role": "user", "content": "hi"}], max_tokens="7", stream=1)
    for call in (response, message):
        assert (call.request.max_tokens, call.stream) == (7, True)


def finished(call: GenerationCall, *, cached: int = 0) -> Delivery:
    delivery = Delivery(call.request, 0.0, stream=False, interval=1)
    delivery.sent, delivery.cached_tokens, delivery.finish_reason = call.request.max_tokens, cached, "length"
    return delivery


def streamed(call: GenerationCall, shape: Answers, *, cached: int = 0) -> list[dict[str, Any]]:
    delivery, end = finished(call, cached=cached), call.request.max_tokens
    stream = shape.before_prefill() + shape.opening(delivery)
    stream += shape.event(0, 1, None) + shape.event(1, end, "length") + shape.ending(delivery)
    events = []
    for each in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = each.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def refusal(api: Api, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        begin(api, **body)
    return refused.value


def test_a_conversation_has_the_tokens_of_chat_in_every_api() -> None:
    chat, _ = begin(OpenAiApi(chat=True), messages=[{"role": "system", "content": "brief"}, *SAID], max_tokens=5)
    marked = {"type": "text", "text": "hello there", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [marked]}, SAID[1]]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}},
    ]
    message, _ = begin(MessagesApi(), system=system, messages=messages, max_tokens=5)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello there"}]}
    said = {"type": "message", "id": "m", "status": "completed", **SAID[1]}
    response, _ = begin(ResponsesApi(), instructions="brief", input=[item, said], max_output_tokens=5)
    assert chat.request.prompt_tokens == message.request.prompt_tokens == response.request.prompt_tokens
    assert chat.request.output_offset == message.request.output_offset == response.request.output_offset


def test_a_message_reports_the_cache_as_anthropic_does() -> None:
    call, shape = begin(MessagesApi(), messages=SAID[:1] * 20, max_tokens=5, stream=True)
    prompt = call.request.prompt_tokens
    events = streamed(call, shape, cached=64)
    assert [each["type"] for each in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    usage = events[5]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (64, 5)
    whole = json.loads(shape.whole(finished(call, cached=64)))
    assert whole["content"][0]["text"] == "".join(each["delta"]["text"] for each in events[2:4])
    assert (whole["usage"], whole["stop_reason"]) == (usage, "max_tokens")


def test_counted_tokens_are_those_of_the_prompt() -> None:
    body = {"model": "warm-sim", "messages": SAID, "system": "brief", "tools": [{"name": "f"}]}
    call, _ = begin(MessagesApi(), **{**body, "max_tokens": 5})
    counted = json.loads(count_tokens(json.dumps(body).encode(), SETTINGS))
    assert counted["input_tokens"] == call.request.prompt_tokens
    assert json.loads(count_tokens(json.dumps({**body, "model": ""}).encode(), SETTINGS)) == counted
    with pytest.raises(ApiError, match="does not exist"):
        count_tokens(json.dumps({**body, "model": "other"}).encode(), SETTINGS)


def test_a_response_is_stored_and_continued() -> None:
    api = ResponsesApi()
    call, shape = begin(api, input="hello there", max_output_tokens=5, stream=True)
    events = streamed(call, shape, cached=16)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert (events[-1]["type"], last["status"]) == ("response.completed", "incomplete")
    assert last["usage"]["input_tokens_details"] == {"cached_tokens": 16}
    text = last["output"][0]["content"][0]["text"]
    assert json.loads(api.read(last["id"]))["output"] == last["output"]
    next_turn, _ = begin(api, input="go on", previous_response_id=last["id"])
    items = [*SAID[:1], {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    whole, _ = begin(api, input=items)
    assert next_turn.request.prompt_tokens == whole.request.prompt_tokens
    with pytest.raises(ApiError, match="synchronous"):
        api.cancel(last["id"])


def test_a_response_is_not_stored_if_the_request_forbids_it() -> None:
    api = ResponsesApi()
    call, shape = begin(api, input="hello", store=False)
    response = json.loads(shape.whole(finished(call)))
    with pytest.raises(ApiError, match="not found"):
        api.read(response["id"])
    assert refusal(api, input="x", previous_response_id=response["id"]).status == 404


@pytest.mark.parametrize(
    "body",
    [
        {"background": True},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "f"}},
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        {"include": ["message.output_text.logprobs"]},
        {"prompt": {"id": "p"}},
        {"conversation": "c"},
    ],
    ids=lambda body: next(iter(body)),
)
def test_what_the_simulator_lacks_is_refused_by_name(body: dict[str, Any]) -> None:
    refused = refusal(ResponsesApi(), input="x", **body)
    assert (refused.status, next(iter(body)) in str(refused)) == (400, True)


def test_messages_are_refused_in_anthropics_shape() -> None:
    api = MessagesApi()
    for body in (
        {"messages": SAID},
        {"messages": SAID, "max_tokens": 5, "tool_choice": {"type": "any"}},
        {"messages": SAID, "max_tokens": 5, "output_config": {"format": {"type": "json_schema"}}},
    ):
        answer = json.loads(api.error(refusal(api, **body)))
        assert (answer["type"], set(answer["error"])) == ("error", {"type", "message"})
