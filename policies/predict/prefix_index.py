"""Shadow index: the prefix blocks routed to each instance, LRU-bounded per instance.

It mirrors the engines' prefix caches: blocks are added when a request is routed and evicted by the engine's own rule
(least recently used, tail of a chain before its head). Bounded by the engine's capacity, it evicts a block about when
the engine does; a block of text counts as so many of the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from policies.predict.prefix_tree import PrefixRun, PrefixTree, distinct_blocks


class Insertion(NamedTuple):
    """Result of one ``insert``, needed to retract it."""

    instance: str
    hashes: Sequence[int]
    held: int
    """Number of leading ``hashes`` that the instance held before."""
    serial: int
    """Number of the insertion; a block carries that of the last one that used it."""


class PrefixIndex:
    """Chained block hashes to holders: a radix tree per instance (`policies.predict.prefix_tree`).

    Invariant: an instance that holds a block holds every block before it in the chain. ``insert`` adds whole
    prefixes, eviction removes tails first, and ``retract`` keeps blocks that other requests use.

    Complexity for a prompt of b blocks and n instances: ``match`` O(n log b) comparisons, ``insert`` O(log b) and a
    copy of the new blocks. Memory: about the figures in ``docs/policies.md`` (measured by ``bench/prefix_index.py``).
    """

    def __init__(self, capacity_blocks: int = 1_000_000) -> None:
        """``capacity_blocks`` bounds each instance unless ``add_instance`` gives another bound."""
        _check_capacity(capacity_blocks)
        self._default_capacity = capacity_blocks
        self._serial = 0
        self._trees: dict[str, PrefixTree] = {}
        self._block_tokens: dict[str, float] = {}
        """Of the engine's blocks, where they are known."""
        self._distinct = ((0, 0), 0)

    def add_instance(self, instance: str, capacity_blocks: int | None = None, block_tokens: float = 0.0) -> None:
        """Register an instance; a known one keeps its blocks and takes the new bound.

        ``block_tokens``: tokens of a block of the engine's; 0: not known, so that each block of a prompt counts as one.
        """
        capacity = self._default_capacity if capacity_blocks is None else capacity_blocks
        _check_capacity(capacity)
        if instance in self._trees:
            self._trees[instance].resize(capacity)
        else:
            self._trees[instance] = PrefixTree(capacity)
        self._block_tokens[instance] = block_tokens

    def remove_instance(self, instance: str) -> None:
        """Forget an instance and all its blocks; unknown names are ignored."""
        tree = self._trees.pop(instance, None)
        if tree is not None:
            tree.clear()
            del self._block_tokens[instance]

    def clear_instance(self, instance: str) -> None:
        """Drop the blocks of an instance that restarted; it stays registered."""
        self._trees[instance].clear()

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Longest held prefix of every instance, in blocks."""
        if not hashes:
            return dict.fromkeys(self._trees, 0)
        first = hashes[0]
        return {instance: tree.match(hashes) if first in tree.roots else 0 for instance, tree in self._trees.items()}

    def match_one(self, instance: str, hashes: Sequence[int]) -> int:
        """Longest prefix held by one instance, in blocks."""
        return self._trees[instance].match(hashes)

    def insert(self, instance: str, hashes: Sequence[int], block_tokens: float = 0.0) -> Insertion:
        """Add a prompt's blocks as most recently used on ``instance``, its tail less recently than its head.

        ``block_tokens``: tokens of each; 0: not known, so that it counts as one of the engine's.
        """
        self._serial += 1
        engine = self._block_tokens[instance]
        weight = block_tokens / engine if engine and block_tokens else 1.0
        return Insertion(instance, hashes, self._trees[instance].insert(hashes, self._serial, weight), self._serial)

    def retract(self, insertion: Insertion) -> None:
        """Undo an insertion, for a request that never ran there.

        Blocks that another request has used since stay, because that request computes them; chains therefore have no
        gaps.
        """
        tree = self._trees.get(insertion.instance)
        if tree is not None:
            tree.retract(insertion.hashes, insertion.held, insertion.serial)

    def runs(self, instance: str) -> Iterator[PrefixRun]:
        """Copy of one instance's blocks, while which the index may change (`PrefixTree.runs`)."""
        return self._trees[instance].runs()

    def restore(self, instance: str, runs: Iterable[PrefixRun]) -> None:
        """Fill an instance without blocks from a copy. Raises ValueError if it is none."""
        self._trees[instance].restore(runs)

    def blocks(self, instance: str) -> int:
        """Number of the engine's blocks that one instance holds."""
        return round(self._trees[instance].weight)

    def capacity(self, instance: str) -> int:
        """Bound of one instance, in the engine's blocks."""
        return self._trees[instance].capacity

    @property
    def distinct_blocks(self) -> int:
        """Number of distinct blocks over all instances. Computed on demand, once per change."""
        # Between two insertions blocks are only removed, so equal sums mean no change.
        state = (self._serial, sum(tree.blocks for tree in self._trees.values()))
        if self._distinct[0] != state:
            self._distinct = state, distinct_blocks(self._trees.values())
        return self._distinct[1]


def _check_capacity(capacity_blocks: int) -> None:
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
