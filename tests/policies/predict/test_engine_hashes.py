"""Engines with one hash seed are recognised by their own hashes of equal blocks."""

from __future__ import annotations

from policies.predict.engine_hashes import EngineHashes
from policies.predict.exact_index import ExactIndex, StoredBlocks


def test_engines_that_agree_on_a_block_are_one_group() -> None:
    hashes = EngineHashes()
    for instance in "abc":
        hashes.note(instance, 1, 100)
    assert hashes.groups() == [{"a", "b", "c"}]
    assert hashes.agreed


def test_an_engine_that_differs_is_in_a_group_of_its_own() -> None:
    hashes = EngineHashes()
    for instance, engine_hash in (("a", 100), ("c", 100), ("b", 7)):
        hashes.note(instance, 1, engine_hash)
    assert hashes.groups() == [{"a", "c"}, {"b"}]


def test_groups_join_over_several_blocks() -> None:
    hashes = EngineHashes()
    for instance, block in (("a", 1), ("b", 1), ("b", 2), ("c", 2)):
        hashes.note(instance, block, block * 10)
    assert hashes.groups() == [{"a", "b", "c"}]


def test_blocks_of_one_engine_say_nothing() -> None:
    hashes = EngineHashes()
    hashes.note("a", 1, 10)
    hashes.note("b", 2, 20)
    assert (hashes.groups(), hashes.agreed) == ([], False)


def test_random_seeds_never_agree() -> None:
    hashes = EngineHashes()
    hashes.note("a", 1, b"x" * 32)
    hashes.note("b", 1, b"y" * 32)
    assert hashes.groups() == [{"a"}, {"b"}]
    assert not hashes.agreed


def test_an_engine_that_restarts_is_judged_by_its_new_hashes_only() -> None:
    hashes = EngineHashes()
    hashes.note("a", 1, 10)
    hashes.note("b", 1, 10)
    hashes.forget("b")
    assert hashes.groups() == []
    hashes.note("b", 1, 99)
    assert hashes.groups() == [{"a"}, {"b"}]
    assert hashes.agreed


def test_memory_is_bounded_and_shared_blocks_outlive_others() -> None:
    hashes = EngineHashes()
    hashes.note("a", 0, 5)
    hashes.note("b", 0, 6)
    for block in range(1, 10_000):
        hashes.note("a", block, block)
    assert len(hashes._single) == 4_096
    assert hashes.groups() == [{"a"}, {"b"}]


def test_the_exact_index_compares_first_blocks() -> None:
    index = ExactIndex(block_tokens=4)
    for instance, own in (("a", [11, 12]), ("b", [21, 22])):
        index.add_instance(instance)
        index.reset(instance)
        index.store(instance, StoredBlocks(own, None, list(range(8)), 4, 2))
    assert index.engine_hashes.groups() == [{"a"}, {"b"}]
    index.distrust("b", "missed_events")
    assert index.engine_hashes.groups() == []
