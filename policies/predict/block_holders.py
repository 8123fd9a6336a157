"""Blocks to holders as bit masks (chained hash -> mask), for holders that may drop a block before its successors.

Lookup by bisection needs the invariant "a holder of a block holds every block before it". Engines evict tails first but
do not guarantee it, so a block that is dropped while its successors stay is kept as a *gap* until they are gone or it
is stored again. Held blocks and gaps together are closed under "the block before"; a prefix ends at its first gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Chains:
    """One holder's chain structure: enough to decide if a dropped block leaves successors behind."""

    ends: set[int] = field(default_factory=set)
    """Held blocks without a held block or gap after them."""
    further: dict[int, int] = field(default_factory=dict)
    """Branch points: number of successors of a block beyond the first."""


class BlockHolders:
    """Bit masks of holders, one bit per holder.

    Complexity for a prompt of b blocks and n holders: ``match`` O(n log b) look-ups; while any holder has a gap, also
    one pass over the prompt through the small set of gaps. ``add`` and ``discard`` O(1) per block, amortised.
    """

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._before: dict[int, int] = {}
        """Block -> its predecessor, for held blocks and gaps. The same for every holder."""
        self._gaps: dict[int, int] = {}
        """Block -> bits of the holders for which it is a gap."""
        self._chains: dict[int, _Chains] = {}
        self._bits = 0
        """All allocated bits."""

    def __len__(self) -> int:
        """Number of distinct blocks with at least one holder."""
        return len(self._masks)

    def new_bit(self) -> int:
        """Allocate the lowest free bit."""
        bit = ~self._bits & (self._bits + 1)
        self._bits |= bit
        self._chains[bit] = _Chains()
        return bit

    def free_bit(self, bit: int) -> None:
        """Release a bit for reuse; its holder must hold nothing."""
        del self._chains[bit]
        self._bits &= ~bit

    def holds(self, block: int, bit: int) -> bool:
        """True if ``bit`` holds the block."""
        return bool(self._masks.get(block, 0) & bit)

    def add(self, blocks: Iterable[tuple[int, int]], bit: int) -> None:
        """Add (block, predecessor) pairs, heads first; each predecessor is already held or a root."""
        masks, before, chains = self._masks, self._before, self._chains[bit]
        ends, further = chains.ends, chains.further
        for block, parent in blocks:
            mask = masks.get(block, 0)
            if mask & bit:
                continue
            masks[block] = mask | bit
            if self._gaps and self._is_gap(block, bit):
                self._close_gap(block, bit)
                continue
            before[block] = parent
            if parent in ends:
                ends.remove(parent)
            elif parent in before:  # not a root
                further[parent] = further.get(parent, 0) + 1
            ends.add(block)

    def discard(self, block: int, bit: int) -> None:
        """Remove the block from the holder ``bit``; no effect if it does not hold it."""
        mask = self._masks.get(block, 0)
        if not mask & bit:
            return
        self._unmask(block, mask & ~bit)
        chains = self._chains[bit]
        if block not in chains.ends:
            self._gaps[block] = self._gaps.get(block, 0) | bit
            return
        chains.ends.remove(block)
        while True:
            # The predecessor has one successor less; a gap without successors is removed as well.
            parent = self._before[block]
            self._forget(block)
            if parent not in self._before:
                return
            if parent in chains.further:
                chains.further[parent] -= 1
                if not chains.further[parent]:
                    del chains.further[parent]
                return
            if not self._is_gap(parent, bit):
                chains.ends.add(parent)
                return
            self._close_gap(parent, bit)
            block = parent

    def clear(self, blocks: Iterable[int], bit: int) -> None:
        """Remove every block of the holder ``bit``; ``blocks`` must list all that it holds."""
        self._chains[bit] = _Chains()
        for block in blocks:
            mask = self._masks.get(block, 0)
            if mask & bit:
                self._unmask(block, mask & ~bit)
                self._forget(block)
        for block in [block for block, bits in self._gaps.items() if bits & bit]:
            self._close_gap(block, bit)
            self._forget(block)

    def match(self, hashes: Sequence[int], holders: Mapping[str, int]) -> dict[str, int]:
        """Longest held prefix of every holder (name -> bit), in blocks."""
        depths = self._depths(hashes)
        matched = {name: depths.get(bit, 0) for name, bit in holders.items()}
        if self._gaps and not self._gaps.keys().isdisjoint(hashes):
            for depth, block in enumerate(hashes):
                bits = self._gaps.get(block, 0)
                if bits:
                    matched |= {name: min(matched[name], depth) for name, bit in holders.items() if bit & bits}
        return matched

    def _depths(self, hashes: Sequence[int]) -> dict[int, int]:
        """Bit -> number of blocks (held or gaps) along the prompt; every change is found by bisection."""
        depths: dict[int, int] = {}
        full = len(hashes)
        everyone = self._bits
        last = self._reaching(hashes[-1]) if full else everyone
        _note(depths, last, full)
        spans = [(0, everyone, full, last)]
        while spans:
            low, at_low, high, at_high = spans.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                _note(depths, at_low & ~at_high, low)
                continue
            middle = (low + high) // 2
            at_middle = self._reaching(hashes[middle - 1])
            spans.append((low, at_low, middle, at_middle))
            spans.append((middle, at_middle, high, at_high))
        return depths

    def _reaching(self, block: int) -> int:
        bits = self._masks.get(block, 0)
        return bits | self._gaps.get(block, 0) if self._gaps else bits

    def _is_gap(self, block: int, bit: int) -> bool:
        return bool(self._gaps.get(block, 0) & bit)

    def _close_gap(self, block: int, bit: int) -> None:
        self._gaps[block] &= ~bit
        if not self._gaps[block]:
            del self._gaps[block]

    def _unmask(self, block: int, left: int) -> None:
        if left:
            self._masks[block] = left
        else:
            del self._masks[block]

    def _forget(self, block: int) -> None:
        """Drop the predecessor entry of a block that is neither held nor a gap."""
        if block not in self._masks and block not in self._gaps:
            self._before.pop(block, None)


def _note(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        low = bits & -bits
        depths[low] = depth
        bits ^= low
