"""vLLM V1's scheduling of one step: running requests first, then first come first served, in one token budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sim.core.blocks import BlockPool
from sim.core.kvevents import BlocksStored
from sim.core.sequence import Sequence, Status


@dataclass(slots=True)
class Counters:
    """Totals since the start, as vLLM's metrics count them."""

    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    external_tokens: int = 0
    """Prompt tokens whose KV came from another engine."""
    finished: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """What one step computes. Requests that process one token count as decodes, whatever the token is."""

    streams: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """(sequence, new tokens, context tokens before them)"""
    pulls: list[Sequence] = field(default_factory=list)
    """Requests that got blocks for KV from elsewhere; they are not part of the step."""
    preempted: bool = False


class Scheduler:
    """The queues and the block pool. It plans steps and keeps every block's owner; it knows no time."""

    def __init__(self, pool: BlockPool, block_tokens: int, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.pulling: dict[str, Sequence] = {}
        self.counters = Counters()

    def plan(self) -> Plan:
        """Schedule one step: allocates blocks, publishes those that the step fills, moves ``computed`` forward."""
        plan = Plan()
        budget = self._plan_running(plan)
        if plan.preempted:
            return plan
        waiting, running = self.waiting, self.running
        while waiting and budget > 0 and len(running) < self.max_num_seqs:
            sequence = waiting[0]
            if sequence.wants_pull:
                if not self._place_pull(sequence):
                    break
                waiting.popleft()
                plan.pulls.append(sequence)
                continue
            count = self._admit(sequence, budget)
            if not count:
                break
            waiting.popleft()
            sequence.status = Status.RUNNING
            running.append(sequence)
            budget -= count
            _record(plan, sequence, count)
        return plan

    def _plan_running(self, plan: Plan) -> int:
        """Schedule the running requests, preempting the newest while blocks are short; returns the budget left."""
        budget = self.max_num_batched_tokens
        running = self.running
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            count = min(sequence.total - sequence.computed, budget)
            grown = self._grow(sequence, count)
            while not grown:
                victim = running.pop()
                self._preempt(victim)
                plan.preempted = True
                if victim is sequence:
                    return budget
                grown = self._grow(sequence, count)
            budget -= count
            _record(plan, sequence, count)
            index += 1
        return budget

    def release(self, sequence: Sequence) -> None:
        """Give a request's blocks back, its tail first in the queue for reuse."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def requeue(self, sequence: Sequence) -> None:
        """Put a request at the head of the queue (it has waited before)."""
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def blocks_for_steps(self, streams: Iterable[Sequence], steps: int) -> int:
        """Blocks that ``steps`` further decode steps of ``streams`` would allocate."""
        size = self.block_tokens
        return sum(-(-(sequence.computed + steps) // size) - len(sequence.blocks) for sequence in streams)

    def grow_by_steps(self, streams: Iterable[Sequence], steps: int) -> None:
        """Do to the blocks what ``steps`` single decode steps would, in their order: allocate and publish."""
        size = self.block_tokens
        due: list[tuple[int, int, bool, Sequence]] = []
        for order, sequence in enumerate(streams):
            position = sequence.computed
            due.extend((step, order, False, sequence) for step in range(-position % size, steps, size))
            due.extend((step, order, True, sequence) for step in range((-position - 1) % size, steps, size))
        due.sort(key=lambda crossing: crossing[:3])
        for _, _, fills, sequence in due:
            if fills:
                self._publish(sequence, sequence.published + 1)
            else:
                sequence.blocks.extend(self.pool.allocate(1))
        for sequence in streams:
            sequence.computed += steps

    def finish_pull(self, sequence: Sequence) -> None:
        """The KV of a pulling request has come: it is next in the queue."""
        del self.pulling[sequence.request.request_id]
        sequence.wants_pull = False
        sequence.pulled = True
        self.requeue(sequence)

    def drop_pull(self, sequence: Sequence) -> None:
        """Take a pulling request out, blocks and all, so that it may be computed here or be given up."""
        del self.pulling[sequence.request.request_id]
        sequence.wants_pull = False
        sequence.published = 0
        self.release(sequence)

    def _place_pull(self, sequence: Sequence) -> bool:
        """Allocate blocks for a prompt whose KV comes from elsewhere, beyond what is cached here."""
        prompt = sequence.request.prompt_tokens
        hits = self.pool.match(sequence.keys[: (prompt - 1) // self.block_tokens])
        if not self._take(sequence, prompt, hits):
            return False
        sequence.status = Status.PULLING
        self.pulling[sequence.request.request_id] = sequence
        return True

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Give a waiting request its blocks for its first step; returns the tokens it computes there, 0 for no room."""
        size = self.block_tokens
        prompt = sequence.request.prompt_tokens
        if sequence.pulled:
            sequence.pulled = False
            self._count_lookup(sequence, sequence.published * size)
            self.counters.external_tokens += prompt - sequence.published * size
            # The last token is computed again: its logits give the first output token.
            sequence.cached_tokens = prompt - 1
            sequence.computed = prompt
            self._publish(sequence, prompt // size)
            return 1
        lookup = (sequence.total - 1) // size
        sequence.extend_keys(lookup)
        hits = self.pool.match(sequence.keys[:lookup])
        cached = len(hits) * size
        count = min(sequence.total - cached, budget)
        if not self._take(sequence, cached + count, hits):
            return 0
        self._count_lookup(sequence, cached)
        sequence.computed = cached + count
        self._publish(sequence, sequence.computed // size)
        return count

    def _take(self, sequence: Sequence, tokens: int, hits: list[int]) -> bool:
        """Reference the cached blocks ``hits`` and allocate the rest for ``tokens`` tokens; False for no room."""
        pool = self.pool
        fresh = -(-tokens // self.block_tokens) - len(hits)
        if fresh + pool.idle(hits) > pool.free_blocks:
            return False
        pool.acquire(hits)
        sequence.blocks = hits + pool.allocate(fresh)
        sequence.published = len(hits)
        return True

    def _count_lookup(self, sequence: Sequence, hit_tokens: int) -> None:
        if sequence.cached_tokens is None:
            sequence.cached_tokens = hit_tokens
            self.counters.prefix_queries += sequence.request.prompt_tokens
            self.counters.prefix_hits += hit_tokens

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Schedule ``count`` more tokens of a running request; False when blocks are short."""
        target = sequence.computed + count
        fresh = -(-target // self.block_tokens) - len(sequence.blocks)
        if fresh > 0:
            if fresh > self.pool.free_blocks:
                return False
            sequence.blocks.extend(self.pool.allocate(fresh))
        sequence.computed = target
        self._publish(sequence, target // self.block_tokens)
        return True

    def _publish(self, sequence: Sequence, full_blocks: int) -> None:
        """Let lookups find a request's first ``full_blocks`` blocks. As in vLLM from when they are scheduled on, so
        that requests of one step share them."""
        start = sequence.published
        if full_blocks > start:
            sequence.extend_keys(full_blocks)
            self.pool.publish(sequence.blocks[start:full_blocks], sequence.keys[start:full_blocks])
            if self.pool.events is not None:
                keys, parent = sequence.keys, sequence.keys[start - 1] if start else None
                tokens = sequence.block_tokens_between(start, full_blocks)
                self.pool.events.append(BlocksStored(tuple(keys[start:full_blocks]), parent, tokens))
            sequence.published = full_blocks

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running request's blocks away; it computes prompt and output so far again when its turn comes."""
        self.release(sequence)
        sequence.computed = sequence.published = 0
        self.counters.preemptions += 1
        self.requeue(sequence)


def _record(plan: Plan, sequence: Sequence, count: int) -> None:
    if count == 1:
        plan.streams.append(sequence)
    else:
        plan.chunks.append((sequence, count, sequence.computed - count))
