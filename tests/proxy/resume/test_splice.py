"""Splice points: a stream broken anywhere and continued reads like an unbroken one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from proxy.resume.continuation import Cut, StreamFailedError, StreamSoFar
from proxy.resume.plan import ResumeResult, choose_cut
from proxy.resume.splice import DivergedError, Splice
from tests.proxy.resume.rig import CHAT, CONTINUOUS, GREEDY, IDS, MANY, USAGE, Life, event, planned, read
from tests.proxy.tokens.engine import TokenEngine

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "completion": (GREEDY, {}),
    "usage": (GREEDY | USAGE, {}),
    "continuous usage": (GREEDY | CONTINUOUS, {}),
    "token ids asked": (GREEDY | USAGE | IDS, {}),
    "prompt of ids": (GREEDY | {"prompt": [104, 105, 106]} | USAGE, {}),
    "several tokens an event": (GREEDY | USAGE | IDS, {"per_event": 3}),
    "without ids": (GREEDY | USAGE, {"reports_ids": False}),
    "min_tokens": (GREEDY | USAGE | {"min_tokens": 20}, {}),
    "stop": (GREEDY | USAGE | {"stop": "{c"}, {}),
    "stop never met": (GREEDY | USAGE | IDS | {"stop": "nowhere"}, {}),
    "seed": (GREEDY | USAGE | IDS | {"temperature": 0.7, "seed": 3}, {}),
    "chat": (CHAT | USAGE, {}),
    "chat, ids asked": (CHAT | IDS | USAGE, {"per_event": 2}),
    "chat, continuous usage": (CHAT | CONTINUOUS, {}),
    "chat that thinks": (CHAT | USAGE, {"thinks": 9}),
    "chat with stop": (CHAT | USAGE | {"stop": "{c"}, {}),
    "chat without ids": (CHAT | USAGE, {"reports_ids": False, "per_event": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_splice_at_every_event_is_invisible(kind: str) -> None:
    body, engine = KINDS[kind]
    life = Life(body, **engine)
    whole = life.whole
    assert len(whole["text"]) > 4
    events = len(TokenEngine(port=1, **engine).events(body, "r"))
    for upto in range(events):
        life = Life(body, **engine)
        life.begin(upto)
        if life.so_far.finish_reason:
            break  # completed without another engine: covered by the serving tests
        life.continue_on(2)
        assert read(life.got) == whole, upto
        assert life.so_far.done
    assert upto > 5


@pytest.mark.parametrize("kind", KINDS)
def test_two_splices_are_invisible(kind: str) -> None:
    body, engine = KINDS[kind]
    draw = random.Random(kind)
    for _ in range(25):
        life = Life(body, **engine)
        first = draw.randrange(8)
        life.begin(first)
        life.continue_on(2, draw.randrange(6))
        if life.so_far.finish_reason:
            continue
        life.continue_on(3)
        assert read(life.got) == life.whole, first


@pytest.mark.parametrize("body", [GREEDY | USAGE, GREEDY | USAGE | IDS, CHAT | USAGE])
def test_a_second_break_before_the_first_ones_place_is_reached_is_not_seen(body: dict[str, Any]) -> None:
    for upto in range(1, 12):
        life = Life(body)
        life.engine = {"per_event": 4}
        life.begin(5)
        assert life.continue_on(2, upto, per_event=1) == Cut(0, 0)
        life.continue_on(3, per_event=1)
        assert read(life.got) == life.whole, upto


def test_a_repeated_role_is_not_relayed() -> None:
    so_far = StreamSoFar(keep_ids=False)
    head = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(**delta: str) -> bytes:
        return b"data: " + json.dumps({**head, "choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"

    so_far.feed(chunk(role="assistant", content="a"))
    splice = Splice(so_far, Cut(0, 0), keep_ids=False)
    said = json.loads(splice.feed(chunk(role="assistant", content="ab")).removeprefix(b"data: "))
    assert said["choices"] == [{"index": 0, "delta": {"content": "b"}}]


def test_a_tool_call_after_the_splice_is_relayed() -> None:
    life = Life(CHAT | {"tools": [{}]}, tool_after=6)
    life.begin(5)
    life.continue_on(2)
    said = b"".join(life.got.split(b"\n\n"))
    assert said.count(b"tool_calls") == 30 - 6


@pytest.mark.parametrize(
    "body", [GREEDY | {"stop": "nowhere"}, GREEDY | IDS | {"stop": "nowhere"}, CHAT | {"stop": "zz"}]
)
def test_an_engine_that_says_something_else_is_noticed(body: dict[str, Any]) -> None:
    life = Life(body)
    life.begin(12)
    with pytest.raises(DivergedError, match="other"):
        life.continue_on(2, salt="another model")


def test_an_engine_that_ends_before_what_had_been_sent_is_noticed() -> None:
    life = Life(GREEDY | {"stop": "nowhere"})
    life.begin(12)
    cut = choose_cut(life.plan, life.so_far, life.client, MANY, None)
    assert isinstance(cut, Cut)
    splice = Splice(life.so_far, cut, keep_ids=False)
    short = json.loads(life.sent) | {"max_tokens": 5}
    assert splice.feed(life.stream(json.dumps(short).encode(), 2, None)) == b""
    with pytest.raises(DivergedError, match="ended"):
        splice.flush()


@pytest.mark.parametrize("code", [500, 503, "gone", None])
def test_an_error_event_breaks_the_stream_after_the_events_before_it(code: object) -> None:
    failure = b"data: " + json.dumps({"error": {"message": "EngineCore died", "code": code}}).encode() + b"\n\n"
    so_far = StreamSoFar(keep_ids=False)
    said = so_far.feed(event("a", [97]) + failure + b"data: [DONE]\n\n")
    assert said == event("a", [97]).replace(b"[97]", b"null")
    assert not so_far.done
    for again in (so_far.flush, lambda: so_far.feed(b"")):
        with pytest.raises(StreamFailedError, match="EngineCore died"):
            again()


def test_an_error_without_a_message_has_its_type_and_code_instead() -> None:
    so_far = StreamSoFar(keep_ids=False)
    so_far.feed(b'data: {"error": {"message": "", "type": "InternalServerError", "code": 500}}\n\n')
    with pytest.raises(StreamFailedError, match=r"^reported an error: no message \(InternalServerError, 500\)$"):
        so_far.flush()


def test_a_complaint_about_the_request_is_the_clients() -> None:
    complaint = b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'
    so_far = StreamSoFar(keep_ids=False)
    assert so_far.feed(complaint) == complaint
    assert so_far.done


@pytest.mark.parametrize(
    "odd", [b'data: {"id":"a","choices":[]}\r\n\r\n', b'data: {"id": 3}\n\n', b"data: {broken\n\n"]
)
def test_an_unknown_stream_passes_by_and_is_not_resumed(odd: bytes) -> None:
    so_far = StreamSoFar(keep_ids=False)
    stream = event("a", []).replace(b"[]", b"null") + odd + b"data: x\r\n\r\nrest"
    assert b"".join(so_far.feed(bytes([byte])) for byte in stream) + so_far.flush() == stream
    assert choose_cut(planned(GREEDY), so_far, b"", MANY, None) is ResumeResult.UNREADABLE


def test_text_that_looks_like_ids_is_left_alone() -> None:
    text = 'token_ids":[1,2] "token_ids": [3]'
    so_far = StreamSoFar(keep_ids=False)
    said = json.loads(so_far.feed(event(text, [97], prompt=[1, 2])).removeprefix(b"data: "))
    assert said["choices"][0] == {
        **{"index": 0, "text": text, "token_ids": None, "prompt_token_ids": None, "finish_reason": None}
    }
    assert (so_far.ids, json.loads(so_far.prompt_ids)) == ([97], [1, 2])
