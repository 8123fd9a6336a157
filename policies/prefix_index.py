"""Which instance holds which prefix blocks: chained hash -> set of holders, LRU-bounded per instance.

The index is the router's *shadow* of the engines' prefix caches: blocks are entered when a request is routed and leave
by the engine's own rule (least recently used, tail of a chain before its head), so with the engine's capacity as the
bound it forgets about when the engine does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby


class PrefixIndex:
    """Chained block hashes to holders.

    Complexity for a prompt of b blocks and n instances: ``match`` O(b + n) with two C-level operations per block;
    ``insert`` O(b). Memory: see ``docs/policies.md`` (measured by ``bench/prefix_index.py``).
    """

    def __init__(self, capacity_blocks: int = 1_000_000) -> None:
        """``capacity_blocks`` bounds each instance unless ``add_instance`` names another bound."""
        _check_capacity(capacity_blocks)
        self._default_capacity = capacity_blocks
        self._holders: dict[int, int] = {}
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._lru: dict[str, OrderedDict[int, None]] = {}
        self._capacity: dict[str, int] = {}

    def add_instance(self, instance: str, capacity_blocks: int | None = None) -> None:
        """Make room for an instance; a known one keeps its blocks and takes the new bound."""
        capacity = self._default_capacity if capacity_blocks is None else capacity_blocks
        _check_capacity(capacity)
        if instance not in self._slots:
            slot = 0
            while slot in self._names:
                slot += 1
            self._slots[instance] = slot
            self._names[slot] = instance
            self._lru[instance] = OrderedDict()
        self._capacity[instance] = capacity
        self._evict(instance)

    def remove_instance(self, instance: str) -> None:
        """Forget an instance and all its blocks; unknown names are ignored."""
        if instance not in self._slots:
            return
        self.clear_instance(instance)
        del self._names[self._slots.pop(instance)]
        del self._lru[instance], self._capacity[instance]

    def clear_instance(self, instance: str) -> None:
        """Drop the blocks of an instance that restarted; it stays known."""
        lru = self._lru[instance]
        bit = 1 << self._slots[instance]
        for block in lru:
            self._drop_holder(block, bit)
        lru.clear()

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Longest held prefix of every instance, in blocks: one walk over ``hashes`` for all of them."""
        matched = dict.fromkeys(self._slots, 0)
        alive = sum(1 << slot for slot in self._names)
        depth = 0
        for holders, run in groupby(map(self._holders.get, hashes)):
            still = alive & holders if holders else 0
            if still != alive:
                self._record(matched, alive & ~still, depth)
                alive = still
            if not alive:
                return matched
            depth += len(list(run))
        self._record(matched, alive, depth)
        return matched

    def match_one(self, instance: str, hashes: Sequence[int]) -> int:
        """Longest prefix held by one instance, in blocks."""
        lru = self._lru[instance]
        for depth, block in enumerate(hashes):
            if block not in lru:
                return depth
        return len(hashes)

    def insert(self, instance: str, hashes: Sequence[int]) -> int:
        """Enter a prompt's blocks as most recently used on ``instance``; returns how many were new there.

        Blocks are touched from the tail to the head, so that a tail is always evicted before its head.
        """
        lru = self._lru[instance]
        holders = self._holders
        bit = 1 << self._slots[instance]
        before = len(lru)
        move_to_end = lru.move_to_end
        for block in reversed(hashes):
            if block in lru:
                move_to_end(block)
            else:
                lru[block] = None
                holders[block] = holders.get(block, 0) | bit
        new = len(lru) - before
        self._evict(instance)
        return new

    def forget(self, instance: str, hashes: Sequence[int]) -> None:
        """Take blocks out of one instance, such as those of a request that never reached it."""
        lru = self._lru.get(instance)
        if lru is None:
            return
        bit = 1 << self._slots[instance]
        for block in hashes:
            if block in lru:
                del lru[block]
                self._drop_holder(block, bit)

    def blocks(self, instance: str) -> int:
        """Blocks held for one instance."""
        return len(self._lru[instance])

    def capacity(self, instance: str) -> int:
        """Bound of one instance, in blocks."""
        return self._capacity[instance]

    @property
    def distinct_blocks(self) -> int:
        """Distinct blocks over all instances."""
        return len(self._holders)

    def _evict(self, instance: str) -> None:
        lru = self._lru[instance]
        capacity = self._capacity[instance]
        if len(lru) <= capacity:
            return
        bit = 1 << self._slots[instance]
        while len(lru) > capacity:
            block, _ = lru.popitem(last=False)
            self._drop_holder(block, bit)

    def _drop_holder(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]

    def _record(self, matched: dict[str, int], slots: int, depth: int) -> None:
        if not depth:
            return
        while slots:
            low = slots & -slots
            matched[self._names[low.bit_length() - 1]] = depth
            slots ^= low


def _check_capacity(capacity_blocks: int) -> None:
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
