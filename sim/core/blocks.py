"""The KV block pool: reference counts, prefix cache and the least-recently-freed queue of vLLM V1's block manager."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from sim.core.kvevents import BlockRemoved, CacheCleared, KvEvent


class BlockPool:
    """``num_blocks`` KV blocks. A block nobody references is free; a free block stays cached until it is reused.

    Free blocks form one queue: blocks are reused from its head and appended to its tail when released, the last block
    of a request first, so that of one request's blocks the tail is evicted before the prefix it depends on.
    Cost: a constant number of dictionary operations per block, none per token.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.evictions = 0
        self.events: list[KvEvent] | None = None
        """What changed in the cache since it was last emptied by a reader; None: nobody reads."""
        self._references = [0] * num_blocks
        self._key_of: list[int | None] = [None] * num_blocks
        self._cached: dict[int, int] = {}
        # Further blocks with the content of a cached one: two requests that computed it side by side.
        self._duplicates: dict[int, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def free_blocks(self) -> int:
        """Blocks nobody references (cached or not)."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Distinct block contents that a prefix lookup can hit."""
        return len(self._cached)

    def match(self, keys: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix of ``keys`` (chained content keys); they are not referenced yet."""
        found = list(map(self._cached.get, keys))
        try:
            end = found.index(None)
        except ValueError:
            end = len(found)
        return found[:end]  # type: ignore[return-value]  # no None before `end`

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` are in the free queue, so that referencing them uses up free blocks."""
        references = self._references
        return sum(not references[block] for block in blocks)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Reference cached ``blocks``, taking those that are idle out of the free queue."""
        references = self._references
        free = self._free
        for block in blocks:
            if not references[block]:
                del free[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks from the head of the free queue, forgetting what they cached.

        Raises:
            MemoryError: fewer than ``count`` blocks are free; nothing was taken.
        """
        free = self._free
        if count > len(free):
            raise MemoryError(f"{count} blocks asked for, {len(free)} free")
        blocks = list(islice(free, count))
        references = self._references
        key_of = self._key_of
        for block in blocks:
            del free[block]
            references[block] = 1
            if key_of[block] is not None:
                self._forget(block)
        return blocks

    def publish(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Let prefix lookups find ``blocks`` under ``keys`` (same length, all blocks referenced)."""
        cached = self._cached
        if cached.keys().isdisjoint(keys):
            cached.update(zip(keys, blocks, strict=True))
        else:
            for block, key in zip(blocks, keys, strict=True):
                if cached.setdefault(key, block) != block:
                    self._duplicates.setdefault(key, []).append(block)
        key_of = self._key_of
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of a request's ``blocks`` (given first to last); unreferenced ones become free."""
        references = self._references
        free = self._free
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if not left:
                free[block] = None

    def reset_cache(self) -> bool:
        """Forget all cached content. As in vLLM it does nothing, and says False, while any block is referenced."""
        if len(self._free) != self.num_blocks:
            return False
        self._cached.clear()
        self._duplicates.clear()
        self._key_of = [None] * self.num_blocks
        if self.events is not None:
            self.events.append(CacheCleared())
        return True

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        self._key_of[block] = None
        self.evictions += 1
        if key is None:
            return
        if self.events is not None:
            self.events.append(BlockRemoved(key))
        duplicates = self._duplicates.get(key)
        if self._cached.get(key) == block:
            if duplicates:
                self._cached[key] = duplicates.pop(0)
            else:
                del self._cached[key]
        elif duplicates and block in duplicates:
            duplicates.remove(block)
        if duplicates is not None and not duplicates:
            del self._duplicates[key]
