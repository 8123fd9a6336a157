"""Copies of the shadow index, taken while it changes, and restored."""

from __future__ import annotations

from itertools import islice
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.predict.blocks import hash_token_blocks
from policies.predict.prefix_index import PrefixIndex
from policies.predict.prefix_tree import PrefixRun

TOKENS = 6
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8)
CHANGES = st.lists(st.one_of(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 3)), max_size=8)


def index_of(capacity: int, *prompts: list[int]) -> PrefixIndex:
    index = PrefixIndex(capacity)
    index.add_instance("a")
    for prompt in prompts:
        index.insert("a", hash_token_blocks(prompt, 1))
    return index


def blocks_of(index: PrefixIndex) -> set[int]:
    """All blocks of all prompts of up to 6 tokens that the index holds."""
    held: set[int] = set()
    waiting: list[list[int]] = [[0], [1], [2]]
    while waiting:
        prompt = waiting.pop()
        hashes = hash_token_blocks(prompt, 1)
        if index.match_one("a", hashes) == len(prompt):
            held.add(hashes[-1])
            waiting += [[*prompt, token] for token in range(3)] if len(prompt) < TOKENS else []
    return held


@given(prompts=PROMPTS, capacity=st.integers(1, 20))
def test_a_restored_copy_holds_the_same_and_evicts_in_the_same_order(prompts: list[list[int]], capacity: int) -> None:
    index, again = index_of(capacity, *prompts), index_of(capacity)
    again.restore("a", index.runs("a"))
    assert (again.blocks("a"), again.distinct_blocks) == (index.blocks("a"), index.distinct_blocks)
    for bound in range(capacity, 0, -3):
        for each in (index, again):
            each.add_instance("a", bound)
        assert blocks_of(again) == blocks_of(index)


@given(prompts=PROMPTS, most=st.integers(0, 12))
def test_a_copy_that_is_cut_holds_the_most_recent_prompts(prompts: list[list[int]], most: int) -> None:
    index, again = index_of(1_000, *prompts), index_of(1_000)
    runs = list(index.runs("a"))
    again.restore("a", runs[:most])
    assert blocks_of(again) <= blocks_of(index)
    if prompts and most >= 6:
        assert again.match_one("a", hash_token_blocks(prompts[-1], 1)) == len(prompts[-1])


@given(prompts=PROMPTS, changes=CHANGES, capacity=st.integers(1, 30))
def test_blocks_held_throughout_are_in_a_copy_that_took_a_while(
    prompts: list[list[int]], changes: list[list[int] | int], capacity: int
) -> None:
    index, again = index_of(capacity, *prompts), index_of(1_000)
    always = ever = blocks_of(index)
    last, copy = None, index.runs("a")
    runs = list(islice(copy, 1))
    for change in changes:
        if isinstance(change, list):
            last = index.insert("a", hash_token_blocks(change, 1))
        elif change == 0 and last is not None:
            index.retract(last)
        elif change == 1:
            index.clear_instance("a")
        else:
            runs += islice(copy, change)
        now = blocks_of(index)
        always, ever = always & now, ever | now
    again.restore("a", [*runs, *copy])
    assert always <= blocks_of(again) <= ever


@pytest.mark.parametrize(
    "runs",
    [
        [PrefixRun(-1, b"")],
        [PrefixRun(-1, b"seven b")],
        [PrefixRun(0, bytes(8))],
        [PrefixRun(-2, bytes(8))],
        [PrefixRun(-1, bytes(8)), PrefixRun(2, bytes(8))],
        [PrefixRun(-1, bytes(8)), PrefixRun(-1, bytes(8))],
        [PrefixRun(-1, bytes(8), 0.0)],
        [PrefixRun(-1, bytes(8), nan)],
    ],
)
def test_no_copy_of_a_tree_is_refused_and_leaves_nothing(runs: list[PrefixRun]) -> None:
    index = index_of(10)
    with pytest.raises(ValueError):
        index.restore("a", [PrefixRun(-1, b"12345678"), *runs] if runs[0][0] == -1 else runs)
    assert index.blocks("a") == index.distinct_blocks == 0
    index.insert("a", [1, 2, 3])
    assert index.match_one("a", [1, 2, 3]) == 3
