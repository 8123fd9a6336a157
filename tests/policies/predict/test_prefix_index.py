"""The prefix index by example: holders, bounds, slots and the work of one match."""

from __future__ import annotations

from typing import Any

import pytest

from policies.predict.blocks import hash_token_blocks
from policies.predict.prefix_index import PrefixIndex


def chain(*ids: int) -> list[int]:
    return hash_token_blocks(ids, 1)


def index_of(*names: str, capacity: int = 1_000) -> PrefixIndex:
    index = PrefixIndex(capacity)
    for name in names:
        index.add_instance(name)
    return index


def test_match_reports_every_instance_its_own_longest_prefix() -> None:
    index = index_of("a", "b", "c")
    index.insert("a", chain(1, 2, 3, 4))
    index.insert("b", chain(1, 2))
    assert index.match(chain(1, 2, 3, 9)) == {"a": 3, "b": 2, "c": 0}
    assert index.match(chain(8)) == {"a": 0, "b": 0, "c": 0}
    assert index.match([]) == {"a": 0, "b": 0, "c": 0}
    assert PrefixIndex().match(chain(1)) == {}


def test_retracting_removes_only_new_blocks_that_no_other_request_used() -> None:
    index = index_of("a")
    index.insert("a", chain(1))
    never_ran = index.insert("a", chain(1, 2, 3, 4))
    index.insert("a", chain(1, 2, 9))
    index.retract(never_ran)
    assert index.match(chain(1, 2, 3, 4)) == {"a": 2}
    assert index.match_one("a", chain(1, 2, 9)) == 3
    index.retract(never_ran)
    assert index.blocks("a") == 3


def test_insert_counts_only_what_was_new() -> None:
    index = index_of("a")
    assert index.insert("a", chain(1, 2, 3)).held == 0
    assert index.insert("a", chain(1, 2, 3, 4)).held == 3
    assert index.blocks("a") == index.distinct_blocks == 4


def test_the_tail_is_evicted_before_the_head() -> None:
    index = index_of("a", capacity=4)
    index.insert("a", chain(1, 2, 3, 4))
    index.insert("a", chain(9))
    assert index.match_one("a", chain(1, 2, 3, 4)) == 3
    index.insert("a", chain(9, 10))
    assert index.match_one("a", chain(1, 2, 3, 4)) == 2
    assert index.match_one("a", chain(9, 10)) == 2


def test_a_prompt_longer_than_the_bound_keeps_its_head() -> None:
    index = index_of("a", capacity=3)
    index.insert("a", chain(*range(10)))
    assert index.blocks("a") == 3
    assert index.match_one("a", chain(*range(10))) == 3


def test_the_least_recently_used_chain_goes_first_and_use_refreshes() -> None:
    index = index_of("a", capacity=4)
    index.insert("a", chain(1, 2))
    index.insert("a", chain(5, 6))
    index.insert("a", chain(1, 2))
    index.insert("a", chain(8, 9))
    assert [index.match_one("a", chain(*ids)) for ids in [(1, 2), (5, 6), (8, 9)]] == [2, 0, 2]


def test_a_smaller_bound_evicts_at_once_and_keeps_the_rest() -> None:
    index = index_of("a")
    index.insert("a", chain(1, 2, 3, 4))
    index.add_instance("a", 2)
    assert (index.blocks("a"), index.capacity("a"), index.match_one("a", chain(1, 2, 3, 4))) == (2, 2, 2)
    assert index.distinct_blocks == 2


def test_an_instance_that_leaves_is_no_holder_any_more() -> None:
    index = index_of("a", "b")
    gone = index.insert("a", chain(1, 2))
    index.insert("b", chain(1))
    index.remove_instance("a")
    assert index.match(chain(1, 2)) == {"b": 1}
    assert index.distinct_blocks == 1
    index.remove_instance("a")
    index.retract(gone)
    assert index.match(chain(1)) == {"b": 1}


def test_a_newcomer_on_a_reused_slot_inherits_nothing() -> None:
    index = index_of("a", "b")
    index.insert("a", chain(1, 2))
    index.remove_instance("a")
    index.add_instance("c")
    assert index.match(chain(1, 2)) == {"b": 0, "c": 0}


def test_an_instance_that_leaves_leaves_nothing_behind_however_often_a_fleet_changes() -> None:
    index = index_of("keeper")
    for turn in range(200):
        index.add_instance(f"i{turn}")
        index.insert(f"i{turn}", chain(1))
        index.remove_instance(f"i{turn}")
    assert index.match(chain(1)) == {"keeper": 0}
    assert index.distinct_blocks == 0


