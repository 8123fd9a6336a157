"""The exact index: blocks as engines report them, found by the hashes of prompts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.predict.blocks import hash_token_blocks
from policies.predict.exact_index import PLAIN_ROOT, EngineHash, ExactIndex, StoredBlocks

SIZE = 4


def hashes_of(ids: list[int]) -> list[int]:
    return hash_token_blocks(ids, SIZE, PLAIN_ROOT)


def stored(ids: list[int], names: list[EngineHash], parent: EngineHash | None = None, plain: int = 99) -> StoredBlocks:
    return StoredBlocks(names, parent, ids, SIZE, plain)


def index_of(*names: str, trusted: bool = True) -> ExactIndex:
    index = ExactIndex(SIZE)
    for name in names:
        index.add_instance(name)
        index.follow(name)
        if trusted:
            index.reset(name)
    return index


def test_a_prompt_matches_what_was_stored_in_one_event_or_in_several() -> None:
    index, ids = index_of("a", "b", "c"), list(range(20))
    index.store("a", stored(ids[:16], [b"1", b"2", b"3", b"4"]))
    index.store("b", stored(ids[:8], [1, 2]))
    index.store("b", stored(ids[8:12], [3], parent=2))
    assert index.match(hashes_of(ids)) == {"a": 4, "b": 3, "c": 0}
    assert index.match([]) == {"a": 0, "b": 0, "c": 0}
    assert (index.blocks("a"), index.blocks("b"), index.distinct_blocks) == (4, 3, 4)
    assert index.holds("a", hashes_of(ids)[3])
    assert not index.holds("b", hashes_of(ids)[3])


def test_a_match_ends_at_the_first_missing_block() -> None:
    index, ids = index_of("a"), list(range(16))
    index.store("a", stored(ids, [1, 2, 3, 4]))
    index.remove("a", [2])
    assert index.match(hashes_of(ids)) == {"a": 1}
    assert index.blocks("a") == 3


def test_a_block_computed_twice_is_held_until_its_last_copy_goes() -> None:
    index, ids = index_of("a"), list(range(8))
    for _ in range(3):
        index.store("a", stored(ids, [1, 2]))
    for left in (2, 2, 0):
        index.remove("a", [1, 2])
        assert index.match(hashes_of(ids)) == {"a": left}
    assert index.counters("a").unknown_removed == 0
    index.remove("a", [1])
    assert index.counters("a").unknown_removed == 1


def test_children_of_blocks_with_extra_keys_match_nothing_but_come_and_go_like_others() -> None:
    index, ids = index_of("a"), list(range(16))
    index.store("a", stored(ids[:8], [1, 2], plain=1))
    index.store("a", stored(ids[8:], [3, 4], parent=2))
    assert index.match(hashes_of(ids)) == {"a": 1}
    assert (index.blocks("a"), index.counters("a").foreign, index.trusted("a")) == (4, 3, True)
    index.remove("a", [4, 3, 2, 1])
    assert (index.blocks("a"), index.distinct_blocks, index.counters("a").unknown_removed) == (0, 0, 0)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        (StoredBlocks([7], 99, [1, 2, 3, 4], SIZE, 1), "unknown_parent"),
        (StoredBlocks([7], None, list(range(8)), 8, 1), "block_size"),
    ],
)
def test_what_cannot_be_placed_ends_the_trust(blocks: StoredBlocks, reason: str) -> None:
    index, ids = index_of("a", "b"), list(range(8))
    for name in ("a", "b"):
        index.store(name, stored(ids, [1, 2]))
    index.store("a", blocks)
    assert (index.trusted("a"), index.reason("a"), index.blocks("a")) == (False, reason, 0)
    assert index.match(hashes_of(ids)) == {"a": 0, "b": 2}
    assert index.trusted_instances() == {"b"}


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 2, 3, -1], [1, 2, 3, 2**32]])
def test_token_ids_that_make_no_sense_are_refused(ids: list[int]) -> None:
    index = index_of("a")
    with pytest.raises(ValueError, match="token ids"):
        index.store("a", StoredBlocks([1], None, ids, SIZE, 1))
    assert index.blocks("a") == 0


def test_an_instance_that_is_not_trusted_takes_nothing_until_it_is_empty_again() -> None:
    index, ids = index_of("a", trusted=False), list(range(8))
    index.store("a", stored(ids, [1, 2]))
    index.remove("a", [1])
    assert (index.blocks("a"), index.trusted("a"), index.reason("a")) == (0, False, "waiting_for_events")
    index.clear("a")
    index.store("a", stored(ids, [1, 2]))
    assert (index.match(hashes_of(ids)), index.reason("a")) == ({"a": 2}, "")
    index.distrust("a", "missed_events")
    assert (index.match(hashes_of(ids)), index.distinct_blocks) == ({"a": 0}, 0)


def test_while_events_are_fetched_they_are_entered_but_not_trusted() -> None:
    index, ids = index_of("a"), list(range(8))
    index.suspend("a")
    index.store("a", stored(ids, [1, 2]))
    assert (index.trusted("a"), index.reason("a")) == (False, "replaying")
    index.resume("a")
    assert index.trusted("a")
    assert index.match(hashes_of(ids)) == {"a": 2}


def test_a_restart_seen_by_the_probe_waits_for_the_new_events() -> None:
    index, ids = index_of("a"), list(range(8))
    index.store("a", stored(ids, [1, 2]))
    index.restarted("a")
    assert (index.trusted("a"), index.blocks("a"), index.epoch("a")) == (False, 0, 1)


def test_a_restart_reported_by_events_first_keeps_later_events() -> None:
    index, ids = index_of("a"), list(range(8))
    index.store("a", stored(ids, [1, 2]))
    index.events_restarted("a")
    index.store("a", stored(ids[:4], [5]))
    index.restarted("a")
    assert (index.trusted("a"), index.match(hashes_of(ids)), index.epoch("a")) == (True, {"a": 1}, 0)
    index.restarted("a")  # the next one counts
    assert (index.trusted("a"), index.blocks("a"), index.epoch("a")) == (False, 0, 1)


def test_a_restart_of_an_instance_without_events_has_no_effect() -> None:
    index = ExactIndex(SIZE)
    index.add_instance("a")
    index.restarted("a")
    assert (index.trusted("a"), index.reason("a"), index.follows("a"), index.follows("x")) == (
        False,
        "no_events",
        False,
        False,
    )


def test_another_block_size_ends_the_trust_of_those_that_hold_something() -> None:
    index = index_of("a", "b")
    index.store("a", stored(list(range(8)), [1, 2]))
    index.set_block_tokens(SIZE)
    assert index.trusted("a")
    index.set_block_tokens(8)
    assert (index.trusted("a"), index.trusted("b")) == (False, True)


def test_an_instance_that_leaves_takes_its_blocks_along_and_its_place_is_free_again() -> None:
    index, ids = index_of("a", "b"), list(range(8))
    for name in ("a", "b"):
        index.store(name, stored(ids, [1, 2]))
    index.remove_instance("a")
    index.remove_instance("a")
    assert index.match(hashes_of(ids)) == {"b": 2}
    index.add_instance("c")
    index.reset("c")
    assert index.match(hashes_of(ids)) == {"b": 2, "c": 0}


@given(
    events=st.lists(st.tuples(st.sampled_from(["store", "store", "remove"]), st.integers(0, 4)), max_size=40),
    joined=st.integers(0, 40),
)
def test_whoever_joins_late_never_believes_in_a_block_that_is_gone(events: list[tuple[str, int]], joined: int) -> None:
    # Block n of one chain continues block n - 1; the engine counts copies.
    index, held = ExactIndex(SIZE), Counter[int]()
    index.add_instance("a")
    for number, (kind, block) in enumerate(events):
        if number == joined:
            index.reset_partial("a")
        if kind == "store":
            held[block] += 1
            parent = block - 1 if block else None
            index.store("a", StoredBlocks([block], parent, range(block * SIZE, (block + 1) * SIZE), SIZE, 1))
        elif held[block]:
            held[block] -= 1
            index.remove("a", [block])
        hashes = hashes_of(list(range(5 * SIZE)))
        assert all(held[block] for block in range(5) if index.holds("a", hashes[block]))
        assert index.trusted("a") == (number >= joined)
