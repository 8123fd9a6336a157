"""KV transfer (MB2), idle and under load (MB6): a hand-off in three steps, timed at its two legs.

1. The P leg: P computes the prompt and keeps its KV.
2. The D leg: D pulls the KV and gives the first token.
3. Verification: D reports the pulled tokens, and its text is the one that P gives co-located.

A further request for the same prompt on D, now fully cached, takes as long as all of the D leg but the transfer; the
difference is the transfer as seen from outside: waiting for readiness, control plane and wire together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from bench.instruments.engine import EngineReport, Generated, InstrumentError, MeasuredEngine, Prefilled, until_idle
from bench.instruments.hooked.stages import TransferStages
from bench.instruments.prompts import Prompts
from bench.instruments.streams import START_TIMEOUT_S

Progress = Callable[[str], None]
Background = Literal["decode", "prefill"]

STALL_S = 10.0
"""A transfer that takes longer is a stall: counted, and kept out of medians (the reports saw about 10 s)."""
_PULLED = 0.9
"""Share of a prompt that D must have pulled: the last, partial block is computed."""


_FAILED_IN_A_ROW = 3
"""Failures after which the transfers are taken as broken."""


class TransferFailedError(InstrumentError):
    """One hand-off gave no first token: the pull failed, or took longer than ``TransferPlan.give_up_s``."""


class TransferPlan(msgspec.Struct, kw_only=True):
    """Sizes of the measurement."""

    tokens: tuple[int, ...] = (2_048, 8_192, 32_768, 65_536, 131_072)
    """Multiples of the engines' block size; a prompt has one more."""
    concurrent: tuple[int, ...] = (1,)
    """Hand-offs whose D legs begin together."""
    background: tuple[int, ...] = (0,)
    """Background streams on each side."""
    background_kind: Background = "decode"
    background_tokens: int = 1_024
    """Prompt of a background stream."""
    background_output: int = 8_192
    """Tokens after which a decoding background stream ends by itself."""
    repeats: int = 5
    verify_tokens: int = 4
    """Tokens of the D leg, compared with P's."""
    give_up_s: float = 120.0
    """Longest D leg. vLLM may leave a request whose pull failed waiting forever."""


class TransferRow(msgspec.Struct, kw_only=True):
    """One hand-off."""

    tokens: int
    size_bytes: int
    """KV of the prompt."""
    background: int
    background_kind: Background
    concurrent: int
    repeat: int
    p_leg_s: float
    p_queue_s: float | None = None
    """Of the P leg, by P's own metrics; None: not reported, or not of this request alone."""
    p_prefill_s: float | None = None
    d_leg_s: float
    """Until the first token."""
    cached_leg_s: float
    """The same request on D once more, fully cached."""
    together_s: float
    """From the first D leg's start to the last one's first token, of the hand-offs that ran together."""
    pulled_tokens: float | None = None
    """By D's counter, per hand-off."""
    cached_tokens: int | None = None
    """By the D leg's usage."""
    pulled: bool
    """D reports the prompt as pulled, by one of the two."""
    same_text: bool
    """D's text is P's."""
    transfer_id: str | None = None
    stages: TransferStages | None = None
    """By the connector's hooks; None: not recorded."""

    @property
    def transfer_s(self) -> float:
        """The transfer as seen from outside, 0 or more."""
        return max(0.0, self.d_leg_s - self.cached_leg_s)

    @property
    def stalled(self) -> bool:
        """True if it took longer than ``STALL_S``."""
        return self.transfer_s > STALL_S

    @property
    def bytes_per_s(self) -> float:
        """Of all hand-offs that ran together; infinite where the transfer is too short to be seen."""
        seconds = self.together_s - self.cached_leg_s
        return self.concurrent * self.size_bytes / seconds if seconds > 0 else float("inf")


async def measure_transfers(
    source: MeasuredEngine,
    target: MeasuredEngine,
    plan: TransferPlan,
    prompts: Prompts,
    kv_bytes_per_token: float,
    progress: Progress = lambda text: None,
    failures: list[str] | None = None,
) -> list[TransferRow]:
    """Measure every combination between two idle engines, repeats interleaved over the sizes.

    Args:
        source: P.
        target: D.
        plan: the sizes.
        prompts: source of the prompts.
        kv_bytes_per_token: of the model.
        progress: called with a line before each step.
        failures: takes a line for each hand-off that failed; it has no row. None: a failure ends the measurement.

    Raises:
        InstrumentError: a P leg failed, several hand-offs in a row did, or D computed a prompt that it should have
            pulled.
    """
    rows: list[TransferRow] = []
    in_a_row = 0
    await _warm_up(source, target, prompts)
    for background in plan.background:
        async with _loaded((source, target), background, plan, prompts):
            for concurrent in plan.concurrent:
                for repeat in range(plan.repeats):
                    for tokens in plan.tokens:
                        step = (
                            f"{tokens:,} tokens, {concurrent} at a time, {background} background streams a side, "
                            f"repeat {repeat + 1}"
                        )
                        progress(f"transfer: {step}")
                        point = (tokens, background, concurrent, repeat)
                        try:
                            rows += await _together(source, target, plan, prompts, point, kv_bytes_per_token)
                            in_a_row = 0
                        except TransferFailedError as error:
                            in_a_row += 1
                            if failures is None or in_a_row == _FAILED_IN_A_ROW:
                                raise
                            failures.append(f"{step}: {error}")
        await until_idle((source, target))
    return rows


