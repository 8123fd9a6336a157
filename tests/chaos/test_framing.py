"""Unusual framings of server-sent events, and vLLM's: the client receives the bytes unchanged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.chaos.conftest import BODY, StartChaos
from tests.chaos.rig.engine import ChaosEngine, Talk
from tests.chaos.rig.faults import raw_stream
from tests.chaos.rig.wire import (
    DONE,
    EVENTS,
    LAST_CHUNK,
    chunk,
    good_body,
    head,
    null_usage,
    sse,
    usage_event,
    whole,
)

WORDS = EVENTS[:-1]
ERROR = sse({"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}})
ACCENTS = (
    b"data: " + json.dumps({"choices": [{"text": "\u00e9\u4e16\U0001f9ed"}]}, ensure_ascii=False).encode() + b"\n\n"
)
NULS = b'data: {"choices":[{"text":"a\\u0000b"}]}\n\ndata: \0\0\0\n\n'
FINISH = sse({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
CONTINUOUS = sse({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 100, "completion_tokens": 1}})


def bytewise(*parts: bytes) -> list[bytes]:
    return [bytes((byte,)) for byte in b"".join(parts)]


def crlf(*parts: bytes) -> list[bytes]:
    return [part.replace(b"\n", b"\r\n") for part in parts]


FRAMINGS: dict[str, tuple[list[bytes], list[bytes]]] = {
    # name -> (pieces the engine sends, and those of its events that the proxy requested and removes)
    "one event a chunk": ([*WORDS, usage_event(), DONE], [usage_event()]),
    "all in one chunk": ([b"".join([*WORDS, usage_event(), DONE])], [usage_event()]),
    "a byte a chunk": (bytewise(*WORDS, usage_event(), DONE), [usage_event()]),
    "cut before the blank line": (
        [w for e in [*WORDS, usage_event(), DONE] for w in (e[:-1], e[-1:])],
        [usage_event()],
    ),
    "usage and [DONE] in one chunk": ([*WORDS, usage_event() + DONE], [usage_event()]),
    "usage twice": ([*WORDS, usage_event(), usage_event(), DONE], [usage_event(), usage_event()]),
    "usage on every event": ([CONTINUOUS, CONTINUOUS, usage_event(), DONE], [usage_event()]),
    "usage before the words": ([usage_event(), *WORDS, DONE], [usage_event()]),
    "no usage": ([*WORDS, DONE], []),
    "CRLF": (crlf(*WORDS, DONE), []),
    "comments and pings": (
        [b": ping\n\n", WORDS[0], b":\n\n", *WORDS[1:], b": bye\n\n", usage_event(), DONE],
        [usage_event()],
    ),
    "event, id and retry fields": (
        [b"retry: 5\nid: 1\nevent: x\n" + WORDS[0], *WORDS[1:], usage_event(), DONE],
        [usage_event()],
    ),
    "data over several lines": (
        [b'data: {"choices":\ndata: [{"text":"a"}]}\n\n', usage_event(), DONE],
        [usage_event()],
    ),
    "no space after the colon": ([w.replace(b"data: ", b"data:") for w in WORDS] + [DONE], []),
    "no [DONE]": ([*WORDS, FINISH, usage_event()], [usage_event()]),
    "[DONE] inside a text": (
        [sse({"choices": [{"text": "data: [DONE]"}]}), *WORDS, usage_event(), DONE],
        [usage_event()],
    ),
    "UTF-8 cut inside a character": (bytewise(ACCENTS, usage_event(), DONE), [usage_event()]),
    "invalid UTF-8": ([b"data: \xff\xfe\x80\n\n", usage_event(), DONE], [usage_event()]),
    "NUL bytes": ([NULS, usage_event(), DONE], [usage_event()]),
    "a finish reason and no [DONE]": ([*WORDS, FINISH], []),
    "a finish reason, a comment and no [DONE]": ([*WORDS, FINISH, b": bye\n\n"], []),
    "several choices and no [DONE]": ([*WORDS, FINISH, *WORDS, FINISH], []),
    "a finish reason without the blank line": ([*WORDS, FINISH[:-2]], []),
    "[DONE] without the blank line": ([*WORDS, b"data: [DONE]"], []),
    "blank lines": ([b"\n\n\n\n", *WORDS, usage_event(), DONE], [usage_event()]),
    "an event of 2 MB": ([sse({"choices": [{"text": "x" * 2_000_000}]}), usage_event(), DONE], [usage_event()]),
    "a word that looks like usage": (
        [sse({"choices": [{"text": '"usage": {'}]}), usage_event(), DONE],
        [usage_event()],
    ),
}


@pytest.mark.parametrize("asked", [False, True], ids=["usage not asked for", "usage asked for"])
@pytest.mark.parametrize("name", FRAMINGS)
async def test_what_the_engine_sent_is_what_the_client_gets(start_chaos: StartChaos, name: str, asked: bool) -> None:
    """Except the usage event that the proxy requested itself; everything for a client that requested it."""
    pieces, injected = FRAMINGS[name]
    expected = b"".join(pieces)
    if not asked:
        for taken in injected:
            expected = expected.replace(taken, b"", 1)
    proxy = await start_chaos(ChaosEngine(raw_stream(pieces)))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked else {}
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True, **options})
    assert answer.content == expected
    [row] = await proxy.rows()
    assert (row["outcome"], row["attempts"]) == ("ok", [])
    if injected:
        assert (row["prompt_tokens"], row["completion_tokens"]) == (100, 6)
    await proxy.nothing_left()


@pytest.mark.parametrize("asked", [False, True], ids=["usage not asked for", "usage asked for"])
@pytest.mark.parametrize("together", [1, 3, 100], ids=["an event a piece", "three", "all"])
async def test_a_client_that_did_not_ask_for_usage_sees_none_of_it(
    start_chaos: StartChaos, together: int, asked: bool
) -> None:
    """vLLM writes ``"usage":null`` on every event once usage is requested, here by the proxy."""
    sent = [*map(null_usage, WORDS), usage_event(), DONE]
    pieces = [b"".join(sent[at : at + together]) for at in range(0, len(sent), together)]
    proxy = await start_chaos(ChaosEngine(raw_stream(pieces)))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked else {}
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True, **options})
    assert answer.content == b"".join(sent if asked else EVENTS)
    [row] = await proxy.rows()
    assert (row["events"], row["completion_tokens"]) == (8, 6)


@pytest.mark.parametrize("asked", [False, True], ids=["usage not asked for", "usage asked for"])
async def test_half_an_event_never_reaches_a_client_as_a_whole_one(start_chaos: StartChaos, asked: bool) -> None:
    """A blank line would complete the event, and clients decode every event as JSON."""
    half = b'data: {"id": "x", "cho'
    proxy = await start_chaos(ChaosEngine(raw_stream([*WORDS[:2], half], end=False)))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked else {}
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True, **options})
    *words, last = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]
    assert [word["choices"][0]["text"] for word in words] == ["w0 ", "w1 "]
    assert last["error"]["code"] == "stream_broken"


REFUSAL = sse({"error": {"message": "too long", "type": "BadRequestError", "code": 400}})
MUTE = sse({"error": {"message": "", "type": "InternalServerError", "code": 500}})
REPORTED: dict[str, tuple[list[bytes], str, str]] = {
    # name -> (pieces the engine sends, outcome, error in the row)
    "no [DONE]": ([*WORDS[:2], ERROR], "stream_broken", "reported an error: out of memory"),
    "[DONE]": ([*WORDS[:2], ERROR, DONE], "stream_broken", "reported an error: out of memory"),
    "one chunk": ([WORDS[0], b"".join([WORDS[1], ERROR, DONE])], "stream_broken", "reported an error: out of memory"),
    "CRLF": (crlf(*WORDS[:2], ERROR, DONE), "stream_broken", "reported an error: out of memory"),
    "a text": ([*WORDS[:2], sse({"error": "boom"}), DONE], "stream_broken", "reported an error: boom"),
    "no text": ([*WORDS[:2], sse({"error": ""}), DONE], "stream_broken", "reported an error: no message"),
    "no message": (
        [*WORDS[:2], MUTE, DONE],
        "stream_broken",
        "reported an error: no message (InternalServerError, 500)",
    ),
    "a client's mistake": ([*WORDS[:2], REFUSAL, DONE], "engine_refused", "reported an error: too long"),
    "inside a text": ([*WORDS[:2], sse({"choices": [{"text": '"error":{}'}]}), DONE], "ok", ""),
    "a client's mistake at once": ([REFUSAL, DONE], "engine_refused", "reported an error: too long"),
    "null": ([sse({"choices": [{"text": "w"}], "error": None}), DONE], "ok", ""),
}


@pytest.mark.parametrize("name", REPORTED)
async def test_an_error_that_the_engine_reports_in_its_stream_is_recorded(start_chaos: StartChaos, name: str) -> None:
    pieces, outcome, error = REPORTED[name]
    proxy = await start_chaos(ChaosEngine(raw_stream(pieces)))
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.content == b"".join(pieces)
    [row] = await proxy.rows()
    assert (row["outcome"], row["error"] or "") == (outcome, error)
    assert len(row["attempts"]) == (outcome == "stream_broken")
    assert proxy.instance().failures_in_a_row == 0
    await proxy.nothing_left()


@pytest.mark.parametrize(
    "pieces", [[ERROR, DONE], [b"".join([*WORDS[:2], ERROR, DONE])]], ids=["first", "in one piece"]
)
async def test_an_error_before_anything_was_sent_is_retried(start_chaos: StartChaos, pieces: list[bytes]) -> None:
    """vLLM's way to fail the streams that it prefills when its core dies."""
    proxy = await start_chaos(ChaosEngine(raw_stream(pieces)), ChaosEngine())
    contents = [(await proxy.client.post("/v1/completions", json={**BODY, "stream": True})).content for _ in range(2)]
    assert contents == [b"".join(EVENTS)] * 2
    rows = await proxy.rows()
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    errors = {attempt["error"] for row in rows for attempt in row["attempts"]}
    assert errors == {"reported an error: out of memory"}
    await proxy.nothing_left()