def test_a_continued_conversation_and_a_branch_of_it_both_keep_their_prefixes() -> None:
    index = index_of("a")
    index.insert("a", chain(1, 2, 3, 4, 5))
    index.insert("a", chain(1, 2, 3, 4, 5, 6, 7))
    index.insert("a", chain(1, 2, 9, 8))
    depths = [
        index.match_one("a", chain(*ids)) for ids in [(1, 2, 3, 4, 5, 6, 7, 0), (1, 2, 9, 8), (1, 2, 3, 9), (1, 3)]
    ]
    assert depths == [7, 4, 3, 1]
    assert index.blocks("a") == 9


def test_distinct_blocks_counts_what_several_instances_hold_once() -> None:
    index = index_of("a", "b", "c")
    index.insert("a", chain(1, 2, 3, 4))
    index.insert("b", chain(1, 2, 3))
    index.insert("b", chain(1, 2, 7))
    index.insert("c", chain(1, 2, 7, 8))
    index.insert("c", chain(5))
    assert index.distinct_blocks == 4 + 2 + 1
    index.clear_instance("c")
    assert index.distinct_blocks == 5


def test_a_restarted_instance_is_empty_and_still_known() -> None:
    index = index_of("a", "b")
    index.insert("a", chain(1, 2))
    index.insert("b", chain(1, 2))
    index.clear_instance("a")
    assert index.match(chain(1, 2)) == {"a": 0, "b": 2}
    assert index.insert("a", chain(1)).held == 0


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_bound_below_one_block_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_blocks must be at least 1, got {capacity}"):
        PrefixIndex(capacity)
    with pytest.raises(ValueError, match=f"capacity_blocks must be at least 1, got {capacity}"):
        PrefixIndex().add_instance("a", capacity)


class _CountingHashes(list[int]):
    """Counts the elements read of a prompt: a machine-independent measure of a match's work."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("instances", [1, 8, 64])
def test_a_match_reads_logarithmically_many_blocks_per_instance(instances: int) -> None:
    index = index_of(*(f"i{n}" for n in range(instances)), capacity=10_000)
    blocks = chain(*range(1_375))
    for n in range(instances):
        index.insert(f"i{n}", blocks[: 1_375 - 20 * n])
        index.insert(f"i{n}", [*blocks[:700], *chain(5_000 + n, 1, 2, 3)])
    prompt = _CountingHashes(blocks[:1_374])
    assert max(index.match(prompt).values()) == 1_374
    assert prompt.reads <= instances * 16


def test_a_match_of_an_unknown_prompt_reads_its_first_block_only() -> None:
    index = index_of("a", "b")
    index.insert("a", chain(1, 2))
    prompt = _CountingHashes(chain(*range(100, 1_124)))
    index.match(prompt)
    assert prompt.reads == 1


def test_entering_a_prompt_again_reads_no_block_twice_and_few_of_them() -> None:
    index = index_of("a", capacity=10_000)
    blocks = chain(*range(8_000))
    index.insert("a", blocks)
    prompt = _CountingHashes(blocks)
    index.insert("a", prompt)
    assert prompt.reads <= 4


def test_blocks_of_text_fill_the_pool_by_their_tokens() -> None:
    """A pool of 100 blocks of 16 tokens holds six prompts of a text block of 256 tokens each."""
    index = PrefixIndex(1_000)
    index.add_instance("a", 100, 16)
    for number in range(10):
        index.insert("a", [number], 256.0)
    assert [index.match_one("a", [number]) for number in range(10)] == [0] * 4 + [1] * 6
    assert index.blocks("a") == 96
    index.insert("a", [9], 280.0)
    assert index.blocks("a") == 98, "the estimate of its tokens has changed"
    index.insert("a", list(range(100, 160)), 16.0)
    assert [index.match_one("a", [number]) for number in range(4, 10)] == [0, 0, 0, 0, 1, 1]


def test_weights_come_back_with_a_copy() -> None:
    index, again = PrefixIndex(100), PrefixIndex(100)
    for each in (index, again):
        each.add_instance("a", block_tokens=16)
    index.insert("a", [1, 2, 3], 260.0)
    index.insert("a", [1, 9], 16.0)
    again.restore("a", index.runs("a"))
    assert again.blocks("a") == index.blocks("a") == 34