async def _warm_up(source: MeasuredEngine, target: MeasuredEngine, prompts: Prompts) -> None:
    """One small hand-off, not recorded: a pair's first transfer sets up its connection."""
    prompt = prompts.fresh(512)
    leg = await source.prefill(prompt)
    await target.generate(prompt, 1, transfer=leg.decode_params)


async def _together(
    source: MeasuredEngine,
    target: MeasuredEngine,
    plan: TransferPlan,
    prompts: Prompts,
    point: tuple[int, int, int, int],
    kv_bytes_per_token: float,
) -> list[TransferRow]:
    """Hand-offs whose D legs begin together: their P legs run before, one after the other."""
    tokens, background, concurrent, repeat = point
    # One token more than whole blocks: fully cached, a prompt leaves one token to compute, as after a pull.
    asked = [prompts.fresh(tokens + 1) for _ in range(concurrent)]
    legs: list[tuple[Prefilled, EngineReport, EngineReport]] = []
    for prompt in asked:
        before = await source.report()
        legs.append((await source.prefill(prompt), before, await source.report()))
    d_before = await target.report()
    pulls = [
        asyncio.create_task(target.generate(prompt, plan.verify_tokens, transfer=leg.decode_params), name="d-leg")
        for prompt, (leg, _, _) in zip(asked, legs, strict=True)
    ]
    try:
        async with asyncio.timeout(plan.give_up_s):
            answers = await asyncio.gather(*pulls)
    except TimeoutError:
        raise TransferFailedError(f"no first token from {target.name} within {plan.give_up_s:g} s") from None
    except InstrumentError as error:
        raise TransferFailedError(str(error)) from error
    finally:
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
    d_after = await target.report()
    together_s = max(each.first_s for each in answers) - min(each.sent_s for each in answers)
    pulled = _delta(d_before.external_tokens, d_after.external_tokens)
    alone = background == 0 or plan.background_kind == "decode"
    rows = []
    for prompt, (leg, before, after), answer in zip(asked, legs, answers, strict=True):
        again = await target.generate(prompt, 1)
        here = await source.generate(prompt, plan.verify_tokens)
        share = None if pulled is None else pulled / concurrent
        rows.append(
            TransferRow(
                tokens=tokens,
                size_bytes=round(tokens * kv_bytes_per_token),
                background=background,
                background_kind=plan.background_kind,
                concurrent=concurrent,
                repeat=repeat,
                p_leg_s=leg.finished_s - leg.sent_s,
                p_queue_s=_delta(before.queue_s, after.queue_s) if alone else None,
                p_prefill_s=_delta(before.prefill_s, after.prefill_s) if alone else None,
                d_leg_s=answer.ttft_s,
                cached_leg_s=again.ttft_s,
                together_s=together_s,
                pulled_tokens=share,
                cached_tokens=answer.cached_tokens,
                pulled=_was_pulled(target, tokens, share, answer),
                same_text=answer.text == here.text,
                transfer_id=leg.decode_params.get("transfer_id"),
            )
        )
    return rows


def _delta(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _was_pulled(target: MeasuredEngine, tokens: int, share: float | None, answer: Generated) -> bool:
    """True if D reports that it pulled the prompt, by its counter or else by the answer's usage.

    Raises:
        InstrumentError: it reports that it did not.
    """
    reported = share if share is not None else answer.cached_tokens
    if reported is None:
        return False
    if reported < _PULLED * tokens - 64:
        raise InstrumentError(
            f"{target.name} pulled {reported:,.0f} of {tokens:,} tokens and computed the rest: its time is not a "
            "transfer's. Do the engines share a model, a block size and a connector?"
        )
    return True


@asynccontextmanager
async def _loaded(
    engines: Sequence[MeasuredEngine], count: int, plan: TransferPlan, prompts: Prompts
) -> AsyncIterator[None]:
    """``count`` background streams on each engine, all started, ended at the end of the block.

    Raises:
        InstrumentError: one failed, or they did not start within ``START_TIMEOUT_S``.
    """
    output = plan.background_output if plan.background_kind == "decode" else 1
    tasks: list[asyncio.Task[None]] = []
    started: list[asyncio.Event] = []

    async def client(engine: MeasuredEngine, began: asyncio.Event) -> None:
        try:
            while True:
                prompt = prompts.fresh(plan.background_tokens)
                await engine.generate(prompt, output, on_tokens=lambda tokens, now_s: began.set())
        finally:
            began.set()

    try:
        for engine in engines:
            for number in range(count):
                began = asyncio.Event()
                started.append(began)
                tasks.append(asyncio.create_task(client(engine, began), name=f"background-{engine.name}-{number}"))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for began in started:
                    await began.wait()
        except TimeoutError:
            raise InstrumentError(f"the background streams did not start within {START_TIMEOUT_S:g} s") from None
        yield
        for task in tasks:
            if task.done():
                await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
