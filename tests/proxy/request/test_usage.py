"""Reading usage, and removing one event from a stream for any division into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.request.usage import UsageFilter, usage_of_answer

TOKENS = [
    b"data: " + json.dumps({"choices": [{"text": f"w{n} \n"}], "usage": None}).encode() + b"\n\n" for n in range(5)
]
PLAIN = [token.replace(b', "usage": null', b"") for token in TOKENS]
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n'
CONTINUOUS = b'data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.integers(min_value=0, max_value=10_000)), st.integers(min_value=0, max_value=6))
def test_filter_takes_out_the_usage_event_and_nothing_else_however_the_stream_is_cut(
    places: list[int], position: int
) -> None:
    events = [*TOKENS, DONE]
    stream = b"".join([*events[:position], USAGE, *events[position:]])
    keep = UsageFilter(drop=True)
    passed = b"".join(keep.feed(piece) for piece in cut(stream, places)) + keep.flush()
    assert passed == b"".join([*PLAIN, DONE])


# A usage that is null is removed, also from what is no event.
@given(
    st.lists(st.integers(min_value=0, max_value=10_000)),
    st.binary(max_size=40).filter(lambda torn_end: b'"usage"' not in torn_end),
)
@example(places=[], torn_end=b"\n")
def test_filter_passes_every_other_byte_unchanged(places: list[int], torn_end: bytes) -> None:
    stream = b"".join([*PLAIN, CONTINUOUS, b": comment\n\n", DONE]) + torn_end
    keep = UsageFilter(drop=True)
    assert b"".join(keep.feed(piece) for piece in cut(stream, places)) + keep.flush() == stream


@given(st.lists(st.integers(min_value=0, max_value=10_000)))
def test_filter_corrects_cached_tokens_and_nothing_else_however_the_stream_is_cut(places: list[int]) -> None:
    stream = b"".join([*TOKENS, USAGE, DONE])
    keep = UsageFilter(drop=False, cached_tokens=7)
    passed = b"".join(keep.feed(piece) for piece in cut(stream, places)) + keep.flush()
    assert passed.startswith(b"".join(TOKENS))
    assert passed.endswith(DONE)
    corrected = passed.removeprefix(b"".join(TOKENS)).removesuffix(DONE)
    usage = usage_of_answer(corrected.removeprefix(b"data: "))
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (9, 7)


@given(st.lists(st.integers(min_value=0, max_value=10_000)))
def test_a_stream_framed_with_crlf_is_corrected_like_any_other(places: list[int]) -> None:
    stream = b"".join([*TOKENS, USAGE, DONE]).replace(b"\n\n", b"\r\n\r\n")
    keep = UsageFilter(drop=True)
    passed = b"".join(keep.feed(piece) for piece in cut(stream, places)) + keep.flush()
    assert passed == b"".join([*PLAIN, DONE]).replace(b"\n\n", b"\r\n\r\n")


@given(st.lists(st.integers(min_value=0, max_value=10_000)), st.booleans())
def test_only_whole_events_leave_the_filter_before_its_end(places: list[int], crlf: bool) -> None:
    stream = b"".join([*TOKENS, CONTINUOUS, USAGE, DONE])
    gap = b"\r\n\r\n" if crlf else b"\n\n"
    stream = stream.replace(b"\n\n", gap)
    keep = UsageFilter()
    for piece in cut(stream, places):
        passed = keep.feed(piece)
        assert not passed or passed.endswith(gap)
    assert keep.flush() == b""


def test_what_is_not_made_of_events_is_not_held_back_without_bound() -> None:
    keep = UsageFilter()
    fed = passed = 0
    for _ in range(100):
        fed += 65_536
        passed += len(keep.feed(b"x" * 65_536))
    assert fed - passed <= 2 * 1024 * 1024


@given(st.lists(st.integers(min_value=0, max_value=10_000)))
def test_usage_comes_from_the_last_event_that_has_one_however_the_stream_is_cut(places: list[int]) -> None:
    keep = UsageFilter()
    for piece in cut(b"".join([*TOKENS, CONTINUOUS, USAGE, DONE]), places):
        keep.feed(piece)
    usage = keep.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (9, 5, 0)


@pytest.mark.parametrize(
    ("body", "cached"),
    [
        (b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}', 4),
        (b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}', 0),
        (b'{"usage":{"prompt_tokens":9}}', 0),
        (b'{"usage":{}}', None),
    ],
)
def test_missing_details_mean_no_hit_as_in_vllm_0_18(body: bytes, cached: int | None) -> None:
    usage = usage_of_answer(body)
    assert usage is not None
    assert usage.cached_tokens == cached


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b'{"usage": 5}', b'{"no": 1}'])
def test_answers_without_usage_are_no_error(body: bytes) -> None:
    assert usage_of_answer(body) is None


@pytest.mark.parametrize("event", [DONE, PLAIN[0], CONTINUOUS, b'data: {"usage":{\n\n', b": usage\n\n"])
def test_only_the_event_without_choices_is_the_usage_event(event: bytes) -> None:
    assert UsageFilter(drop=True).feed(event) == event
    assert UsageFilter(drop=True).feed(USAGE) == b""


NULLS = {
    "at the end": (b'{"choices":[{"text":"x"}],"usage":null}', b'{"choices":[{"text":"x"}]}'),
    "spaced": (b'{"choices": [{"text": "x"}], "usage": null}', b'{"choices": [{"text": "x"}]}'),
    "before other fields": (
        b'{"id":"a","usage":null,"prompt_token_ids":null,"choices":[]}',
        b'{"id":"a","prompt_token_ids":null,"choices":[]}',
    ),
}
UNTOUCHED = {
    "inside a text": b'{"choices":[{"text":"{\\"a\\":1,\\"usage\\":null}"}]}',
    "a text that is the name": b'{"choices":[{"text":"usage"}]}',
    "of an inner object": b'{"choices":[{"delta":{"a":1,"usage":null}}]}',
    "of an inner object, before others": b'{"choices":[{"a":1,"usage":null,"b":2}],"c":3}',
    "of both": b'{"choices":[{"a":1,"usage":null,"b":2}],"usage":null,"c":3}',
    "not JSON": b'{"choices":,"usage":null,}',
    "no object": b',"usage":null,',
}


@pytest.mark.parametrize("gap", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("form", NULLS)
@given(places=st.lists(st.integers(min_value=0, max_value=10_000)), count=st.integers(1, 4))
def test_a_null_usage_that_the_client_did_not_request_is_removed(
    form: str, gap: bytes, places: list[int], count: int
) -> None:
    wrote, expected = NULLS[form]
    keep = UsageFilter(drop=True)
    passed = b"".join(keep.feed(piece) for piece in cut((b"data: " + wrote + gap) * count, places)) + keep.flush()
    assert passed == (b"data: " + expected + gap) * count


@pytest.mark.parametrize("form", UNTOUCHED)
@given(places=st.lists(st.integers(min_value=0, max_value=10_000)))
def test_nothing_else_that_looks_like_a_null_usage_is_removed(form: str, places: list[int]) -> None:
    stream = (b"data: " + UNTOUCHED[form] + b"\n\n") * 2
    keep = UsageFilter(drop=True)
    assert b"".join(keep.feed(piece) for piece in cut(stream, places)) + keep.flush() == stream


def test_a_null_usage_stays_for_a_client_that_requested_usage() -> None:
    keep = UsageFilter(drop=False)
    stream = b"".join(b"data: " + wrote + b"\n\n" for wrote, _ in NULLS.values())
    assert keep.feed(stream) == stream
