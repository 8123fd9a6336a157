"""Which instance holds which prefix blocks: chained hash -> set of holders, LRU-bounded per instance.

The index is the router's *shadow* of the engines' prefix caches: blocks are entered when a request is routed and leave
by the engine's own rule (least recently used, tail of a chain before its head), so with the engine's capacity as the
bound it forgets about when the engine does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Insertion(NamedTuple):
    """What one ``insert`` entered."""

    instance: str
    new_blocks: tuple[int, ...]
    """Blocks the instance did not hold before."""
    serial: int
    """Number of the insertion; a block carries that of the last one that touched it."""


class PrefixIndex:
    """Chained block hashes to holders.

    Invariant: an instance that holds a block holds every block before it in the chain. ``insert`` enters whole
    prefixes, eviction takes tails first, and ``retract`` leaves what others touched.

    Complexity for a prompt of b blocks and n instances: ``match`` O(n log b) look-ups,
    ``insert`` O(b). Memory: see ``docs/policies.md`` (measured by ``bench/prefix_index.py``).
    """

    def __init__(self, capacity_blocks: int = 1_000_000) -> None:
        """``capacity_blocks`` bounds each instance unless ``add_instance`` names another bound."""
        _check_capacity(capacity_blocks)
        self._default_capacity = capacity_blocks
        self._holders: dict[int, int] = {}
        self._everyone = 0
        self._serial = 0
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._lru: dict[str, OrderedDict[int, int]] = {}
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
            self._everyone |= 1 << slot
            self._lru[instance] = OrderedDict()
        self._capacity[instance] = capacity
        self._evict(instance)

    def remove_instance(self, instance: str) -> None:
        """Forget an instance and all its blocks; unknown names are ignored."""
        if instance not in self._slots:
            return
        self.clear_instance(instance)
        slot = self._slots.pop(instance)
        self._everyone &= ~(1 << slot)
        del self._names[slot]
        del self._lru[instance], self._capacity[instance]

    def clear_instance(self, instance: str) -> None:
        """Drop the blocks of an instance that restarted; it stays known."""
        lru = self._lru[instance]
        bit = 1 << self._slots[instance]
        for block in lru:
            self._drop_holder(block, bit)
        lru.clear()

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Longest held prefix of every instance, in blocks: one descent over ``hashes`` for all of them.

        Who holds a block holds all before it, so the holders only get fewer with depth and every change among them is
        found by bisection.
        """
        everyone = self._everyone
        full = len(hashes)
        depths = dict.fromkeys(self._slots, 0)
        holders = self._holders.get
        last = holders(hashes[-1], 0) if full else everyone
        self._record(depths, last, full)
        spans = [(0, everyone, full, last)]
        while spans:
            low, at_low, high, at_high = spans.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                self._record(depths, at_low & ~at_high, low)
                continue
            middle = (low + high) // 2
            at_middle = holders(hashes[middle - 1], 0)
            spans.append((low, at_low, middle, at_middle))
            spans.append((middle, at_middle, high, at_high))
        return depths

    def match_one(self, instance: str, hashes: Sequence[int]) -> int:
        """Longest prefix held by one instance, in blocks."""
        lru = self._lru[instance]
        return bisect_left(hashes, True, key=lambda block: block not in lru)

    def insert(self, instance: str, hashes: Sequence[int]) -> Insertion:
        """Enter a prompt's blocks as most recently used on ``instance``.

        Blocks are touched from the tail to the head, so that a tail is always evicted before its head.
        """
        self._serial += 1
        serial = self._serial
        lru = self._lru[instance]
        holders = self._holders
        bit = 1 << self._slots[instance]
        held = self.match_one(instance, hashes)
        new = tuple(hashes[held:])
        for block in reversed(new):
            lru[block] = serial
            holders[block] = holders.get(block, 0) | bit
        move_to_end = lru.move_to_end
        for block in reversed(hashes[:held]):
            move_to_end(block)
            lru[block] = serial
        self._evict(instance)
        return Insertion(instance, new, serial)

    def retract(self, insertion: Insertion) -> None:
        """Take back what an insertion entered, for a request that never ran there.

        Blocks that another request has touched since stay: that request computes them. So no gap can open in a chain.
        """
        lru = self._lru.get(insertion.instance)
        if lru is None:
            return
        bit = 1 << self._slots[insertion.instance]
        for block in insertion.new_blocks:
            if lru.get(block) == insertion.serial:
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
        while slots:
            low = slots & -slots
            matched[self._names[low.bit_length() - 1]] = depth
            slots ^= low


def _check_capacity(capacity_blocks: int) -> None:
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
