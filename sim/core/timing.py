"""Step times: arithmetic on a hardware profile's fitted coefficients."""

from __future__ import annotations

import math
from typing import NamedTuple


class StepTiming(NamedTuple):
    """Coefficients in seconds (per token, per token and context token, ...), fitted by ``sim.fit``.

    front end      ``frontend_s + frontend_token_s * prompt`` passes before a request reaches the scheduler: HTTP,
                   parsing, block hashing. Running decodes are not slowed by it.
    decode step    ``decode_s + decode_experts_s * (1 - expert_miss ** B) + decode_context_s * C`` for B streams with
                   C context tokens in all. The second term is the share of a mixture-of-experts layer's weights that
                   B tokens touch: ``expert_miss`` = 1 - active / all experts.
    prefill part   ``max(prefill_floor_s, prefill_s + sum(prefill_token_s * n + prefill_context_s * n * (ctx + n/2)))``
                   over the step's chunks of n new tokens after ctx tokens; the floor is what launching kernels costs.
    mixed step     the prefill part plus ``mixed_stream_s`` per decode in it plus ``decode_context_s * C``.
    """

    frontend_s: float
    frontend_token_s: float
    decode_s: float
    decode_experts_s: float
    expert_miss: float
    decode_context_s: float
    prefill_s: float
    prefill_token_s: float
    prefill_context_s: float
    prefill_floor_s: float
    mixed_stream_s: float

    def frontend(self, prompt_tokens: int) -> float:
        """Seconds between a request's arrival and its place in the scheduler's queue."""
        return self.frontend_s + self.frontend_token_s * prompt_tokens

    def decode(self, streams: int, context_tokens: int) -> float:
        """Seconds of one step that decodes one token for each of ``streams``."""
        experts = self.decode_experts_s * (1.0 - self.expert_miss**streams)
        return self.decode_s + experts + self.decode_context_s * context_tokens

    def chunk(self, new_tokens: int, context_tokens: int) -> float:
        """One prefill chunk's own share of a step, in seconds: ``new_tokens`` after ``context_tokens``."""
        attended = context_tokens + new_tokens / 2
        return new_tokens * (self.prefill_token_s + self.prefill_context_s * attended)

    def mixed(self, chunks_s: float, streams: int, context_tokens: int) -> float:
        """Seconds of a step with prefill chunks that cost ``chunks_s`` in all, plus ``streams`` decodes."""
        prefill = max(self.prefill_floor_s, self.prefill_s + chunks_s)
        return prefill + self.mixed_stream_s * streams + self.decode_context_s * context_tokens


class StepRun(NamedTuple):
    """A run of steps of the same requests: with every step the context grows, and so does the next step's time."""

    first_s: float
    """Seconds of the first step."""
    growth_s: float
    """Seconds by which each step is longer than the one before."""

    def duration(self, steps: int) -> float:
        """Seconds of ``steps`` steps together."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def steps_within(self, seconds: float) -> int:
        """Largest number of steps that end within ``seconds``; 0 if none does. Raises ValueError for an infinite
        time."""
        if seconds < self.first_s:
            return 0
        if math.isinf(seconds):
            raise ValueError("steps_within needs a finite time")
        half = self.growth_s / 2
        linear = self.first_s - half
        if half <= 0:
            guess = int(seconds / linear)
        else:
            guess = int((math.sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half))
        # The closed form may be one off by rounding.
        while guess > 0 and self.duration(guess) > seconds:
            guess -= 1
        while self.duration(guess + 1) <= seconds:
            guess += 1
        return guess

    def steps_reaching(self, seconds: float) -> int:
        """The fewest steps (at least 1) that last at least ``seconds``."""
        within = self.steps_within(seconds)
        return within if within and self.duration(within) >= seconds else within + 1
