"""Length of the step in flight, and runs of equal steps, which are simulated as one."""

from __future__ import annotations

import math
from collections.abc import Callable

from sim.core.scheduler import Scheduler, StepPlan
from sim.core.timing import StepRun, StepTiming


class EngineStep:
    """The step in flight; ``steps`` > 1 is a run of steps of the same requests with nothing else between them."""

    __slots__ = ("begun", "end_s", "plan", "run", "start_s", "steps")

    def __init__(self, plan: StepPlan, start_s: float, run: StepRun, steps: int) -> None:
        self.plan = plan
        self.start_s = start_s
        self.run = run
        self.steps = steps
        self.end_s = start_s + run.duration(steps)
        self.begun = 1
        """Number of steps whose blocks are allocated; the others get theirs when they are known to have begun."""

    def cut(self, now_s: float) -> None:
        """End a run with the first of its steps that ends at or after ``now_s``."""
        if self.steps == 1:
            return
        steps = self.begun_by(now_s)
        if steps < self.steps:
            self.steps = steps
            self.end_s = self.start_s + self.run.duration(steps)

    def begun_by(self, now_s: float) -> int:
        """Number of steps that have begun by ``now_s``."""
        return self.steps if now_s >= self.end_s else self.run.steps_reaching(max(now_s - self.start_s, 0.0))


def heeds_arrivals(plan: StepPlan, scheduler: Scheduler) -> bool:
    """True if a request that arrives during a run of such steps could join the next one: a prompt partway through its
    chunks takes all the budget, and a full batch admits no request."""
    return not plan.chunks and len(scheduler.running) < scheduler.max_num_seqs


def begin_steps(step: EngineStep, scheduler: Scheduler, last: int) -> float:
    """Apply the steps of a run up to ``last`` to the blocks, in their order; returns the time at which that one
    begins."""
    first = step.begun
    if first < last:
        step.begun = last
        _grow(step, scheduler, first, last)
    return step.start_s + step.run.duration(last - 1)


def _grow(step: EngineStep, scheduler: Scheduler, first: int, last: int) -> None:
    made = scheduler.decoders.steps
    if not step.plan.chunks:
        scheduler.grow_decoders(made + last)
        return
    sequence, count, _ = step.plan.chunks[0]
    for number in range(first + 1, last + 1):
        scheduler.grow_decoders(made + number)
        if sequence.serial:
            scheduler.grow(sequence, count)


def time_step(
    plan: StepPlan,
    scheduler: Scheduler,
    timing: StepTiming,
    now_s: float,
    horizon_s: float,
    next_event_s: Callable[[], float],
) -> EngineStep:
    """The step that ``plan`` makes at ``now_s``, and as many equal steps as have the same requests, enough blocks and
    no new event, ending no later than ``horizon_s`` unless a single one takes longer."""
    together = plan.decoders
    streams, context = together, 0
    if together:
        context = scheduler.decoders.context + together
    for sequence in plan.streams:
        streams += 1
        context += sequence.computed
    if plan.chunks:
        chunks_s = 0.0
        for _, count, before in plan.chunks:
            chunks_s += timing.chunk(count, before)
        growth_s = timing.decode_context_s * streams
        steps = (
            1
            if scheduler.shares_steps or plan.streams or timing.prefill_s + chunks_s < timing.prefill_floor_s
            else _full_chunks(plan)
        )
        if steps > 1:
            count = plan.chunks[0][1]
            growth_s += timing.prefill_context_s * count * count
        run = StepRun(timing.mixed(chunks_s, streams, context), growth_s)
        if together and steps > 1:
            steps = min(steps, scheduler.decoders.steps_to_end())
    else:
        run = StepRun(timing.decode(streams, context), timing.decode_context_s * streams)
        # A first token is an event: the step that makes it stays single.
        steps = 1 if plan.streams else scheduler.decoders.steps_to_end()
        if steps > 1 and len(scheduler.running) < scheduler.max_num_seqs:
            event_s = next_event_s()
            if event_s != math.inf:
                steps = min(steps, run.steps_reaching(max(event_s - now_s, 0.0)))
            if scheduler.waiting and scheduler.waiting[0].request.output_key is None:
                # It found no room, but would if a stream just filled a block that it can share.
                steps = min(steps, scheduler.decoders.steps_to_fill())
    if steps > 1:
        if horizon_s != math.inf:
            steps = min(steps, max(run.steps_within(horizon_s - now_s), 1))
        while steps > 1 and not _room_for(plan, scheduler, steps - 1):
            steps //= 2
    return EngineStep(plan, now_s, run, steps)


def _full_chunks(plan: StepPlan) -> int:
    """Number of consecutive steps that compute equally many of a prompt's tokens and leave some for the next."""
    if len(plan.chunks) > 1:
        return 1
    sequence, count, _ = plan.chunks[0]
    left = sequence.total - sequence.computed
    return 1 if left <= count else 1 + (left - 1) // count


def _room_for(plan: StepPlan, scheduler: Scheduler, further: int) -> bool:
    """True if there are enough blocks for ``further`` steps after the first."""
    size, free = scheduler.block_tokens, scheduler.pool.free_blocks
    for sequence, count, _ in plan.chunks:
        free -= -(-(sequence.computed + further * count) // size) - sequence.published - sequence.blocks.loose
    together = plan.decoders
    # The bound nearly always suffices and saves a pass over the streams.
    return together * -(-further // size) <= free or (
        scheduler.decoders.blocks_after(scheduler.running, further) <= free
    )
