"""Segments and the caches over them, against the same thing done block by block."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.report.segments import InfiniteCache, LruCache, Segments

Prompt = list[int]


def chained(words: list[str]) -> list[Prompt]:
    """Prompts of one block per letter; an id stands for its letter and all before it."""
    ids: dict[str, int] = {}
    return [[ids.setdefault(word[: end + 1], 10_000 + len(ids)) for end in range(len(word))] for word in words]


PROMPTS = st.lists(st.text("ab", max_size=7), min_size=1, max_size=14).map(chained)
LOOSE = st.lists(st.lists(st.integers(0, 5), max_size=6, unique=True), min_size=1, max_size=10)
"""Ids that are not chained: a block may follow different ones."""


class Blocks:
    """The LRU model block by block: a request's blocks are touched last one first, the least recent ones go."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held_blocks: OrderedDict[int, None] = OrderedDict()

    def held(self, prompt: Prompt) -> int:
        return next((place for place, block in enumerate(prompt) if block not in self.held_blocks), len(prompt))

    def add(self, prompt: Prompt) -> None:
        for block in reversed(prompt):
            self.held_blocks.pop(block, None)
            self.held_blocks[block] = None
        while len(self.held_blocks) > self.capacity:
            self.held_blocks.popitem(last=False)


@given(PROMPTS, st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_an_lru_cache_of_segments_holds_what_one_of_blocks_holds(prompts: list[Prompt], capacity: int) -> None:
    segments = Segments(prompts)
    cache, model = LruCache(segments.blocks, capacity), Blocks(capacity)
    for prompt, path in zip(prompts, segments.paths, strict=True):
        assert cache.held(path) == model.held(prompt)
        cache.add(path)
        model.add(prompt)
        assert cache.used_blocks == len(model.held_blocks) <= capacity


@given(PROMPTS | LOOSE)
@settings(max_examples=100, deadline=None)
def test_an_infinite_cache_of_segments_holds_every_block_seen(prompts: list[Prompt]) -> None:
    segments = Segments(prompts)
    cache, seen = InfiniteCache(segments.blocks), set[int]()
    for prompt, path in zip(prompts, segments.paths, strict=True):
        assert sum(segments.blocks[segment] for segment in path) == len(prompt)
        assert cache.held(path) == next((p for p, block in enumerate(prompt) if block not in seen), len(prompt))
        cache.add(path)
        seen.update(prompt)


def test_prompts_that_never_part_are_one_segment() -> None:
    segments = Segments(chained(["abcdefgh", "abcdefgh", "abcd", "x"]))
    assert segments.paths[0] == segments.paths[1]
    assert sorted(segments.blocks) == [1, 4, 4]
    assert [len(path) for path in segments.paths] == [2, 2, 1, 1]


def test_ids_of_64_bits_and_negative_ones_are_taken() -> None:
    segments = Segments([[2**64 - 1, 7], [2**64 - 1, 8], [-3, 9]])
    assert [len(path) for path in segments.paths] == [2, 2, 1]


def test_no_prompts_and_empty_ones() -> None:
    assert Segments([]).paths == []
    assert Segments([[], []]).paths == [[], []]
