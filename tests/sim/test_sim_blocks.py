"""The block pool: lookups, the order of eviction, duplicates."""

from __future__ import annotations

import pytest

from sim.core.blocks import BlockPool


def test_match_finds_the_longest_cached_prefix_only() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.publish(blocks, [11, 12, 13])
    assert pool.match([11, 12, 13, 14]) == blocks
    assert pool.match([11, 99, 13]) == blocks[:1]
    assert pool.match([99, 12]) == []


def test_released_blocks_stay_cached_until_reused_and_the_tail_goes_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.publish(blocks, [1, 2, 3, 4])
    pool.release(blocks)
    assert pool.free_blocks == 4
    assert len(pool.match([1, 2, 3, 4])) == 4
    pool.allocate(1)
    assert len(pool.match([1, 2, 3, 4])) == 3
    pool.allocate(2)
    assert len(pool.match([1, 2, 3, 4])) == 1
    assert pool.evictions == 3


def test_requests_are_evicted_in_the_order_they_were_released() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.publish(first, [1, 2])
    pool.publish(second, [3, 4])
    pool.release(second)
    pool.release(first)
    pool.allocate(2)
    assert pool.match([3, 4]) == []
    assert pool.match([1, 2]) == first


def test_a_hit_takes_idle_blocks_out_of_the_queue_and_back_to_its_end() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.publish(first, [1, 2])
    pool.publish(second, [3, 4])
    pool.release(first)
    pool.release(second)
    assert pool.idle(first) == 2
    pool.acquire(first)
    assert pool.free_blocks == 2
    pool.release(first)
    pool.allocate(2)
    assert pool.match([3, 4]) == []
    assert pool.match([1, 2]) == first


def test_shared_blocks_are_free_only_after_the_last_release() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.free_blocks == 1
    pool.release(blocks)
    assert pool.free_blocks == 2


def test_a_duplicate_takes_over_when_the_first_copy_is_evicted() -> None:
    pool = BlockPool(3)
    first, copy = pool.allocate(1), pool.allocate(1)
    pool.publish(first, [7])
    pool.publish(copy, [7])
    assert pool.match([7]) == first
    assert pool.cached_blocks == 1
    pool.release(first)
    pool.release(copy)
    pool.allocate(2)  # the block never used, then the first copy
    assert pool.match([7]) == copy
    pool.allocate(1)
    assert pool.match([7]) == []


def test_allocating_too_much_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(MemoryError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    assert pool.free_blocks == 2


def test_reset_works_only_while_no_block_is_in_use() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.publish(blocks, [1])
    assert not pool.reset_cache()
    assert pool.match([1]) == blocks
    pool.release(blocks)
    assert pool.reset_cache()
    assert pool.match([1]) == []


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
