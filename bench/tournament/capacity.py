"""Capacity of an instance: saturation, and the pace of a request below it.

No routing policy is involved. An instance of the hardware profile has ``streams`` requests at all times, an unlimited
prefix cache, and step times from ``sim.core.timing``. One average request then takes this part of the instance's time:

    steps  = max(output / streams, new / max_num_batched_tokens)      steps that make its share of tokens
    mixed  = min(steps, chunks)                                       those that contain a prefill
    busy_s = max(mixed x prefill_floor_s, mixed x prefill_s + chunk_s) + mixed x (mixed_stream_s x streams + attention)
             + (steps - mixed) x decode step of ``streams``

with ``chunk_s`` the mean time of a request's own prefill chunks and ``attention`` the time that the streams' contexts
add to a step. *Saturation* is 1 / busy_s with as many streams as the engine runs at once (``max_num_seqs``): the rate
of requests per instance at which the offered work equals the capacity, if routing lost nothing. It is computed, not
searched for with a policy, so that it depends on no policy and no noise.

Below saturation the batch is as large as it must be: the number of streams at which 1 / busy_s is the arrival rate.
By Little's law a token then takes streams / (rate x output) seconds. That is the pace of the nominal time line on which
cells are cut (`bench.tournament.workload`). Beyond 0.9 of saturation no steady state is reached within minutes; the
pace there is that of 0.9, and queues build up in the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from replayer.traces.ideal import cached_tokens
from replayer.traces.trace import Trace
from sim.core.timing import StepTiming
from sim.hardware import HardwareProfile

BUSIEST = 0.9
"""Share of saturation beyond which the nominal pace gets no slower."""


class MeanWork(msgspec.Struct, frozen=True, kw_only=True):
    """The average request of a trace as an engine computes it, with an unlimited prefix cache."""

    new_tokens: float
    """Prompt tokens to compute."""
    chunks: float
    """Steps of its prefill when it runs alone."""
    chunk_s: float
    """Seconds of its prefill chunks, without the fixed cost of a step."""
    output_tokens: float
    context_tokens: float
    """Context of a stream, mean over its output tokens."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Token time and streams of an instance at some load."""

    streams: float
    token_s: float
    """Seconds between two tokens of one stream, other requests' prefills included."""


def work_of(trace: Trace, profile: HardwareProfile) -> MeanWork:
    """The average request of a trace."""
    hits = cached_tokens(trace.requests, trace.block_tokens, lambda _index, _request: 0)
    return mean_work(
        ((each.input_length, hit, each.output_length) for each, hit in zip(trace.requests, hits, strict=True)), profile
    )


def mean_work(requests: Iterable[tuple[int, int, int]], profile: HardwareProfile) -> MeanWork:
    """The average of requests given as (prompt tokens, of these cached, output tokens)."""
    new, chunks, chunk_s, output, context = [], [], [], [], []
    for prompt, hit, generated in requests:
        cached = min(hit, max(prompt - 1, 0))
        fresh = max(prompt - cached, 1)
        tokens = max(generated, 1)
        new.append(fresh)
        chunks.append(math.ceil(fresh / profile.max_num_batched_tokens))
        chunk_s.append(profile.timing.chunk(fresh, cached))
        output.append(tokens)
        context.append(tokens * (prompt + tokens / 2))
    return MeanWork(
        new_tokens=float(np.mean(new)),
        chunks=float(np.mean(chunks)),
        chunk_s=float(np.mean(chunk_s)),
        output_tokens=float(np.mean(output)),
        context_tokens=float(np.sum(context) / np.sum(output)),
    )


def busy_s(work: MeanWork, profile: HardwareProfile, streams: float) -> float:
    """Seconds of an instance's time for one average request while ``streams`` requests run (formula in the module's
    docstring)."""
    timing: StepTiming = profile.timing
    attention_s: float = timing.decode_context_s * streams * work.context_tokens
    steps = max(work.output_tokens / streams, work.new_tokens / profile.max_num_batched_tokens)
    mixed = min(steps, work.chunks)
    prefill_s = max(mixed * timing.prefill_floor_s, mixed * timing.prefill_s + work.chunk_s)
    untouched: float = timing.expert_miss**streams
    decode_s = timing.decode_s + timing.decode_experts_s * (1.0 - untouched) + attention_s
    return prefill_s + mixed * (timing.mixed_stream_s * streams + attention_s) + (steps - mixed) * decode_s


def saturation(work: MeanWork, profile: HardwareProfile) -> float:
    """Requests per second and instance at which the offered work equals the capacity."""
    return 1.0 / busy_s(work, profile, float(profile.max_num_seqs))


def pace(work: MeanWork, profile: HardwareProfile, load: float) -> Pace:
    """Pace of an instance at a share of saturation, at most `BUSIEST`, with at least one stream."""
    rate = min(load, BUSIEST) * saturation(work, profile)
    streams = _root(lambda b: 1.0 / busy_s(work, profile, b) - rate, 1.0, float(profile.max_num_seqs))
    if streams > 1.0:
        return Pace(streams=streams, token_s=streams / (rate * work.output_tokens))
    return Pace(streams=streams, token_s=profile.timing.decode(1, round(work.context_tokens)))


def prefill_s(profile: HardwareProfile, new_tokens: int, cached_tokens: int) -> float:
    """Seconds to a first token on an idle instance."""
    timing = profile.timing
    chunks = math.ceil(max(new_tokens, 1) / profile.max_num_batched_tokens)
    chunk = timing.chunk(max(new_tokens, 1), cached_tokens)
    computing = max(chunks * timing.prefill_floor_s, chunks * timing.prefill_s + chunk)
    return timing.frontend(new_tokens + cached_tokens) + computing


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Zero of an increasing function between ``low`` and ``high``, or the nearer end if there is none."""
    if rising(low) >= 0:
        return low
    if rising(high) <= 0:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
