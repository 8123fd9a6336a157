"""Streams of named events: unchanged however they are cut, with usage, id and end recognised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.request.typed_events import MESSAGE_EVENTS, RESPONSE_EVENTS, TypedEvents
from proxy.request.typed_usage import read_typed_answer
from tests.proxy.request.test_usage import cut
from tests.proxy.typed_engine import MESSAGE, event, response_events

PLACES = st.lists(st.integers(min_value=0, max_value=10_000), max_size=30)


@given(PLACES, st.booleans())
def test_a_message_passes_unchanged_and_is_read(places: list[int], crlf: bool) -> None:
    stream = b"".join(MESSAGE)
    stream = stream.replace(b"\n", b"\r\n") if crlf else stream
    events = TypedEvents(MESSAGE_EVENTS)
    assert b"".join(events.feed(piece) for piece in cut(stream, places)) + events.flush() == stream
    assert events.ended
    assert events.usage is not None
    assert (events.usage.prompt_tokens, events.usage.cached_tokens, events.usage.completion_tokens) == (90, 64, 4)
    assert events.events == len(MESSAGE)


@given(PLACES)
def test_a_response_passes_unchanged_and_its_id_is_learned_once(places: list[int]) -> None:
    stream = b"".join(response_events("resp_1"))
    ids: list[str] = []
    events = TypedEvents(RESPONSE_EVENTS, ids.append)
    assert b"".join(events.feed(piece) for piece in cut(stream, places)) + events.flush() == stream
    assert ids == ["resp_1"]
    assert events.ended
    assert events.usage is not None
    assert (events.usage.prompt_tokens, events.usage.cached_tokens, events.usage.completion_tokens) == (90, 64, 4)


@pytest.mark.parametrize("name", ["response.completed", "response.incomplete", "response.failed", "error"])
def test_every_last_event_ends_a_response(name: str) -> None:
    events = TypedEvents(RESPONSE_EVENTS)
    events.feed(event("response.output_text.delta", delta="event: response.completed\n"))
    assert not events.ended
    events.feed(event(name, response=None))
    assert events.ended


REPORTED: dict[str, tuple[bytes, bool, str]] = {
    # name -> (event, if it is the client's mistake, message)
    "vLLM's of a message": (event("error", error={"type": "internal_error", "message": "boom"}), False, "boom"),
    "Anthropic's": (event("error", error={"type": "overloaded_error", "message": "full"}), False, "full"),
    "a refused message": (event("error", error={"type": "invalid_request_error", "message": "no"}), True, "no"),
    "a failed response": (
        event("response.failed", response={"id": "r", "error": {"code": "server_error", "message": "boom"}}),
        False,
        "boom",
    ),
    "a refused response": (
        event("response.failed", response={"id": "r", "error": {"code": "invalid_prompt", "message": "no"}}),
        True,
        "no",
    ),
    "its own fields": (event("error", code="server_error", message="boom", param=None), False, "boom"),
    "a code of 4xx": (event("error", error={"code": 400, "message": "no"}), True, "no"),
    "no object": (event("error", error="boom"), False, "boom"),
    "no JSON": (b"event: error\ndata: boom\n\n", False, "an unreadable error"),
}


@pytest.mark.parametrize("name", REPORTED)
def test_an_error_of_the_engine_is_read(name: str) -> None:
    sent, refusal, says = REPORTED[name]
    events = TypedEvents(RESPONSE_EVENTS)
    assert events.feed(sent) == sent
    assert events.ended
    assert events.reported == (says, refusal)


def test_a_complete_answer_reports_no_error() -> None:
    events = TypedEvents(RESPONSE_EVENTS)
    events.feed(b"".join(response_events("resp_1")))
    assert events.reported is None


def test_an_event_beyond_the_bound_passes_in_pieces_and_still_ends_the_stream() -> None:
    large = event("response.completed", response={"id": "resp_1", "instructions": "x" * 3_000_000})
    events = TypedEvents(RESPONSE_EVENTS)
    pieces = [large[at : at + 65_536] for at in range(0, len(large), 65_536)]
    assert b"".join(events.feed(piece) for piece in pieces) + events.flush() == large
    assert events.ending


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input_tokens": 9, "output_tokens": 2}, (9, None, 2)),
        ({"input_tokens": 9, "cache_read_input_tokens": 0}, (9, 0, None)),
        ({"input_tokens": 9, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 3}, (17, 5, None)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 5}}, (9, 5, None)),
        ({"output_tokens": 2}, (None, None, 2)),
    ],
)
def test_usage_counts_the_whole_prompt_and_reports_unknown_as_unknown(
    usage: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    answer = read_typed_answer(json.dumps({"id": "x", "usage": usage}).encode())
    assert answer.usage is not None
    found = answer.usage.as_usage()
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == expected


@pytest.mark.parametrize("body", [b"", b"[]", b'{"usage":5}', b'{"usage":{"input_tokens":-1}}', b'{"id":{}}', b"\xff"])
def test_an_answer_of_another_shape_has_no_usage(body: bytes) -> None:
    assert read_typed_answer(body).usage is None


OPENING = [
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n',
    b'event: response.queued\ndata: {"type":"response.queued"}\n\n',
    b'event: response.in_progress\r\ndata: {"type":"response.in_progress"}\r\n\r\n',
]


@pytest.mark.parametrize(
    "first",
    [
        b'event: response.output_item.added\ndata: {"item":{}}\n\n',
        b'event: response.output_text.delta\ndata: {"delta":"event: response.created"}\n\n',
        b"event: response.in_progress_of_something\ndata: {}\n\n",
        b'event: response.failed\ndata: {"response":{"error":{"message":"m"}}}\n\n',
        b'event: error\ndata: {"message":"m"}\n\n',
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_first_output_is_the_first_event_after_the_opening(first: bytes, size: int) -> None:
    seen = list[int]()
    events = TypedEvents(RESPONSE_EVENTS, on_output=lambda: seen.append(events.events))
    opening = b"".join(OPENING)
    for at in range(0, len(opening), size):
        events.feed(opening[at : at + size])
    assert seen == []
    for at in range(0, len(first), size):
        events.feed(first[at : at + size])
    assert seen == [4]
    events.feed(first)
    assert seen == [4]


def test_without_events_before_the_prefill_nobody_waits_for_the_output() -> None:
    events = TypedEvents(MESSAGE_EVENTS, on_output=lambda: pytest.fail("called"))
    events.feed(b'event: message_start\ndata: {"message":{"id":"m"}}\n\n')
