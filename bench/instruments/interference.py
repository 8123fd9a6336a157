"""Interference (MB1): what a prefill does to the streams that decode on the same engine.

For each number of streams and each prompt length: start the streams, let them run, send one prefill, and compare the
streams' time per token before it and during it, that is from sending the prefill to its first token. The burst average
shows what the median gap hides: with chunked prefill most tokens of a stream may still come quickly while it gets few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from bench.analysis.output import Sheet
from bench.instruments.engine import InstrumentError, MeasuredEngine, until_idle
from bench.instruments.prompts import Prompts
from bench.instruments.streams import Burst, decoding


class InterferencePlan(msgspec.Struct, kw_only=True):
    """Sizes of the measurement; numbers of tokens are per stream."""

    streams: tuple[int, ...] = (1, 4, 8, 16)
    prefill_tokens: tuple[int, ...] = (2_048, 8_192, 32_768, 65_536, 131_072)
    repeats: int = 3
    context_tokens: int = 1_024
    """Prompt of each decoding stream."""
    settle_tokens: int = 5
    """Before the window called "before" begins."""
    before_tokens: int = 32
    """Tokens of that window."""
    after_tokens: int = 3
    """After the prefill's first token, so that the gap it caused has ended."""
    stream_tokens: int = 8_192
    """Tokens after which a stream ends by itself: more than it gets during the longest prefill."""


class InterferenceRow(msgspec.Struct, kw_only=True):
    """One prefill among ``streams`` decodes."""

    streams: int
    prefill_tokens: int
    repeat: int
    cached_tokens: int | None
    """Of the prefill; not 0 means that it was not a full prefill."""
    context_tokens: float
    """Context of a stream when the prefill was sent."""
    ttft_s: float
    before: Burst
    during: Burst
    decode_s: float
    """Time of one decode step before the prefill, from event to event."""
    longest_gap_s: float
    """Longest gap of any stream that overlaps the prefill."""

    @property
    def penalty(self) -> float:
        """TPOT during / before, burst averages."""
        return self.during.tpot_s / self.before.tpot_s

    @property
    def stall_stream_s(self) -> float:
        """Stream-seconds lost: D x T_prefill x (1 - TPOT before / TPOT during)."""
        return self.streams * self.ttft_s * (1 - self.before.tpot_s / self.during.tpot_s)


Progress = Callable[[str], None]


async def measure_interference(
    engine: MeasuredEngine, plan: InterferencePlan, prompts: Prompts, progress: Progress = lambda text: None
) -> list[InterferenceRow]:
    """Measure every combination on an idle engine, repeats interleaved over the sizes.

    A first prefill among each number of streams is not recorded: it may compile kernels, which took up to 2 s.

    Raises:
        InstrumentError: a request failed, or a stream ended too early.
    """
    rows = []
    for streams in plan.streams:
        progress(f"interference: first prefill among {streams} streams, not recorded")
        await measure_one(engine, plan, prompts, streams, min(plan.prefill_tokens), 0)
        await until_idle((engine,))
        for repeat in range(plan.repeats):
            for tokens in plan.prefill_tokens:
                progress(f"interference: {tokens:,} tokens among {streams} streams, repeat {repeat + 1}")
                rows.append(await measure_one(engine, plan, prompts, streams, tokens, repeat))
                await until_idle((engine,))
    return rows


async def measure_one(
    engine: MeasuredEngine, plan: InterferencePlan, prompts: Prompts, streams: int, tokens: int, repeat: int
) -> InterferenceRow:
    """Measure one prefill of ``tokens`` among ``streams``; the streams are cut when it ends."""
    prompt = prompts.fresh(tokens)
    async with decoding(
        engine, streams, prompts, plan.context_tokens, plan.stream_tokens, plan.settle_tokens
    ) as running:
        began_s = engine.now_s()
        await running.more(plan.before_tokens)
        decode_s = running.step_s(began_s)
        sent_s = engine.now_s()
        context = plan.context_tokens + sum(stream.tokens for stream in running.streams) / streams
        answer = await engine.generate(prompt, 1)
        await running.more(plan.after_tokens)
        during = running.burst(answer.sent_s, answer.first_s)
        if during.gaps is None:
            raise InstrumentError(f"{engine.name}: no token of a stream near a prefill of {tokens:,} tokens")
        return InterferenceRow(
            streams=streams,
            prefill_tokens=tokens,
            repeat=repeat,
            cached_tokens=answer.cached_tokens,
            context_tokens=context,
            ttft_s=answer.ttft_s,
            before=running.burst(began_s, sent_s),
            during=during,
            decode_s=decode_s,
            longest_gap_s=during.gaps.longest_s,
        )


def interference_sheet(rows: Sequence[InterferenceRow]) -> Sheet:
    """Medians over the repeats, one line for each number of streams and prompt length."""
    cells = []
    for (streams, tokens), found in by_point(rows).items():
        gaps = [row.during.gaps for row in found if row.during.gaps is not None]
        cells.append(
            (
                f"{streams}",
                f"{tokens:,}",
                f"{len(found)}",
                _ms(median(row.ttft_s for row in found)),
                _ms(median(row.before.tpot_s for row in found)),
                _ms(median(row.during.tpot_s for row in found)),
                f"{median(row.penalty for row in found):.1f}x",
                _ms(median(each.p50_s for each in gaps)),
                _ms(median(each.p90_s for each in gaps)),
                _ms(median(each.p99_s for each in gaps)),
                _ms(median(each.longest_s for each in gaps)),
                f"{median(row.stall_stream_s for row in found):.2f}",
            )
        )
    return Sheet(
        "Interference: one prefill among decoding streams, medians over the repeats",
        (
            "streams",
            "prefill",
            "n",
            "TTFT ms",
            "TPOT before ms",
            "TPOT during ms",
            "penalty",
            "gap p50 ms",
            "p90",
            "p99",
            "longest",
            "lost stream-s",
        ),
        cells,
        left=0,
        notes=[
            "TPOT: burst average, time over the tokens per stream. Gaps: between two events of a stream that overlap "
            "the prefill. Lost: streams x TTFT x (1 - before / during), summed over the streams."
        ],
    )


def by_point(rows: Sequence[InterferenceRow]) -> dict[tuple[int, int], list[InterferenceRow]]:
    """Rows by (streams, prefill tokens), sorted."""
    found: dict[tuple[int, int], list[InterferenceRow]] = {}
    for row in sorted(rows, key=lambda row: (row.streams, row.prefill_tokens)):
        found.setdefault((row.streams, row.prefill_tokens), []).append(row)
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"