async def test_a_client_that_leaves_at_the_engines_error_has_not_left_early(start_chaos: StartChaos) -> None:
    """OpenAI's libraries raise an exception at the event and close the connection."""
    received = asyncio.Event()

    async def fault(talk: Talk) -> None:
        await talk.send(head("200 OK", "content-type: text/event-stream", "transfer-encoding: chunked"))
        await talk.send(chunk(WORDS[0]))
        await received.wait()
        await talk.send(chunk(ERROR))
        await talk.hang()

    proxy = await start_chaos(ChaosEngine(fault))
    async with proxy.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        content = b""
        async for piece in answer.aiter_bytes():
            content += piece
            received.set()
            if ERROR in content:
                break
    [row] = await proxy.rows()
    assert (row["outcome"], row["error"]) == ("stream_broken", "reported an error: out of memory")
    await proxy.nothing_left()


CUT: dict[str, list[bytes]] = {
    "after an event": WORDS[:2],
    "inside an event": [*WORDS[:2], b'data: {"choi'],
    "before the finish reason of the second choice": [WORDS[0], FINISH, WORDS[1]],
    "after a comment": [*WORDS[:2], b": ping\n\n"],
    "after an unreadable event": [*WORDS[:2], b"data: [DO\n\n"],
    "[DONE] only inside a text": [WORDS[0], sse({"choices": [{"text": "data: [DONE]\n\n", "finish_reason": None}]})],
    "after an empty list of choices": [*WORDS[:2], sse({"choices": []})],
    "CRLF": [word.replace(b"\n", b"\r\n") for word in WORDS[:2]],
}


