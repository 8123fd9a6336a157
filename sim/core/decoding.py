"""Streams that get one token a step together: one count of steps stands for the progress of all of them.

There is no work per stream and step. The step in which a stream ends, and the steps in which it needs or fills a block,
are known when it joins.
"""

from __future__ import annotations

import heapq

from sim.core.sequence import Sequence


class Decoders:
    """The running requests that are past their prompt: ``count`` of them, ``context`` tokens in all."""

    __slots__ = ("_block_tokens", "_ends", "context", "count", "crossings", "steps")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.steps = 0
        """Steps made; a stream that joined at step j has ``steps - j`` tokens more than it joined with."""
        self.count = 0
        self.context = 0
        """Sum of the tokens whose KV is computed."""
        self._ends: list[tuple[int, int, Sequence]] = []
        self.crossings: list[tuple[int, int, bool, Sequence]] = []
        """Heap of (step, serial, whether the step fills a block or needs one, stream). Entries of streams that have
        left carry a serial that is no longer theirs."""

    def add(self, sequence: Sequence) -> None:
        """Let a running request join, whose next step computes one token."""
        steps, computed, size = self.steps, sequence.computed, self._block_tokens
        sequence.decoding = True
        sequence.joined = steps
        self.count += 1
        self.context += computed
        serial = sequence.serial
        heapq.heappush(self._ends, (steps + sequence.target - sequence.generated, serial, sequence))
        used = computed % size
        if used:
            heapq.heappush(self.crossings, (steps + size - used, serial, True, sequence))
        else:
            heapq.heappush(self.crossings, (steps + 1, serial, False, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Let a stream leave, its own figures brought up to date."""
        self._settle(sequence)
        self.count -= 1
        self.context -= sequence.computed
        sequence.serial = 0

    def dissolve(self, running: list[Sequence]) -> None:
        """Let all leave, to be planned one by one; they keep their serials."""
        for sequence in running:
            if sequence.decoding:
                self._settle(sequence)
        self.count = self.context = 0
        self._ends.clear()
        self.crossings.clear()

    def advance(self, steps: int) -> list[Sequence]:
        """Make ``steps`` steps, none past the next end; the streams that end with the last, in running order.

        They have left.
        """
        self.steps += steps
        self.context += steps * self.count
        ends, now = self._ends, self.steps
        ended = []
        while ends and ends[0][0] <= now:
            _, serial, sequence = heapq.heappop(ends)
            if sequence.serial == serial:
                self.remove(sequence)
                ended.append(sequence)
        return ended

    def steps_to_end(self) -> int:
        """Steps until the first stream ends (there is one)."""
        ends = self._ends
        while ends[0][2].serial != ends[0][1]:
            heapq.heappop(ends)
        return ends[0][0] - self.steps

    def steps_to_fill(self) -> int:
        """Steps after the next one until a stream fills a block, at least 1. O(streams)."""
        next_step = self.steps + 1
        fills_at = [
            step if fills else step + self._block_tokens - 1
            for step, serial, fills, sequence in self.crossings
            if sequence.serial == serial
        ]
        return max(min(fills_at) - next_step, 1)

    def blocks_next_step(self) -> int:
        """Blocks that the next step needs. O(streams)."""
        due = self.steps + 1
        return sum(
            step == due and not fills and sequence.serial == serial for step, serial, fills, sequence in self.crossings
        )

    def blocks_after(self, running: list[Sequence], further: int) -> int:
        """Blocks that ``further`` steps after the next one need, whose own are allocated. O(streams)."""
        size, now = self._block_tokens, self.steps + 1
        needed = 0
        for sequence in running:
            if sequence.decoding:
                computed = sequence.computed + now - sequence.joined
                needed += -(-(computed + further) // size) + (-computed // size)
        return needed

    def _settle(self, sequence: Sequence) -> None:
        made = self.steps - sequence.joined
        sequence.computed += made
        sequence.generated += made
        sequence.decoding = False
