"""vLLM V1's scheduling of one step: running requests first, then waiting ones in their order, in one token budget."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from sim.core.blocks import BlockPool, Holding, PrefixMatch
from sim.core.decoding import Decoders
from sim.core.kvevents import BlocksStored
from sim.core.sequence import RequestStatus, Sequence
from sim.core.waiting import PriorityQueue, Waiting, place_of


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


class StepPlan:
    """The work of one step. Requests that process one token count as decodes, whatever the token is."""

    __slots__ = ("chunks", "decoders", "pulls", "streams")

    def __init__(self) -> None:
        self.decoders = 0
        """Streams that advance together, each with one token."""
        self.streams: list[Sequence] = []
        """Further requests with one token."""
        self.chunks: list[tuple[Sequence, int, int]] = []
        """(sequence, new tokens, context tokens before them)"""
        self.pulls: list[Sequence] = []
        """Requests that got blocks for KV from elsewhere; they are not part of the step."""


class Scheduler:
    """The queues and the block pool. It plans steps and keeps every block's owner; it has no notion of time.

    ``running`` is in order of admission. Only its last request may be partway through its prompt, unless requests share
    steps: one that gets less than it needs has used up the budget, and none is admitted behind it. The others are in
    ``decoders``.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        *,
        by_priority: bool = False,
        long_prefill_tokens: int = 0,
    ) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.by_priority = by_priority
        self.most_prefill_tokens = long_prefill_tokens or max_num_batched_tokens
        """Tokens that one request may compute in a step."""
        self.shares_steps = self.most_prefill_tokens < max_num_batched_tokens
        """True if a step has room beside a prompt partway through its chunks."""
        self.waiting: Waiting = PriorityQueue() if by_priority else deque()
        self.running: list[Sequence] = []
        self.decoders = Decoders(block_tokens)
        self.pulling: dict[str, Sequence] = {}
        self.counters = Counters()
        self._admitted = 0

    def plan(self) -> StepPlan:
        """Schedule one step: allocates blocks, publishes those that the step fills, moves ``computed`` forward."""
        if self.shares_steps:
            return self._plan_shared()
        running, decoders = self.running, self.decoders
        streams = decoders.count
        budget = self.max_num_batched_tokens - streams
        partial = running[-1] if len(running) > streams else None
        tokens = fresh = 0
        if partial is not None:
            tokens = min(partial.request.prompt_tokens + partial.generated - partial.computed, budget)
            fresh = self._lacking(partial, tokens)
        free = self.pool.free_blocks - fresh
        if (
            budget < 0
            or (partial is not None and not budget)
            or (free < streams and free < (decoders.blocks_next_step() if streams else 0))
        ):
            return self._plan_one_by_one()
        plan = StepPlan()
        plan.decoders = streams
        if streams:
            self.grow_decoders(decoders.steps + 1)
        if partial is not None:
            self.grow(partial, tokens)
            _record(plan, partial, tokens)
            budget -= tokens
        if budget and self.waiting:
            self._admit_waiting(plan, budget)
        return plan

    def grow_decoders(self, step: int) -> None:
        """Apply the decoders' steps up to ``step`` to the blocks, in their order: allocate and publish."""
        crossings, size, pool = self.decoders.crossings, self.block_tokens, self.pool
        while crossings and crossings[0][0] <= step:
            at, serial, fills, sequence = crossings[0]
            if sequence.serial != serial:
                heapq.heappop(crossings)
            elif sequence.request.output_key is not None and pool.events is None:
                # No other stream shares these blocks: the order in which streams get them makes no difference.
                computed = sequence.computed + step - sequence.joined
                fresh = -(-computed // size) - sequence.published - sequence.blocks.loose
                if fresh:
                    pool.allocate(sequence.blocks, fresh)
                self._publish(sequence, computed // size)
                used = computed % size
                then = (step + size - used, serial, True, sequence) if used else (step + 1, serial, False, sequence)
                heapq.heapreplace(crossings, then)
            elif fills:
                heapq.heapreplace(crossings, (at + 1, serial, False, sequence))
                self._publish(sequence, sequence.published + 1)
            else:
                heapq.heapreplace(crossings, (at + size - 1, serial, True, sequence))
                pool.allocate(sequence.blocks, 1)

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
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
            sequence.status = RequestStatus.RUNNING
            self._admitted += 1
            sequence.serial = self._admitted
            running.append(sequence)
            budget -= count
            _record(plan, sequence, count)

    def _plan_shared(self) -> StepPlan:
        """The same where several requests may be partway through their prompts, anywhere among the running ones."""
        running, decoders = self.running, self.decoders
        streams = decoders.count
        budget = self.max_num_batched_tokens - streams
        parts, fresh = [], 0
        if len(running) > streams:
            for sequence in running:
                if not sequence.decoding:
                    tokens = min(sequence.total - sequence.computed, self.most_prefill_tokens, budget)
                    if tokens <= 0:
                        return self._plan_one_by_one()
                    budget -= tokens
                    fresh += self._lacking(sequence, tokens)
                    parts.append((sequence, tokens))
        free = self.pool.free_blocks - fresh
        if budget < 0 or free < 0 or (free < streams and free < (decoders.blocks_next_step() if streams else 0)):
            return self._plan_one_by_one()
        plan = StepPlan()
        plan.decoders = streams
        if streams:
            self.grow_decoders(decoders.steps + 1)
        for sequence, tokens in parts:
            self.grow(sequence, tokens)
            _record(plan, sequence, tokens)
        if budget and self.waiting:
            self._admit_waiting(plan, budget)
        return plan

    def _plan_one_by_one(self) -> StepPlan:
        """Schedule request by request, for when blocks or budget do not suffice for all."""
        plan, running = StepPlan(), self.running
        self.decoders.dissolve(running)
        before = len(running)
        budget = self._plan_running(plan)
        if len(running) == before:
            self._admit_waiting(plan, budget)
        # Requests that the budget did not reach keep their place.
        for sequence in running[len(plan.streams) + len(plan.chunks) :]:
            if sequence.computed == sequence.total - 1 and sequence.generated:
                self.decoders.add(sequence)
        return plan

    def _plan_running(self, plan: StepPlan) -> int:
        """Schedule the running requests, preempting the last while blocks are short; returns the budget left.

        The last is the newest, or with priorities the one that is last in their order.
        """
        budget = self.max_num_batched_tokens
        running = self.running
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            count = min(sequence.total - sequence.computed, self.most_prefill_tokens, budget)
            if self._lacking(sequence, count) > self.pool.free_blocks:
                victim = max(running, key=place_of) if self.by_priority else running[-1]
                place = running.index(victim)
                del running[place]
                if place < index:
                    budget += _take_back(plan, victim)
                    index -= 1
                self._preempt(victim)
                if victim is sequence and index:
                    return budget
                continue  # vLLM plans nothing after a victim, and next what is left
            self.grow(sequence, count)
            budget -= count
            _record(plan, sequence, count)
            index += 1
        return budget

    def release(self, sequence: Sequence) -> None:
        """Release a request's blocks; its tail comes first in the queue for reuse."""
        self.pool.release(sequence.blocks)
        sequence.blocks = Holding()

    def leave(self, sequence: Sequence) -> None:
        """Take a request out of the running ones; its blocks stay its own."""
        self.running.remove(sequence)
        if sequence.decoding:
            self.decoders.remove(sequence)
        sequence.serial = 0

    def requeue(self, sequence: Sequence) -> None:
        """Put a request at the head of the queue (it has waited before)."""
        sequence.status = RequestStatus.WAITING
        self.waiting.appendleft(sequence)

    def finish_pull(self, sequence: Sequence) -> None:
        """Put a request whose KV has arrived at the head of the queue."""
        del self.pulling[sequence.request.request_id]
        sequence.wants_pull = False
        sequence.pulled = True
        self.requeue(sequence)

    def drop_pull(self, sequence: Sequence) -> None:
        """Take out a pulling request and release its blocks, so that it can be computed here or given up."""
        del self.pulling[sequence.request.request_id]
        sequence.wants_pull = False
        sequence.published = 0
        self.release(sequence)

    def _place_pull(self, sequence: Sequence) -> bool:
        """Allocate blocks for a prompt whose KV comes from elsewhere, beyond what is cached here."""
        prompt = sequence.request.prompt_tokens
        hits = self.pool.match(sequence.keys, (prompt - 1) // self.block_tokens)
        if not self._take(sequence, prompt, hits):
            return False
        sequence.status = RequestStatus.PULLING
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
        hits = self.pool.match(sequence.keys, lookup)
        cached = hits.blocks * size
        count = min(sequence.total - cached, self.most_prefill_tokens, budget)
        if not self._take(sequence, cached + count, hits):
            return 0
        self._count_lookup(sequence, cached)
        sequence.computed = cached + count
        self._publish(sequence, sequence.computed // size)
        return count

    def _take(self, sequence: Sequence, tokens: int, hits: PrefixMatch) -> bool:
        """Reference the cached blocks ``hits`` and allocate the rest for ``tokens`` tokens; False for no room."""
        pool = self.pool
        fresh = -(-tokens // self.block_tokens) - hits.blocks
        if fresh + hits.idle > pool.free_blocks:
            return False
        sequence.blocks = pool.acquire(hits)
        pool.allocate(sequence.blocks, fresh)
        sequence.published = hits.blocks
        return True

    def _count_lookup(self, sequence: Sequence, hit_tokens: int) -> None:
        if sequence.cached_tokens is None:
            sequence.cached_tokens = hit_tokens
            self.counters.prefix_queries += sequence.request.prompt_tokens
            self.counters.prefix_hits += hit_tokens

    def _lacking(self, sequence: Sequence, count: int) -> int:
        """Blocks to allocate for ``count`` more tokens of a running request."""
        return -(-(sequence.computed + count) // self.block_tokens) - sequence.published - sequence.blocks.loose

    def grow(self, sequence: Sequence, count: int) -> None:
        """Schedule ``count`` more tokens of a running request (there are blocks enough)."""
        fresh = self._lacking(sequence, count)
        if fresh > 0:
            self.pool.allocate(sequence.blocks, fresh)
        sequence.computed += count
        self._publish(sequence, sequence.computed // self.block_tokens)

    def _publish(self, sequence: Sequence, full_blocks: int) -> None:
        """Let lookups find a request's first ``full_blocks`` blocks. As in vLLM from when they are scheduled on, so
        that requests of one step share them."""
        start = sequence.published
        if full_blocks <= start:
            return
        pool, prompt_blocks = self.pool, sequence.full_blocks
        middle = min(max(start, prompt_blocks), full_blocks)
        for first, last, output in ((start, middle, False), (middle, full_blocks, True)):
            if first < last and not pool.publish(sequence.blocks, sequence.keys_between(first, last), output):
                sequence.extend_keys(last)
                pool.publish_copies(sequence.blocks, sequence.keys, first, last, output)
        if pool.events is not None:
            sequence.extend_keys(full_blocks)
            keys, parent = sequence.keys, sequence.keys[start - 1] if start else None
            tokens = sequence.block_tokens_between(start, full_blocks)
            pool.events.append(BlocksStored(tuple(keys[start:full_blocks]), parent, tokens))
        sequence.published = full_blocks

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running request's blocks away; it computes prompt and output so far again when its turn comes."""
        self.release(sequence)
        sequence.computed = sequence.published = sequence.serial = 0
        self.counters.preemptions += 1
        self.requeue(sequence)


def _take_back(plan: StepPlan, sequence: Sequence) -> int:
    """Remove a request from a plan; returns the tokens it would have computed."""
    if sequence in plan.streams:
        plan.streams.remove(sequence)
        return 1
    place = [each for each, _, _ in plan.chunks].index(sequence)
    return plan.chunks.pop(place)[1]


def _record(plan: StepPlan, sequence: Sequence, count: int) -> None:
    if count == 1:
        plan.streams.append(sequence)
    else:
        plan.chunks.append((sequence, count, sequence.computed - count))
