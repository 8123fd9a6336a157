"""Reference engine model, block by block, step by step and request by request; the fast one must equal it.

Nothing is fused, no block shares a record with another, and every step processes every request. It is slow and written
for reading: vLLM's block manager, its scheduler and the hand-off, in that order. Requests, timing and holds are the
model's.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from typing import Any

from sim.core.handoff import HoldTable, LoadFailurePolicy, Pull, PullAnswer, PullFailure
from sim.core.scheduler import Counters
from sim.core.sequence import Request, RequestStatus, Sequence
from sim.core.timing import StepTiming
from sim.core.types import EngineConfig, TokenEvent, TransferSeconds


class PlainPool:
    """Numbered blocks, each with its own reference count, key and place in the free queue."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self.references = [0] * num_blocks
        self.key_of: list[int | None] = [None] * num_blocks
        self.cached: dict[int, int] = {}
        self.copies: dict[int, list[int]] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def match(self, keys: list[int]) -> list[int]:
        found = []
        for key in keys:
            if key not in self.cached:
                break
            found.append(self.cached[key])
        return found

    def acquire(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.references[block]:
                del self.free[block]
            self.references[block] += 1

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self.free)
        blocks = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            self.references[block] = 1
            if self.key_of[block] is not None:
                self.forget(block, self.key_of[block])
            blocks.append(block)
        return blocks

    def publish(self, blocks: list[int], keys: list[int]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            if self.cached.setdefault(key, block) != block:
                self.copies.setdefault(key, []).append(block)
            self.key_of[block] = key

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.free[block] = None

    def forget(self, block: int, key: int | None) -> None:
        assert key is not None
        self.key_of[block] = None
        self.evictions += 1
        copies = self.copies.get(key, [])
        if self.cached[key] != block:
            copies.remove(block)
        elif copies:
            self.cached[key] = copies.pop(0)
        else:
            del self.cached[key]


class PlainEngine:
    """The part of the interface of ``sim.core.engine.Engine`` that the comparison needs."""

    def __init__(self, config: EngineConfig, timing: StepTiming, transfer_seconds: TransferSeconds) -> None:
        self.config = config
        self.timing = timing
        self.transfer_seconds = transfer_seconds
        self.pool = PlainPool(config.num_blocks)
        self.holds = HoldTable()
        self.counters = Counters()
        self.running: list[Any] = []
        self.waiting: deque[Any] = deque()
        self.pulling: dict[str, Any] = {}
        self.orphans: dict[str, Any] = {}
        self.live: dict[str, Any] = {}
        self.arriving: list[tuple[float, int, Any]] = []
        self.pulls: list[Pull] = []
        self.streams: list[Any] = []
        self.chunks: list[tuple[Any, int, int]] = []
        self.step_end_s: float | None = None
        self.count = 0

    # Requests

    def submit(self, request: Request, now_s: float) -> None:
        sequence: Any = Sequence(request, self.config.block_tokens, self.config.max_model_len)
        sequence.blocks = []
        self.live[request.request_id] = sequence
        self.count += 1
        sequence.arrival = self.count
        ready_s = now_s + self.timing.frontend(request.prompt_tokens)
        heapq.heappush(self.arriving, (ready_s, self.count, sequence))

    def abort(self, request_id: str, now_s: float | None = None) -> bool:
        sequence = self.live.pop(request_id, None)
        if sequence is None:
            return False
        status, sequence.status = sequence.status, RequestStatus.DONE
        self.finished("abort")
        if status is RequestStatus.PULLING:
            self.orphans[request_id] = self.pulling.pop(request_id)
            return True
        if status is RequestStatus.RUNNING:
            self.running.remove(sequence)
        elif status is RequestStatus.WAITING:
            self.waiting.remove(sequence)
        self.free(sequence)
        return True

    def finished(self, reason: str) -> None:
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1

    def free(self, sequence: Any) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def requeue(self, sequence: Any) -> None:
        sequence.status = RequestStatus.WAITING
        self.waiting.appendleft(sequence)
        self.sort_waiting()

    def sort_waiting(self) -> None:
        if self.config.priority_scheduling:
            self.waiting = deque(sorted(self.waiting, key=priority_and_arrival))

    # Steps

    def begin_step(self, now_s: float, horizon_s: float = math.inf) -> float | None:
        while self.arriving and self.arriving[0][0] <= now_s:
            sequence = heapq.heappop(self.arriving)[2]
            if sequence.status is RequestStatus.ARRIVING:
                sequence.status = RequestStatus.WAITING
                self.waiting.append(sequence)
                self.sort_waiting()
        if not (self.running or self.waiting or self.pulling):
            return None
        for blocks in self.holds.reap(now_s):
            self.pool.release(blocks)  # type: ignore[arg-type]
        self.streams, self.chunks = [], []
        preemptions = self.counters.preemptions
        budget = self.plan_running(self.config.max_num_batched_tokens)
        if self.counters.preemptions > preemptions:
            budget = 0
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.wants_pull:
                if not self.place_pull(sequence):
                    break
                self.waiting.popleft()
                continue
            count = self.admit(sequence, budget)
            if not count:
                break
            self.waiting.popleft()
            sequence.status = RequestStatus.RUNNING
            self.running.append(sequence)
            budget -= count
            self.record(sequence, count)
        if not self.streams and not self.chunks:
            return None
        context = sum(sequence.computed for sequence in self.streams)
        if self.chunks:
            chunks_s = sum(self.timing.chunk(count, before) for _, count, before in self.chunks)
            self.step_end_s = now_s + self.timing.mixed(chunks_s, len(self.streams), context)
        else:
            self.step_end_s = now_s + self.timing.decode(len(self.streams), context)
        return self.step_end_s

    def plan_running(self, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = min(sequence.total - sequence.computed, self.most(), budget)
            while not self.grow(sequence, count):
                by_priority = self.config.priority_scheduling
                victim = max(self.running, key=priority_and_arrival) if by_priority else self.running[-1]
                planned = victim in self.running[:index]
                self.running.remove(victim)
                if planned:
                    index -= 1
                    budget += self.take_back(victim)
                    count = min(sequence.total - sequence.computed, self.most(), budget)
                self.free(victim)
                victim.computed = victim.published = 0
                self.counters.preemptions += 1
                self.requeue(victim)
                if victim is not sequence:
                    continue
                # vLLM ends the step's planning here; one without work takes no time, and the next one plans the rest.
                return budget if index else self.plan_running(budget)
            budget -= count
            self.record(sequence, count)
            index += 1
        return budget

    def most(self) -> int:
        """Most tokens of a step for one request."""
        return self.config.long_prefill_token_threshold or self.config.max_num_batched_tokens

    def take_back(self, sequence: Any) -> int:
        """Remove a request from the plan; returns the tokens that it would have computed."""
        chunk_tokens = sum(count for each, count, _ in self.chunks if each is sequence)
        self.streams = [each for each in self.streams if each is not sequence]
        self.chunks = [chunk for chunk in self.chunks if chunk[0] is not sequence]
        return chunk_tokens or 1

    def end_step(self) -> list[TokenEvent]:
        now_s, self.step_end_s = self.step_end_s, None
        assert now_s is not None
        events = []
        for sequence in [*self.streams, *(sequence for sequence, _, _ in self.chunks)]:
            if sequence.status is RequestStatus.RUNNING and sequence.computed == sequence.total:
                events.append(self.hand_out(sequence, now_s))
        self.running = [sequence for sequence in self.running if sequence.status is RequestStatus.RUNNING]
        return events

    def interrupt(self, now_s: float) -> None:
        """A single step cannot be cut."""

    def next_event_s(self) -> float:
        arrival_s = self.arriving[0][0] if self.arriving else math.inf
        return min(arrival_s, self.holds.next_free_s()) if self.waiting else arrival_s

    def hand_out(self, sequence: Any, now_s: float) -> TokenEvent:
        request = sequence.request
        first = not sequence.generated
        if first:
            self.counters.prompt_tokens += request.prompt_tokens
        sequence.generated += 1
        self.counters.generation_tokens += 1
        cached = sequence.cached_tokens or 0
        if sequence.generated < sequence.target:
            return TokenEvent(request.request_id, 1, first, None, cached, None, now_s)
        reason, transfer = sequence.finish_reason, request.kv_transfer
        sequence.status = RequestStatus.DONE
        del self.live[request.request_id]
        self.finished(reason)
        held = None
        if transfer is not None and transfer.do_remote_decode and reason == "length":
            held = transfer.transfer_id
            self.holds.add(held, sequence.blocks, now_s + self.config.abort_timeout_s)
            sequence.blocks = []
        self.free(sequence)
        return TokenEvent(request.request_id, 1, first, reason, cached, held, now_s)

    def record(self, sequence: Any, count: int) -> None:
        if count == 1:
            self.streams.append(sequence)
        else:
            self.chunks.append((sequence, count, sequence.computed - count))

    # Blocks of a request

    def take(self, sequence: Any, tokens: int, hits: list[int]) -> bool:
        fresh = -(-tokens // self.config.block_tokens) - len(hits)
        if fresh + sum(not self.pool.references[block] for block in hits) > len(self.pool.free):
            return False
        self.pool.acquire(hits)
        sequence.blocks = hits + self.pool.allocate(fresh)
        sequence.published = len(hits)
        return True

    def admit(self, sequence: Any, budget: int) -> int:
        size, prompt = self.config.block_tokens, sequence.request.prompt_tokens
        if sequence.pulled:
            sequence.pulled = False
            self.count_lookup(sequence, sequence.published * size)
            self.counters.external_tokens += prompt - sequence.published * size
            sequence.cached_tokens = prompt - 1
            sequence.computed = prompt
            self.publish(sequence)
            return 1
        lookup = (sequence.total - 1) // size
        sequence.extend_keys(lookup)
        hits = self.pool.match(sequence.keys[:lookup])
        cached = len(hits) * size
        count = min(sequence.total - cached, self.most(), budget)
        if not self.take(sequence, cached + count, hits):
            return 0
        self.count_lookup(sequence, cached)
        sequence.computed = cached + count
        self.publish(sequence)
        return count

    def count_lookup(self, sequence: Any, hit_tokens: int) -> None:
        if sequence.cached_tokens is None:
            sequence.cached_tokens = hit_tokens
            self.counters.prefix_queries += sequence.request.prompt_tokens
            self.counters.prefix_hits += hit_tokens

    def grow(self, sequence: Any, count: int) -> bool:
        target = sequence.computed + count
        fresh = -(-target // self.config.block_tokens) - len(sequence.blocks)
        if fresh > len(self.pool.free):
            return False
        sequence.blocks += self.pool.allocate(max(fresh, 0))
        sequence.computed = target
        self.publish(sequence)
        return True

    def publish(self, sequence: Any) -> None:
        start, full = sequence.published, sequence.computed // self.config.block_tokens
        if full > start:
            sequence.extend_keys(full)
            self.pool.publish(sequence.blocks[start:full], sequence.keys[start:full])
            sequence.published = full

    # Hand-off

    def place_pull(self, sequence: Any) -> bool:
        prompt = sequence.request.prompt_tokens
        hits = self.pool.match(sequence.keys[: (prompt - 1) // self.config.block_tokens])
        if not self.take(sequence, prompt, hits):
            return False
        sequence.status = RequestStatus.PULLING
        request = sequence.request
        self.pulling[request.request_id] = sequence
        missing = len(sequence.blocks) - sequence.published
        others = len(self.pulling) - 1
        self.pulls.append(Pull(request.request_id, request.kv_transfer, missing, len(self.running), others))
        return True

    def take_pulls(self) -> list[Pull]:
        pulls, self.pulls = self.pulls, []
        return pulls

    def serve_pull(
        self, transfer_id: str, engine_id: str, blocks: int, peer_streams: int, peer_transfers: int, now_s: float
    ) -> PullAnswer:
        if engine_id != self.config.engine_id:
            return PullAnswer(0.0, PullFailure.STALE_ENGINE_ID)
        if not self.holds.can_send(transfer_id, now_s):
            return PullAnswer(0.0, PullFailure.UNKNOWN_TRANSFER)
        streams = (len(self.running) + peer_streams) / 2
        transfers = max(self.holds.sending(now_s), peer_transfers) + 1
        size = blocks * self.config.block_tokens * self.config.kv_bytes_per_token
        seconds = self.transfer_seconds(size, streams, transfers)
        self.holds.send(transfer_id, now_s + seconds)
        return PullAnswer(seconds)

    def finish_pull(self, request_id: str) -> None:
        self.settle_orphan(request_id)
        sequence = self.pulling.pop(request_id, None)
        if sequence is not None:
            sequence.wants_pull = False
            sequence.pulled = True
            self.requeue(sequence)

    def fail_pull(self, request_id: str, now_s: float) -> TokenEvent | None:
        policy = self.config.load_failure_policy
        if policy is LoadFailurePolicy.HANG:
            return None
        self.settle_orphan(request_id)
        sequence = self.pulling.pop(request_id, None)
        if sequence is None:
            return None
        sequence.wants_pull = False
        sequence.published = 0
        self.free(sequence)
        if policy is LoadFailurePolicy.RECOMPUTE:
            self.requeue(sequence)
            return None
        sequence.status = RequestStatus.DONE
        del self.live[request_id]
        self.finished("error")
        return TokenEvent(request_id, 0, True, "error", 0, None, now_s)

    def settle_orphan(self, request_id: str) -> None:
        orphan = self.orphans.pop(request_id, None)
        if orphan is not None:
            self.free(orphan)

    # State that the comparison reads

    def reuse_order(self) -> list[int | None]:
        return [self.pool.key_of[block] for block in self.pool.free]


def priority_and_arrival(sequence: Any) -> tuple[int, int]:
    return sequence.request.priority, sequence.arrival
