"""One engine in engine time: requests in, token events out; the caller waits for the steps to end.

A driver calls ``begin_step(now)``, waits until the end time it returns, and calls ``end_step()``. Between the
two it may submit, abort, and ``interrupt`` a run of steps. There is no clock in this module.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from sim.core.accounting import count_state
from sim.core.blocks import BlockPool, Holding
from sim.core.handoff import HoldTable, LoadFailurePolicy, Pull, PullAnswer, PullFailure
from sim.core.kvevents import KvEvent
from sim.core.scheduler import Counters, Scheduler
from sim.core.sequence import KvTransfer, Request, RequestStatus, Sequence
from sim.core.stepping import EngineStep, begin_steps, heeds_arrivals, time_step
from sim.core.timing import StepTiming
from sim.core.types import EngineConfig, EngineDeadError, EngineState, TokenEvent, TransferSeconds


@dataclass(slots=True)
class Engine:
    """One vLLM instance: scheduler, timing and hand-off behind five calls. All times are engine seconds."""

    config: EngineConfig
    timing: StepTiming
    transfer_seconds: TransferSeconds
    report_progress: bool = True
    """True: ``end_step`` reports every token; False: only first tokens and ends, which costs less."""
    scheduler: Scheduler = field(init=False)
    busy_s: float = field(init=False, default=0.0)
    """Time in steps so far, and of it in steps that computed prompts."""
    prefill_s: float = field(init=False, default=0.0)
    holds: HoldTable = field(init=False, default_factory=HoldTable)
    _live: dict[str, Sequence] = field(init=False, default_factory=dict)
    _arriving: list[tuple[float, int, Sequence]] = field(init=False, default_factory=list)
    _orphans: dict[str, Sequence] = field(init=False, default_factory=dict)
    _pulls: list[Pull] = field(init=False, default_factory=list)
    _step: EngineStep | None = field(init=False, default=None)
    _submitted: int = field(init=False, default=0)
    _dead: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        config = self.config
        pool = BlockPool(config.num_blocks)
        self.scheduler = Scheduler(
            pool,
            config.block_tokens,
            config.max_num_batched_tokens,
            config.max_num_seqs,
            by_priority=config.priority_scheduling,
            long_prefill_tokens=config.long_prefill_token_threshold,
        )

    # Requests

    def submit(self, request: Request, now_s: float) -> None:
        """Take a request that arrived at ``now_s``; it reaches the scheduler after the front end's time.

        Raises:
            ValueError: it can never be served (too long, no tokens) or its id is in use.
            EngineDeadError: the engine is dead, or this request killed it.
        """
        self._check_alive()
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id!r} is in use")
        transfer = request.kv_transfer
        if self.config.role == "kv_consumer" and transfer is not None and transfer.do_remote_decode:
            # A consumer's connector has no sender; vLLM's engine core dies when such a request is sent to it.
            self._dead = True
            raise EngineDeadError("do_remote_decode sent to a kv_consumer")
        if self.config.role in {"none", "kv_producer"} and transfer is not None and transfer.do_remote_prefill:
            request = request._replace(kv_transfer=KvTransfer())
        sequence = Sequence(request, self.config.block_tokens, self.config.max_model_len)
        self._live[request.request_id] = sequence
        self._submitted += 1
        sequence.arrival = self._submitted
        ready_s = now_s + self.timing.frontend(request.prompt_tokens)
        heapq.heappush(self._arriving, (ready_s, self._submitted, sequence))
        step = self._step
        if step is not None and step.steps > 1 and heeds_arrivals(step.plan, self.scheduler):
            step.cut(ready_s)

    def abort(self, request_id: str, now_s: float | None = None) -> bool:
        """Stop a request in any state and free its blocks; False when it is not (or no longer) known.

        ``now_s`` cuts a run of steps in flight short; without it the run continues without the request. A request that
        waits for remote KV keeps its blocks until the transfer is reported, as in vLLM; if it never is, they are
        leaked.
        """
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        if now_s is not None and self._step is not None:
            self.interrupt(now_s)
            if sequence.decoding:
                self.counters.generation_tokens += self._step.steps - 1
        status, sequence.status = sequence.status, RequestStatus.DONE
        if status is RequestStatus.PULLING:
            self._orphans[request_id] = sequence
            del self.scheduler.pulling[request_id]
            self._count_finish("abort")
            return True
        if status is RequestStatus.RUNNING:
            self.scheduler.leave(sequence)
        elif status is RequestStatus.WAITING:
            self.scheduler.waiting.remove(sequence)
        self.scheduler.release(sequence)
        self._count_finish("abort")
        return True

    # Steps

    def begin_step(self, now_s: float, horizon_s: float = math.inf) -> float | None:
        """Schedule at ``now_s``; returns when the step ends, None when there is nothing to compute.

        Steps of the same requests during which nothing else can happen are one step here: decode steps, and those
        that compute a long prompt chunk by chunk. It ends no later than ``horizon_s`` unless a single one takes longer.

        Raises:
            RuntimeError: the step in flight has not been ended.
            EngineDeadError: the engine core has died.
        """
        self._check_alive()
        if self._step is not None:
            raise RuntimeError("the step in flight has not been ended")
        scheduler = self.scheduler
        arriving = self._arriving
        while arriving and arriving[0][0] <= now_s:
            sequence = heapq.heappop(arriving)[2]
            if sequence.status is RequestStatus.ARRIVING:
                sequence.status = RequestStatus.WAITING
                scheduler.waiting.append(sequence)
        if not (scheduler.running or scheduler.waiting or scheduler.pulling):
            return None
        self._reap(now_s)
        plan = scheduler.plan()
        for sequence in plan.pulls:
            self._ask_for_kv(sequence)
        if not (plan.decoders or plan.streams or plan.chunks):
            return None
        step = self._step = time_step(plan, scheduler, self.timing, now_s, horizon_s, self.next_event_s)
        return step.end_s

    def end_step(self) -> list[TokenEvent]:
        """End the step in flight: return its tokens, finish requests, free or hold their blocks.

        Raises:
            RuntimeError: no step is in flight.
        """
        step = self._step
        if step is None:
            raise RuntimeError("no step is in flight")
        plan, steps, end_s = step.plan, step.steps, step.end_s
        if steps > 1:
            self._begin_steps(step, steps)
        self._step = None
        took_s = end_s - step.start_s
        self.busy_s += took_s
        if plan.chunks:
            self.prefill_s += took_s
        events: list[TokenEvent] = []
        going_on = len(self._live)
        if plan.decoders:
            self._end_decodes(events, steps, end_s)
        for sequence in (*plan.streams, *[chunk[0] for chunk in plan.chunks]):
            if sequence.status is RequestStatus.RUNNING and sequence.computed == sequence.total:
                self._hand_out(events, sequence, end_s)
        if len(self._live) < going_on:
            running = self.scheduler.running
            running[:] = [sequence for sequence in running if sequence.status is RequestStatus.RUNNING]
        return events

    def report_kv_events(self) -> None:
        """Start recording changes of the prefix cache for ``take_kv_events``."""
        self.scheduler.pool.events = []

    def take_kv_events(self) -> list[KvEvent]:
        """Changes of the prefix cache since the last call; empty unless ``report_kv_events`` was called."""
        pool = self.scheduler.pool
        if not pool.events:
            return []
        events, pool.events = pool.events, []
        return events

    def interrupt(self, now_s: float) -> None:
        """Cut a run of steps in flight short: it ends with the first of its steps that ends at or after now.

        Call it before anything else that happens at ``now_s`` (``abort`` does): the run's changes to the blocks come
        first.
        """
        step = self._step
        if step is not None and step.steps > 1:
            step.cut(now_s)
            self._begin_steps(step, step.steps)

    def catch_up(self, now_s: float) -> None:
        """Allocate the blocks of those steps of a run in flight that have begun by ``now_s``, for ``kv_usage`` at that
        time.

        Without this call they are allocated when the run ends. Changes nothing else.
        """
        step = self._step
        if step is not None and step.begun < step.steps:
            self._begin_steps(step, max(min(step.begun_by(now_s), step.steps), step.begun))

    @property
    def step_end_s(self) -> float | None:
        """Engine time at which the step in flight ends; None when there is none."""
        return None if self._step is None else self._step.end_s

    def next_event_s(self) -> float:
        """Engine time at which ``begin_step`` may have something to do, with no step in flight (infinite: none
        known)."""
        arrival = self._arriving[0][0] if self._arriving else math.inf
        if self.scheduler.waiting:
            return min(arrival, self.holds.next_free_s())
        return arrival

    # Hand-off

    def take_pulls(self) -> list[Pull]:
        """The KV requests that ``begin_step`` made since the last call; the driver answers each once."""
        pulls, self._pulls = self._pulls, []
        return pulls

    def serve_pull(
        self, transfer_id: str, engine_id: str, blocks: int, peer_streams: int, peer_transfers: int, now_s: float
    ) -> PullAnswer:
        """P's side: start sending ``blocks`` blocks of ``transfer_id``, if this engine holds them."""
        if engine_id != self.config.engine_id:
            return PullAnswer(0.0, PullFailure.STALE_ENGINE_ID)
        if not self.holds.can_send(transfer_id, now_s):
            return PullAnswer(0.0, PullFailure.UNKNOWN_TRANSFER)
        streams = (len(self.scheduler.running) + peer_streams) / 2
        transfers = max(self.holds.sending(now_s), peer_transfers) + 1
        size = blocks * self.config.block_tokens * self.config.kv_bytes_per_token
        seconds = self.transfer_seconds(size, streams, transfers)
        self.holds.send(transfer_id, now_s + seconds)
        step = self._step
        if step is not None and self.scheduler.waiting and heeds_arrivals(step.plan, self.scheduler):
            step.cut(now_s + seconds)  # a request that waits for blocks may get these
        return PullAnswer(seconds)

    def finish_pull(self, request_id: str) -> None:
        """D's side: the KV of a request has arrived. Its blocks are freed now if it was aborted meanwhile."""
        self._settle_orphan(request_id)
        sequence = self.scheduler.pulling.get(request_id)
        if sequence is not None:
            self.scheduler.finish_pull(sequence)

    def fail_pull(self, request_id: str, now_s: float) -> TokenEvent | None:
        """D's side: the KV will not arrive. ``load_failure_policy`` decides between doing nothing, an error event, and
        a place in the queue to compute the prompt here."""
        policy = self.config.load_failure_policy
        if policy is LoadFailurePolicy.HANG:
            return None
        self._settle_orphan(request_id)
        sequence = self.scheduler.pulling.get(request_id)
        if sequence is None:
            return None
        self.scheduler.drop_pull(sequence)
        if policy is LoadFailurePolicy.RECOMPUTE:
            self.scheduler.requeue(sequence)
            return None
        sequence.status = RequestStatus.DONE
        del self._live[request_id]
        self._count_finish("error")
        return TokenEvent(request_id, 0, True, "error", 0, None, now_s)

    # Introspection

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return self.scheduler.counters

    @property
    def waiting(self) -> int:
        """Requests that are queued, or wait for KV, or are still in the front end (vllm:num_requests_waiting)."""
        return len(self._live) - len(self.scheduler.running)

    @property
    def live_requests(self) -> int:
        """Requests that have been submitted and are neither finished nor aborted."""
        return len(self._live)

    @property
    def kv_usage(self) -> float:
        """Share of blocks in use, 0..1 (vllm:kv_cache_usage_perc)."""
        return 1.0 - self.scheduler.pool.free_blocks / self.config.num_blocks

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False, and nothing done, while any block is in use (vLLM does the same)."""
        return self.scheduler.pool.reset_cache()

    def state(self) -> EngineState:
        """Count every block's owner. Costs a pass over all blocks in use: for tests and debugging."""
        return count_state(self.scheduler, self.holds, [each.blocks for each in self._orphans.values()], self.waiting)

    # Inside

    def _end_decodes(self, events: list[TokenEvent], steps: int, now_s: float) -> None:
        """Hand out ``steps`` tokens to each of the streams that advance together; those that are complete finish."""
        scheduler = self.scheduler
        scheduler.counters.generation_tokens += steps * scheduler.decoders.count
        ended = scheduler.decoders.advance(steps)
        if not self.report_progress:
            for sequence in ended:
                self._finish(events, sequence, sequence.target - sequence.reported, False, now_s)
            return
        for sequence in scheduler.running:
            if sequence.decoding:
                cached = sequence.cached_tokens or 0
                events.append(TokenEvent(sequence.request.request_id, steps, False, None, cached, None, now_s))
            elif not sequence.serial:
                self._finish(events, sequence, steps, False, now_s)

    def _hand_out(self, events: list[TokenEvent], sequence: Sequence, now_s: float) -> None:
        """Hand out one token to a request that was planned by itself; from now on it advances with the others."""
        counters = self.scheduler.counters
        first = not sequence.generated
        if first:
            counters.prompt_tokens += sequence.request.prompt_tokens
        sequence.generated += 1
        counters.generation_tokens += 1
        if sequence.generated == sequence.target:
            tokens = 1 if self.report_progress else sequence.target - sequence.reported
            self._finish(events, sequence, tokens, first, now_s)
            return
        self.scheduler.decoders.add(sequence)
        if first or self.report_progress:
            sequence.reported = sequence.generated
            cached = sequence.cached_tokens or 0
            events.append(TokenEvent(sequence.request.request_id, 1, first, None, cached, None, now_s))

    def _finish(self, events: list[TokenEvent], sequence: Sequence, tokens: int, first: bool, now_s: float) -> None:
        request, reason = sequence.request, sequence.finish_reason
        sequence.status = RequestStatus.DONE
        sequence.serial = 0
        del self._live[request.request_id]
        self._count_finish(reason)
        transfer = request.kv_transfer
        held = None
        # P sends only what finished by length: a first token that ends the sequence means that D never gets its KV.
        if transfer is not None and transfer.do_remote_decode and reason == "length" and self.config.role != "none":
            held = transfer.transfer_id
        if held is not None:
            self.holds.add(held, sequence.blocks, now_s + self.config.abort_timeout_s)
            sequence.blocks = Holding()
        else:
            self.scheduler.release(sequence)
        cached = sequence.cached_tokens or 0
        events.append(TokenEvent(request.request_id, tokens, first, reason, cached, held, now_s))

    def _begin_steps(self, step: EngineStep, last: int) -> None:
        """Begin the steps of a run up to ``last``: allocate their blocks and free what was held for others."""
        self._reap(begin_steps(step, self.scheduler, last))

    def _reap(self, now_s: float) -> None:
        """Free the blocks whose transfer is complete, or which no engine pulled in time."""
        for blocks in self.holds.reap(now_s):
            self.scheduler.pool.release(blocks)

    def _ask_for_kv(self, sequence: Sequence) -> None:
        scheduler = self.scheduler
        transfer = sequence.request.kv_transfer
        if transfer is None:
            raise RuntimeError(f"{sequence.request.request_id} needs a pull but has no kv_transfer")
        missing = sequence.blocks.loose
        others = len(scheduler.pulling) - 1
        self._pulls.append(Pull(sequence.request.request_id, transfer, missing, len(scheduler.running), others))

    def _settle_orphan(self, request_id: str) -> None:
        orphan = self._orphans.pop(request_id, None)
        if orphan is not None:
            self.scheduler.release(orphan)

    def _count_finish(self, reason: str) -> None:
        finished = self.counters.finished
        finished[reason] = finished.get(reason, 0) + 1

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDeadError("the engine core has died")
