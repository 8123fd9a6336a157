"""Prompts from ids: exact lengths, exact sharing, bounded cache."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.replay.prompts import BodyTemplate, PromptBuilder, decimal_rows
from replayer.traces.trace import TraceRequest

IDS = st.lists(st.integers(0, 40), max_size=12)


def request(ids: list[int], length: int, chat_id: int = 0) -> TraceRequest:
    return TraceRequest(chat_id=chat_id, input_length=length, hash_ids=ids)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(a=IDS, b=IDS, block=st.sampled_from([8, 16, 64]), tails=st.tuples(st.integers(1, 8), st.integers(1, 8)))
def test_prompts_share_the_tokens_of_their_common_ids_and_part_within_the_next_block(
    a: list[int], b: list[int], block: int, tails: tuple[int, int]
) -> None:
    builder = PromptBuilder(block)
    one = builder.tokens(request(a, len(a) * block + tails[0], 1))
    two = builder.tokens(request(b, len(b) * block + tails[1], 2))
    shared, same = common(a, b), common(one, two)
    assert same >= shared * block
    # A chance coincidence of a token or two is possible, of a whole block is not.
    assert same < shared * block + 5


@given(ids=IDS.filter(bool), short=st.integers(1, 15))
def test_a_hash_first_seen_as_a_short_tail_is_not_short_later(ids: list[int], short: int) -> None:
    block = 16
    builder = PromptBuilder(block)
    cut = (len(ids) - 1) * block + short
    before = json.loads(builder.tokens_json(request(ids, cut)))
    after = json.loads(builder.tokens_json(request(ids, len(ids) * block)))
    assert len(before) == cut
    assert len(after) == len(ids) * block
    assert after[:cut] == before
    assert json.loads(builder.tokens_json(request(ids, cut))) == before


@given(ids=IDS, length=st.integers(1, 400), seed=st.integers(0, 3), high=st.sampled_from([8, 1000, 151_000]))
def test_json_and_tokens_agree_and_lie_in_the_vocabulary(ids: list[int], length: int, seed: int, high: int) -> None:
    builder = PromptBuilder(16, seed=seed, low=7, high=high)
    tokens = builder.tokens(request(ids, length))
    assert len(tokens) == length
    assert json.loads(builder.tokens_json(request(ids, length))) == tokens
    assert all(7 <= token < high for token in tokens)


def test_tails_that_no_id_covers_are_shared_with_nobody() -> None:
    builder = PromptBuilder(16)
    one, two = (builder.tokens(request([1, 2], 48, chat)) for chat in (1, 2))
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]


def test_seeds_differ_and_order_of_calls_does_not_matter() -> None:
    one, two = PromptBuilder(16, seed=1), PromptBuilder(16, seed=1)
    first, second = request([1, 2, 3], 48), request([9, 8], 32)
    a = [one.tokens_json(first), one.tokens_json(second)]
    b = [two.tokens_json(second), two.tokens_json(first)]
    assert a == b[::-1]
    assert PromptBuilder(16, seed=2).tokens(first) != one.tokens(first)


def test_the_cache_stays_within_its_bound_and_changes_nothing() -> None:
    small, large = PromptBuilder(16, cache_bytes=2000), PromptBuilder(16)
    for start in range(0, 300, 7):
        ids = list(range(start, start + 30))
        assert small.tokens_json(request(ids, 480)) == large.tokens_json(request(ids, 480))
        assert small.cache_bytes <= 2000
    assert large.cache_bytes > 2000


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=3, max_size=3), min_size=1, max_size=5))
def test_decimal_rows_print_numbers_as_python_does(rows: list[list[int]]) -> None:
    printed = decimal_rows(np.array(rows, dtype=np.int64))
    assert printed == ["".join(f"{value}," for value in row).encode() for row in rows]


def test_text_prompts_begin_alike_where_ids_do_and_real_text_is_sent_as_it_is() -> None:
    builder = PromptBuilder(16)
    one, two = builder.text(request([1, 2], 32)), builder.text(request([1, 3], 32))
    assert one.split()[:16] == two.split()[:16]
    assert one != two
    real = TraceRequest(chat_id=0, input_length=3, text="Fix the test.")
    body = json.loads(BodyTemplate("m", "text").body(builder, real))
    assert body["prompt"] == "Fix the test."


def test_an_empty_token_range_is_refused() -> None:
    with pytest.raises(ValueError, match="--token-low"):
        PromptBuilder(16, low=10, high=10)
