"""Times of an engine's steps: prefills by new and cached tokens, decode steps by streams and context."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import msgspec

from bench.instruments.engine import InstrumentError, MeasuredEngine, until_idle
from bench.instruments.prompts import Prompts
from bench.instruments.streams import decoding

Progress = Callable[[str], None]


class StepsPlan(msgspec.Struct, kw_only=True, frozen=True):
    """Points to measure."""

    prefills: tuple[tuple[int, int], ...]
    """(new tokens, cached tokens)"""
    decodes: tuple[tuple[int, int], ...]
    """(streams, context of each)"""
    repeats: int = 3
    decode_tokens: int = 32
    """Tokens of each stream over which a decode step is averaged."""
    stream_tokens: int = 2_048
    """Tokens after which a stream ends by itself: the first ones decode while the others are prefilled."""


class PrefillTime(msgspec.Struct, kw_only=True):
    """Times to first token of one size on an idle engine, the warm-up left out."""

    new_tokens: int
    cached_tokens: int
    """As the engine reported it; as planned where it reports none."""
    ttft_s: list[float]

    @property
    def median_s(self) -> float:
        """Median time to first token."""
        return median(self.ttft_s)


class DecodeTime(msgspec.Struct, kw_only=True):
    """Time of one decode step."""

    streams: int
    context_tokens: float
    """Of each stream, in the middle of the measurement."""
    step_s: float


async def measure_prefills(
    engine: MeasuredEngine, plan: StepsPlan, prompts: Prompts, progress: Progress = lambda text: None
) -> list[PrefillTime]:
    """Time to first token of every size, after one warm-up each: the first prefill of a size may compile kernels.

    Raises:
        InstrumentError: a request failed, or the engine cached another part of a prompt than planned.
    """
    found = []
    for new, cached in plan.prefills:
        progress(f"prefill: {new:,} new tokens after {cached:,} cached")
        times, hits = [], []
        base = prompts.fresh(cached)
        if cached:
            await engine.generate(base, 1)
        for repeat in range(plan.repeats + 1):
            answer = await engine.generate([*base, *prompts.fresh(new)], 1)
            hit = cached if answer.cached_tokens is None else answer.cached_tokens
            if not cached * 0.9 <= hit <= cached:
                raise InstrumentError(
                    f"{engine.name}: {hit:,} of {new + cached:,} prompt tokens were cached, planned {cached:,}; is "
                    "prefix caching on, and the KV pool large enough?"
                )
            if repeat:
                times.append(answer.ttft_s)
                hits.append(hit)
        reported = round(median(hits))
        found.append(PrefillTime(new_tokens=new + cached - reported, cached_tokens=reported, ttft_s=times))
    await until_idle((engine,))
    return found


async def measure_decodes(
    engine: MeasuredEngine, plan: StepsPlan, prompts: Prompts, progress: Progress = lambda text: None
) -> list[DecodeTime]:
    """Time of one decode step for every number of streams and context.

    Raises:
        InstrumentError: a request failed.
    """
    found = []
    for streams, context in plan.decodes:
        progress(f"decode: {streams} streams with {context:,} tokens of context")
        async with decoding(engine, streams, prompts, context, plan.stream_tokens, 2) as running:
            begin_s = engine.now_s()
            before = sum(stream.tokens for stream in running.streams)
            await running.more(plan.decode_tokens)
            after = sum(stream.tokens for stream in running.streams)
            found.append(
                DecodeTime(
                    streams=streams,
                    context_tokens=context + (before + after) / (2 * streams),
                    step_s=running.step_s(begin_s),
                )
            )
        await until_idle((engine,))
    return found