@pytest.mark.parametrize("asked", [False, True], ids=["usage not asked for", "usage asked for"])
@pytest.mark.parametrize("name", CUT)
async def test_a_stream_that_ends_early_is_broken_however_clean_its_end(
    start_chaos: StartChaos, name: str, asked: bool
) -> None:
    proxy = await start_chaos(ChaosEngine(raw_stream(CUT[name])))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked else {}
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True, **options})
    *sent, last = [part for part in answer.content.replace(b"\r\n", b"\n").split(b"\n\n") if part]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stream_broken"
    assert b"".join(part + b"\n\n" for part in sent) in b"".join(CUT[name]).replace(b"\r\n", b"\n")
    [row] = await proxy.rows()
    assert (row["outcome"], row["error"]) == ("stream_broken", "ended its stream without [DONE] or a finish reason")
    assert proxy.instance().failures_in_a_row == 1
    await proxy.nothing_left()


async def test_what_is_not_made_of_events_is_broken_if_it_claims_to_be(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(raw_stream([b"hello", b" world"])))
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.content.startswith(b"data: {")
    assert (await proxy.rows())[0]["outcome"] == "stream_broken"


@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_an_engine_that_ignores_stream_is_passed_on(start_chaos: StartChaos, framing: str) -> None:
    async def whole_answer(talk: Talk) -> None:
        body = good_body()
        if framing == "length":
            await talk.send(whole("200 OK", body))
        else:
            await talk.send(head("200 OK", "content-type: application/json", "transfer-encoding: chunked"))
            await talk.send(chunk(body[:40]) + chunk(body[40:]) + LAST_CHUNK)

    proxy = await start_chaos(ChaosEngine(whole_answer))
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.content == good_body()
    assert (await proxy.rows())[0]["outcome"] == "ok"


async def test_nothing_a_client_waits_for_comes_after_done(start_chaos: StartChaos) -> None:
    """The stream ends with its last event, regardless of later bytes and of how long the engine keeps it open."""
    proxy = await start_chaos(ChaosEngine(raw_stream([*EVENTS, b": bye\n\n"], pause_s=0.05)))
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.content.removesuffix(b": bye\n\n") == b"".join(EVENTS)
    assert (await proxy.rows())[0]["outcome"] == "ok"
