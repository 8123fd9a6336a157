"""Prompts as paths of segments, and prefix caches over them.

A segment is a run of blocks that the trace never takes apart: whoever has its first block has all of them. A prompt of
500 blocks is a path of a handful of segments, so a cache model costs a few dictionary operations for each request
instead of one for each block, with the same result to the block (tests hold it against a model block by block).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Path = Sequence[int]
"""The segments of a prompt's full blocks, first one first."""


class Segments:
    """The segments of a set of prompts.

    Args:
        prompts: block ids of each prompt's full blocks; chained ids, as `replayer.traces.trace.TraceRequest` has them.

    Cost: O(B log B) for B blocks in all, in numpy; 8 bytes a block while it runs.
    """

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        sizes = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        flat = np.concatenate([_ids(prompt) for prompt in prompts]) if sizes.sum() else np.empty(0, dtype=np.uint64)
        names, block = np.unique(flat, return_inverse=True)
        ends = np.cumsum(sizes)
        cut_after = _cut_after(block.astype(np.int64), ends[sizes > 0] - 1, len(names))
        last = np.flatnonzero(cut_after[block]) if flat.size else np.empty(0, dtype=np.int64)
        lengths = np.diff(last, prepend=-1)
        # A segment is named by its last block.
        segment_names, segment = np.unique(block[last], return_inverse=True)
        self.blocks: list[int] = [0] * len(segment_names)
        """Blocks of each segment."""
        for index, length in zip(segment.tolist(), lengths.tolist(), strict=True):
            self.blocks[index] = length
        bounds = np.searchsorted(last, np.concatenate(([0], ends)))
        flat_path = segment.tolist()
        self.paths: list[list[int]] = [
            flat_path[start:stop] for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        """The path of each prompt, in the order given."""


def _ids(prompt: Sequence[int]) -> NDArray[np.uint64]:
    """Ids as 64 bits, negative ones wrapped around: only equality matters."""
    try:
        return np.asarray(prompt, dtype=np.uint64)
    except (OverflowError, ValueError):
        return np.array([identifier & 0xFFFF_FFFF_FFFF_FFFF for identifier in prompt], dtype=np.uint64)


def _cut_after(block: NDArray[np.int64], last: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """After which blocks a segment ends: prompts end there, go on differently, or the next block has other parents."""
    cut = np.zeros(count, dtype=np.bool_)
    cut[block[last]] = True
    inner = np.ones(block.size, dtype=np.bool_)
    inner[last] = False
    before = np.flatnonzero(inner)
    parent, child = block[before], block[before + 1]
    some_child = np.full(count, -1, dtype=np.int64)
    some_child[parent] = child
    some_parent = np.full(count, -1, dtype=np.int64)
    some_parent[child] = parent
    cut[parent[some_child[parent] != child]] = True
    torn = np.zeros(count, dtype=np.bool_)
    torn[child[some_parent[child] != parent]] = True
    # A block that also begins a prompt has no parent there.
    first = np.concatenate(([0], last[:-1] + 1)) if last.size else last
    torn[block[first]] = True
    cut[parent[torn[child]]] = True
    return cut


class PrefixCache(Protocol):
    """Interface of a model of one instance's prefix cache."""

    def held(self, path: Path) -> int:
        """Leading blocks of the path that the cache holds."""

    def add(self, path: Path) -> None:
        """Take in all blocks of the path."""


class InfiniteCache:
    """A cache without eviction."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = blocks
        self._seen: set[int] = set()

    def held(self, path: Path) -> int:
        """Leading blocks of the path in the cache."""
        total = 0
        for segment in path:
            if segment not in self._seen:
                break
            total += self._blocks[segment]
        return total

    def add(self, path: Path) -> None:
        """Take in all blocks of the path."""
        self._seen.update(path)


class LruCache:
    """Holds at most ``capacity_blocks`` and evicts the least recently used one; of one prompt its last block first.

    That is the order of vLLM V1's free queue, with two simplifications: blocks count as used when their request was
    sent (not when it ended), and requests in flight pin nothing.
    """

    def __init__(self, blocks: Sequence[int], capacity_blocks: int) -> None:
        self._blocks = blocks
        self._capacity = capacity_blocks
        # Segment -> leading blocks held; least recently used first.
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    @property
    def used_blocks(self) -> int:
        """Blocks held; at most the capacity."""
        return self._used

    def held(self, path: Path) -> int:
        """Leading blocks of the path in the cache."""
        total = 0
        for segment in path:
            here = self._held.get(segment, 0)
            total += here
            if here < self._blocks[segment]:
                break
        return total

    def add(self, path: Path) -> None:
        """Take in all blocks of the path, constant amortised cost for each segment."""
        for segment in reversed(path):
            size = self._blocks[segment]
            self._used += size - self._held.pop(segment, 0)
            self._held[segment] = size
        while self._used > self._capacity:
            segment, here = next(iter(self._held.items()))
            surplus = self._used - self._capacity
            if here <= surplus:
                del self._held[segment]
                self._used -= here
            else:
                self._held[segment] = here - surplus
                self._used -= surplus
