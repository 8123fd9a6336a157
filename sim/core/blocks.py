"""The KV block pool: reference counts, prefix cache and the least-recently-freed queue of vLLM V1's block manager.

What vLLM does to single blocks is done here to *runs*: consecutive blocks of one prompt with one reference count and
neighbouring places in the free queue. Physical block numbers have no effect on the simulation, so blocks have none.
Keys are chained (a key stands for its block and all before it): where two prompts agree at one block they agree before
it, so one comparison decides whether a whole run is shared, and bisection finds how much of it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from sim.core.kvevents import BlockRemoved, CacheCleared, KvEvent


class BlockRun:
    """Consecutive blocks of one prompt under their content keys, or (without keys) ``blanks`` blocks with no content.

    All blocks of a run have the same owners. A run is cut when a lookup needs only its front; the run object keeps the
    end and ``front`` refers to the rest, so that owners of the whole run still find all of it.
    """

    __slots__ = ("blanks", "front", "indexed", "keys", "output", "references")

    def __init__(self, keys: list[int], references: int, output: bool = False, indexed: bool = True) -> None:
        self.keys = keys
        self.references = references
        self.output = output
        """Generated tokens: kept apart from the prompt, because the next prompt seldom continues with them."""
        self.indexed = indexed
        """True if lookups find it; False for a copy of what another run holds (always one block)."""
        self.blanks = 0
        self.front: BlockRun | None = None


class Holding:
    """The blocks one request references: its runs, first to last, and ``loose`` blocks behind them that lookups do
    not find (yet). A run comes with the ``front`` it had when it was taken: fronts cut off since are the request's too.
    """

    __slots__ = ("loose", "runs")

    def __init__(self) -> None:
        self.runs: list[tuple[BlockRun, BlockRun | None]] = []
        self.loose = 0

    def backwards(self) -> Iterator[BlockRun]:
        """The runs as they are cut now, last first."""
        for last, stop in reversed(self.runs):
            run: BlockRun | None = last
            while run is not stop and run is not None:
                front = run.front  # its new owner may change it
                yield run
                run = front

    def __len__(self) -> int:
        return self.loose + sum(len(run.keys) for run in self.backwards())


class PrefixMatch(NamedTuple):
    """The result of a prefix lookup; valid until the pool changes."""

    blocks: int
    """Length of the longest cached prefix."""
    idle: int
    """Number of these blocks without a reference: taking them uses up free blocks."""
    runs: list[tuple[BlockRun, int]]
    """Their runs: (run, number of its blocks)."""


class BlockPool:
    """``num_blocks`` KV blocks. A block without references is free; a free block stays cached until it is reused.

    Free blocks form one queue: blocks are reused from its head and appended to its tail when released, the last block
    of a request first, so that of one request's blocks the tail is evicted before the prefix it depends on.
    Cost: a constant number of dictionary operations per run (a run per point where prompts parted), a list copy of the
    new keys, and O(log b) where a run of b blocks is shared in part. Copies of cached blocks cost per block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.free_blocks = num_blocks
        """Blocks without references (cached or not)."""
        self.cached_blocks = 0
        """Distinct block contents that a prefix lookup can hit."""
        self.evictions = 0
        self.events: list[KvEvent] | None = None
        """Cache changes since a reader last emptied the list; None: no reader."""
        # Indexed runs by their first key. Since an owner of a block owns all before it and releases it first, a
        # cached block's predecessors are cached too: a lookup goes from run to run, and ends where no run continues.
        self._heads: dict[int, BlockRun] = {}
        # Further blocks with the content of a cached one: two requests that computed it side by side.
        self._copies: dict[int, list[BlockRun]] = {}
        self._free: OrderedDict[BlockRun, None] = OrderedDict()
        self._append_blanks(num_blocks)

    def match(self, keys: list[int], limit: int) -> PrefixMatch:
        """Longest cached prefix of the first ``limit`` of ``keys``; nothing is referenced yet."""
        heads = self._heads
        runs: list[tuple[BlockRun, int]] = []
        depth = idle = 0
        while depth < limit:
            run = heads.get(keys[depth])
            if run is None:
                break
            own = run.keys
            shared = len(own)
            end = depth + shared
            if end > limit or own[-1] != keys[end - 1]:
                shared = _common(own, keys, depth, limit)
                end = depth + shared
            depth = end
            runs.append((run, shared))
            if not run.references:
                idle += shared
        return PrefixMatch(depth, idle, runs)

    def acquire(self, match: PrefixMatch) -> Holding:
        """Reference the blocks of a lookup, taking the idle ones out of the free queue."""
        holding = Holding()
        for run, shared in match.runs:
            if shared < len(run.keys):
                run = self._cut(run, shared)  # noqa: PLW2901
            elif not run.references:
                del self._free[run]
            run.references += 1
            holding.runs.append((run, run.front))
        self.free_blocks -= match.idle
        return holding

    def allocate(self, holding: Holding, count: int) -> None:
        """Give ``holding`` ``count`` blocks from the head of the free queue, forgetting what they cached.

        Raises:
            MemoryError: fewer than ``count`` blocks are free; nothing was taken.
        """
        if count > self.free_blocks:
            raise MemoryError(f"{count} blocks requested, {self.free_blocks} free")
        self.free_blocks -= count
        holding.loose += count
        free = self._free
        while count:
            run = next(iter(free))
            if run.blanks:
                taken = min(run.blanks, count)
                run.blanks -= taken
                if not run.blanks:
                    del free[run]
            else:
                taken = min(len(run.keys), count)
                self._evict(run, taken)
            count -= taken

    def publish(self, holding: Holding, keys: list[int], output: bool) -> bool:
        """Let lookups find the first ``len(keys)`` loose blocks under ``keys``; True if no further step is needed.

        False means that nothing was done because some of them may be cached already: call ``publish_copies``.
        """
        heads = self._heads
        if keys[0] in heads:
            return False
        if holding.runs:
            last = holding.runs[-1][0]
            if not last.indexed:
                return False
            if last.references == 1 and last.output is output:
                last.keys += keys
            else:
                run = heads[keys[0]] = BlockRun(keys, 1, output)
                holding.runs.append((run, None))
        else:
            run = heads[keys[0]] = BlockRun(keys, 1, output)
            holding.runs.append((run, None))
        holding.loose -= len(keys)
        self.cached_blocks += len(keys)
        return True

    def publish_copies(self, holding: Holding, keys: list[int], first: int, last: int, output: bool) -> None:
        """Publish the blocks ``first`` up to ``last`` of a request with ``keys``, the first of which may be cached."""
        cached = max(min(self.match(keys, last).blocks, last), first)
        for key in keys[first:cached]:
            run = BlockRun([key], 1, output, indexed=False)
            self._copies.setdefault(key, []).append(run)
            holding.runs.append((run, None))
        if cached < last:
            run = self._heads[keys[cached]] = BlockRun(keys[cached:last], 1, output)
            holding.runs.append((run, None))
            self.cached_blocks += last - cached
        holding.loose -= last - first

    def release(self, holding: Holding) -> None:
        """Drop the references of a request to its blocks; those without any left become free, the last one first."""
        if holding.loose:
            self._append_blanks(holding.loose)
            self.free_blocks += holding.loose
        free, heads = self._free, self._heads
        behind: BlockRun | None = None
        for run in holding.backwards():
            run.references -= 1
            if run.references:
                behind = None
                continue
            run.front = None
            self.free_blocks += len(run.keys)
            if behind is not None and run.indexed and behind.indexed and run.output is behind.output:
                # Neighbours in the prompt and now in the queue: one run again.
                del heads[behind.keys[0]]
                del free[behind]
                run.keys += behind.keys
            free[run] = None
            behind = run

    def reset_cache(self) -> bool:
        """Forget all cached content. As in vLLM it does nothing and returns False while any block is referenced."""
        if self.free_blocks != self.num_blocks:
            return False
        self._heads.clear()
        self._copies.clear()
        self._free.clear()
        self._append_blanks(self.num_blocks)
        self.cached_blocks = 0
        if self.events is not None:
            self.events.append(CacheCleared())
        return True

    def cached_keys(self) -> set[int]:
        """Every content that a lookup can hit. Costs a pass over the pool: for tests."""
        return {key for run in self._heads.values() for key in run.keys}

    def reuse_order(self) -> list[int | None]:
        """Content keys of the free blocks in order of reuse (None: empty). Costs a pass over the pool: for tests."""
        order: list[int | None] = []
        for run in self._free:
            order += reversed(run.keys)
            order += [None] * run.blanks
        return order

    def references(self) -> int:
        """References to blocks that lookups find, over all owners. Costs a pass over the pool: for tests."""
        copies = (run for runs in self._copies.values() for run in runs)
        return sum(run.references * len(run.keys) for run in (*self._heads.values(), *copies))

    def _append_blanks(self, count: int) -> None:
        run = BlockRun([], 0, indexed=False)
        run.blanks = count
        self._free[run] = None

    def _cut(self, run: BlockRun, at: int) -> BlockRun:
        """Cut a run in two and return the front, which is not in the free queue; the end keeps its place there."""
        front = BlockRun(run.keys[:at], run.references, run.output)
        front.front = run.front
        del run.keys[:at]
        if run.references:
            run.front = front
        self._heads[front.keys[0]] = front
        self._heads[run.keys[0]] = run
        return front

    def _evict(self, run: BlockRun, count: int) -> None:
        """Forget the last ``count`` blocks of a free run."""
        self.evictions += count
        keys = run.keys
        if self._copies or self.events is not None:
            for _ in range(count):
                self._forget(run, keys.pop())
        else:
            self.cached_blocks -= count
            if count == len(keys):
                del self._heads[keys[0]]
                keys.clear()
            else:
                del keys[len(keys) - count :]
        if not keys:
            del self._free[run]

    def _forget(self, run: BlockRun, key: int) -> None:
        """Forget the block with ``key``, until now the last of ``run``; the oldest copy of it takes its place."""
        if self.events is not None:
            self.events.append(BlockRemoved(key))
        copies = self._copies.get(key)
        if not run.indexed:
            assert copies is not None
            copies.remove(run)
        elif copies:
            heir = self._heads[key] = copies.pop(0)
            heir.indexed = True
        else:
            self.cached_blocks -= 1
            if not run.keys:
                del self._heads[key]
        if copies is not None and not copies:
            del self._copies[key]


def _common(own: list[int], keys: list[int], depth: int, limit: int) -> int:
    """Number of a run's blocks that equal ``keys`` from ``depth`` on, up to ``limit``; the first is known to be
    equal."""
    low, high = 1, min(len(own), limit - depth)
    if own[high - 1] == keys[depth + high - 1]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if own[middle - 1] == keys[depth + middle - 1]:
            low = middle
        else:
            high = middle
    return low
