"""Decoding streams that run while something else is measured, and when each got its tokens."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from statistics import fmean

import msgspec

from bench.instruments.engine import InstrumentError, MeasuredEngine
from bench.instruments.prompts import Prompts

START_TIMEOUT_S = 300.0
TOKENS_TIMEOUT_S = 600.0


class Gaps(msgspec.Struct):
    """Quantiles of the times between two events of one stream, in seconds."""

    p50_s: float
    p90_s: float
    p99_s: float
    longest_s: float


class Burst(msgspec.Struct):
    """Tokens of the streams within one window."""

    seconds: float
    tokens: int
    """Of all streams."""
    tpot_s: float
    """Burst average: seconds / (tokens / streams); the longest gap if they got none, a lower bound."""
    gaps: Gaps | None
    """Of all gaps that overlap the window; None if there are none."""


class Stream:
    """The tokens of one stream: times and counts of its events."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.totals: list[int] = []
        """Tokens up to and including each event."""
        self.changed = asyncio.Event()
        """Set by each event, and by the end of the stream."""

    @property
    def tokens(self) -> int:
        return self.totals[-1] if self.totals else 0

    def take(self, tokens: int, now_s: float) -> None:
        """Note one event."""
        self.totals.append(self.tokens + tokens)
        self.times.append(now_s)
        self.changed.set()

    def ended(self, _: object) -> None:
        """Note that no event will follow."""
        self.changed.set()

    def until(self, time_s: float) -> int:
        """Tokens up to a time, inclusive."""
        number = bisect_right(self.times, time_s)
        return self.totals[number - 1] if number else 0

    def gaps(self, start_s: float, end_s: float) -> list[float]:
        """Gaps between two events that overlap the window."""
        return [after - before for before, after in pairwise(self.times) if before < end_s and after > start_s]


class DecodeStreams:
    """Streams that decode on one engine. Build with `decoding`, which ends them."""

    def __init__(self, streams: Sequence[Stream], tasks: Sequence[asyncio.Task[object]]) -> None:
        self.streams = streams
        self._tasks = tasks

    async def more(self, tokens: int) -> None:
        """Wait until every stream has ``tokens`` more than now.

        Raises:
            InstrumentError: a stream ended or failed first, or it took longer than ``TOKENS_TIMEOUT_S``.
        """
        goals = [stream.tokens + tokens for stream in self.streams]
        await self._reach(goals, TOKENS_TIMEOUT_S)

    async def _reach(self, goals: Sequence[int], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                for stream, task, goal in zip(self.streams, self._tasks, goals, strict=True):
                    while stream.tokens < goal:
                        self._check(task)
                        stream.changed.clear()
                        await stream.changed.wait()
        except TimeoutError:
            raise InstrumentError(f"the decoding streams got too few tokens within {timeout_s:g} s") from None

    def check(self) -> None:
        """Raise InstrumentError if a stream has ended or failed."""
        for task in self._tasks:
            self._check(task)

    @staticmethod
    def _check(task: asyncio.Task[object]) -> None:
        if not task.done():
            return
        error = None if task.cancelled() else task.exception()
        if error is None:
            raise InstrumentError(
                "a decoding stream ended before the measurement: raise --stream-tokens, or the engine's max_model_len"
            )
        raise InstrumentError(f"a decoding stream failed: {error}") from error

    def burst(self, start_s: float, end_s: float) -> Burst:
        """Tokens of the streams in (start, end]."""
        tokens = sum(stream.until(end_s) - stream.until(start_s) for stream in self.streams)
        seconds = end_s - start_s
        gaps = sorted(gap for stream in self.streams for gap in stream.gaps(start_s, end_s))
        tpot_s = seconds * len(self.streams) / tokens if tokens else max([seconds, *gaps[-1:]])
        return Burst(seconds, tokens, tpot_s, quantiles(gaps))

    def step_s(self, start_s: float) -> float:
        """Mean time of a token of a stream from ``start_s`` on, from event to event: without rounding to tokens."""
        steps = []
        for stream in self.streams:
            first = bisect_right(stream.times, start_s)
            tokens = stream.totals[-1] - stream.totals[first] if first < len(stream.totals) - 1 else 0
            if tokens:
                steps.append((stream.times[-1] - stream.times[first]) / tokens)
        if not steps:
            raise InstrumentError("the decoding streams got too few tokens to time a step")
        return fmean(steps)


def quantiles(ordered: Sequence[float]) -> Gaps | None:
    """Quantiles of sorted values (nearest rank)."""
    if not ordered:
        return None
    last = len(ordered) - 1
    p50, p90, p99 = (ordered[min(last, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99))
    return Gaps(p50, p90, p99, ordered[last])


@asynccontextmanager
async def decoding(
    engine: MeasuredEngine, count: int, prompts: Prompts, context_tokens: int, max_tokens: int, settle_tokens: int
) -> AsyncIterator[DecodeStreams]:
    """Streams that have all got ``settle_tokens`` tokens; they are cut at the end of the block.

    Args:
        engine: where they decode.
        count: streams, 0 or more.
        prompts: source of their prompts.
        context_tokens: tokens of each prompt.
        max_tokens: tokens after which a stream ends by itself.
        settle_tokens: tokens that each has at least when the block begins.

    Raises:
        InstrumentError: one failed, or they did not start within ``START_TIMEOUT_S``.
    """
    streams = [Stream() for _ in range(count)]
    tasks: list[asyncio.Task[object]] = []
    try:
        for number, stream in enumerate(streams):
            work = engine.generate(prompts.fresh(context_tokens), max_tokens, on_tokens=stream.take)
            task: asyncio.Task[object] = asyncio.create_task(work, name=f"decode-{engine.name}-{number}")
            task.add_done_callback(stream.ended)
            tasks.append(task)
        found = DecodeStreams(streams, tasks)
        await found._reach([settle_tokens] * count, START_TIMEOUT_S)
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
