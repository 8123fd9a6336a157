"""The stream filter on arbitrary bytes in arbitrary pieces: the output is the input without the requested event."""

from __future__ import annotations

import itertools
import json
import re

from hypothesis import example, given
from hypothesis import strategies as st

from proxy.request.usage import UsageFilter, usage_of_answer, with_cached_tokens
from tests.chaos.rig.profiles import fuzz
from tests.chaos.rig.wire import DONE, event, sse, usage_event

CUTS = st.lists(st.integers(min_value=0, max_value=5_000), max_size=40)
FRAGMENTS = st.sampled_from(
    [
        *(b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", b"data:", b"data: ", b": ping", b"event: x", b"id: 1"),
        *(b"[DONE]", DONE, event(0), event(1), usage_event(), usage_event()[:-2], usage_event()[20:]),
        *(b'"usage":{', b'"usage": {', b'"usage"', b'"usage":null', b'{"choices":[],"usage":{"prompt_tokens":1}}'),
        *(b"{", b"}", b"[]", b"\0", b"\xff", "é".encode(), "世".encode()[:2], b'{"choices":[],"usage":'),
    ]
)
STREAMS = st.lists(FRAGMENTS | st.binary(max_size=30), max_size=40).map(b"".join)

TEXTS = st.text(max_size=30) | st.sampled_from(['"usage": {', "data: [DONE]", "\n\ndata: x", "\r\n\r\n", "\\"])
NULL = re.compile(rb',\s*"usage"\s*:\s*null(?=\s*[,}])')
WORDS = st.builds(lambda text: sse({"choices": [{"text": text}], "usage": None}), TEXTS)
CONTINUOUS = st.builds(
    lambda text: sse({"choices": [{"text": text}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}), TEXTS
)
COMMENTS = st.sampled_from([b": ping\n\n", b"event: x\nid: 7\ndata: {}\n\n", b"retry: 10\n\n"])
EVENTS = st.lists(WORDS | CONTINUOUS | COMMENTS, max_size=12)


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


def parts(stream: bytes) -> list[bytes]:
    """Events with their blank lines, then the rest."""
    return re.split(rb"(?<=\n\n)|(?<=\r\n\r\n)", stream)


def only_usage(part: bytes) -> bool:
    """True if an event has a usage and no choices."""
    found = json.loads(part[part.find(b"{") :].decode(errors="replace"), strict=False)
    return not found.get("choices") and isinstance(found["usage"], dict)


def through(keep: UsageFilter, stream: bytes, cuts: list[int]) -> bytes:
    return b"".join(keep.feed(piece) for piece in pieces(stream, cuts)) + keep.flush()


@fuzz
@given(STREAMS, CUTS)
@example(usage_event() + b"\r\n" + DONE, [3, 200])
def test_nothing_is_taken_out_for_a_client_that_asked_for_usage(stream: bytes, cuts: list[int]) -> None:
    assert through(UsageFilter(drop=False), stream, cuts) == stream


@fuzz
@given(STREAMS, CUTS)
@example(b"\n" + usage_event() + b"x", [1])
@example(usage_event() * 3, [])
@example(usage_event()[:-1] + b"\r\n\r\n" + event(0), [5])
def test_only_usage_events_are_removed_from_any_stream(stream: bytes, cuts: list[int]) -> None:
    """Only whole events with usage and without choices, and null usages, are missing; the rest is in order."""
    passed = through(UsageFilter(drop=True), stream, cuts)
    at = 0
    for part in parts(stream):
        if passed.startswith(part, at):
            at += len(part)
        elif passed.startswith(bare := NULL.sub(b"", part), at):
            at += len(bare)
        else:
            assert only_usage(part), (part, passed[at : at + 100])
    assert at == len(passed)
    if b"\r" not in stream:
        assert all(UsageFilter(drop=True).feed(part) for part in parts(passed) if part.endswith(b"\n\n"))


@fuzz
@given(EVENTS, st.integers(0, 12), CUTS)
def test_a_well_formed_stream_stays_well_formed(events: list[bytes], position: int, cuts: list[int]) -> None:
    """Only usages are removed, wherever they are and however the stream is divided."""
    stream = b"".join([*events[:position], usage_event(), *events[position:], DONE])
    keep = UsageFilter(drop=True)
    passed = through(keep, stream, cuts)
    assert passed == b"".join([*(NULL.sub(b"", each) for each in events), DONE])
    for part in passed.split(b"\n\n")[:-1]:
        assert part.startswith((b"data: ", b": ", b"event: ", b"retry: "))


@fuzz
@given(EVENTS, CUTS, st.integers(0, 10_000))
def test_a_corrected_usage_is_the_only_change(events: list[bytes], cuts: list[int], cached: int) -> None:
    stream = b"".join([*events, usage_event(), DONE])
    passed = through(UsageFilter(drop=False, cached_tokens=cached), stream, cuts)
    assert passed.startswith(b"".join(events))
    assert passed.endswith(DONE)
    changed = json.loads(passed[len(b"".join(events)) : -len(DONE)].removeprefix(b"data: "))
    assert changed["usage"].pop("prompt_tokens_details") == {"cached_tokens": cached}
    assert changed == json.loads(usage_event().removeprefix(b"data: "))


@fuzz
@given(EVENTS, CUTS, st.integers(0, 400))
def test_a_stream_that_breaks_off_ends_with_a_whole_event(events: list[bytes], cuts: list[int], lost: int) -> None:
    """The client's bytes before the break, without the bytes held back, are whole events."""
    stream = b"".join([*events, usage_event(), DONE])
    keep = UsageFilter(drop=False)
    passed = b"".join(keep.feed(piece) for piece in pieces(stream[: max(0, len(stream) - lost)], cuts))
    assert not passed or passed.endswith(b"\n\n")
    assert stream.startswith(passed)


@fuzz
@given(STREAMS, CUTS)
def test_what_is_held_back_is_bounded_by_the_last_event(stream: bytes, cuts: list[int]) -> None:
    keep = UsageFilter(drop=True)
    for piece in pieces(stream, cuts):
        keep.feed(piece)
    last = re.split(rb"\n\n|\r\n\r\n", stream)[-1]
    assert len(keep.flush()) <= max(len(last), 0) + 3


@fuzz
@given(STREAMS)
def test_usage_of_arbitrary_bytes_is_a_usage_or_none(content: bytes) -> None:
    usage = usage_of_answer(content)
    assert usage is None or usage.cached_tokens is None or usage.cached_tokens >= 0
    assert isinstance(with_cached_tokens(content, 5), bytes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@fuzz
@given(
    st.dictionaries(
        st.sampled_from(["prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens"]), JSON
    )
    | JSON,
    st.booleans(),
)
def test_usage_of_any_json_is_a_usage_or_none(usage: object, streamed: bool) -> None:
    content = json.dumps({"choices": [], "usage": usage}).encode()
    if streamed:
        keep = UsageFilter(drop=True)
        passed = keep.feed(b"data: " + content + b"\n\n") + keep.flush()
        assert passed in {b"", b"data: " + content + b"\n\n", b"data: " + NULL.sub(b"", content) + b"\n\n"}
        assert keep.usage is None or keep.usage.cached_tokens is None or isinstance(keep.usage.cached_tokens, int)
    else:
        usage_of_answer(content)
