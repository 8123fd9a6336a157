"""The block pool: lookups, the order of eviction, duplicates."""

from __future__ import annotations

import pytest

from sim.core.blocks import BlockPool, Holding


class KeyListPool(BlockPool):
    """A pool whose calls take whole key lists, as consecutive requests make them."""

    def take(self, *keys: int, count: int | None = None) -> Holding:
        """Allocate a block per key (or ``count``) and publish them."""
        holding = Holding()
        self.allocate(holding, len(keys) if count is None else count)
        if keys and not self.publish(holding, list(keys), False):
            self.publish_copies(holding, list(keys), 0, len(keys), False)
        return holding

    def hits(self, *keys: int) -> int:
        return self.match(list(keys), len(keys)).blocks

    def hit(self, *keys: int) -> Holding:
        return self.acquire(self.match(list(keys), len(keys)))


def test_match_finds_the_longest_cached_prefix_only() -> None:
    pool = KeyListPool(8)
    pool.take(11, 12, 13)
    assert pool.hits(11, 12, 13, 14) == 3
    assert pool.hits(11, 99, 98) == 1
    assert pool.hits(99, 98) == 0
    assert pool.match([11, 12, 13], 2).blocks == 2


def test_released_blocks_stay_cached_until_reused_and_the_tail_goes_first() -> None:
    pool = KeyListPool(4)
    pool.release(pool.take(1, 2, 3, 4))
    assert pool.free_blocks == 4
    assert pool.hits(1, 2, 3, 4) == 4
    pool.take(count=1)
    assert pool.hits(1, 2, 3, 4) == 3
    pool.take(count=2)
    assert pool.hits(1, 2, 3, 4) == 1
    assert pool.evictions == 3


def test_requests_are_evicted_in_the_order_they_were_released() -> None:
    pool = KeyListPool(4)
    first, second = pool.take(1, 2), pool.take(3, 4)
    pool.release(second)
    pool.release(first)
    pool.take(count=2)
    assert pool.hits(3, 4) == 0
    assert pool.hits(1, 2) == 2


def test_a_hit_takes_idle_blocks_out_of_the_queue_and_back_to_its_end() -> None:
    pool = KeyListPool(4)
    first, second = pool.take(1, 2), pool.take(3, 4)
    pool.release(first)
    pool.release(second)
    assert pool.match([1, 2], 2).idle == 2
    first = pool.hit(1, 2)
    assert pool.free_blocks == 2
    pool.release(first)
    pool.take(count=2)
    assert pool.hits(3, 4) == 0
    assert pool.hits(1, 2) == 2


def test_a_hit_in_part_leaves_the_rest_where_it_was_in_the_queue() -> None:
    pool = KeyListPool(6)
    pool.release(pool.take(1, 2, 3, 4))
    pool.release(pool.hit(1, 2))
    assert pool.reuse_order() == [None, None, 4, 3, 2, 1]
    part = pool.hit(1, 2, 3)
    assert pool.reuse_order() == [None, None, 4]
    other = pool.hit(1)
    pool.release(part)
    assert pool.reuse_order() == [None, None, 4, 3, 2]
    assert pool.free_blocks == 5
    pool.release(other)
    assert pool.reuse_order() == [None, None, 4, 3, 2, 1]


def test_prompts_that_part_share_what_they_have_in_common() -> None:
    pool = KeyListPool(8)
    one = pool.take(1, 2, 3, 4)
    other = pool.hit(1, 2)
    pool.allocate(other, 2)
    assert pool.publish(other, [13, 14], False)
    assert (pool.free_blocks, pool.cached_blocks) == (2, 6)
    assert (len(one), len(other)) == (4, 4)
    pool.release(one)
    assert pool.reuse_order() == [None, None, 4, 3]
    pool.release(other)
    assert pool.reuse_order() == [None, None, 4, 3, 14, 13, 2, 1]
    assert (pool.hits(1, 2, 3, 4), pool.hits(1, 2, 13, 14, 15)) == (4, 4)


def test_shared_blocks_are_free_only_after_the_last_release() -> None:
    pool = KeyListPool(2)
    first = pool.take(1)
    second = pool.hit(1)
    pool.release(first)
    assert pool.free_blocks == 1
    pool.release(second)
    assert pool.free_blocks == 2


def test_a_duplicate_takes_over_when_the_first_copy_is_evicted() -> None:
    pool = KeyListPool(3)
    first, copy = pool.take(7), pool.take(7)
    assert pool.match([7], 1).runs[0][0] is first.runs[0][0]
    assert pool.cached_blocks == 1
    pool.release(first)
    pool.release(copy)
    pool.take(count=2)  # the block never used, then the first copy
    assert pool.match([7], 1).runs[0][0] is copy.runs[0][0]
    pool.take(count=1)
    assert pool.hits(7) == 0
    assert pool.evictions == 2


def test_allocating_too_much_takes_nothing() -> None:
    pool = KeyListPool(2)
    with pytest.raises(MemoryError, match="3 blocks requested, 2 free"):
        pool.allocate(Holding(), 3)
    assert pool.free_blocks == 2


def test_reset_works_only_while_no_block_is_in_use() -> None:
    pool = KeyListPool(2)
    blocks = pool.take(1)
    assert not pool.reset_cache()
    assert pool.hits(1) == 1
    pool.release(blocks)
    assert pool.reset_cache()
    assert pool.hits(1) == 0
    assert (pool.cached_blocks, pool.reuse_order()) == (0, [None, None])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
