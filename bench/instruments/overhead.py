"""Overhead of a KV connector: the same fleet without one, with one, and with one that has handed over KV.

Each arm starts its engines afresh. The order of the arms rotates from repeat to repeat, so that none is always first on
a machine that warms up.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from statistics import median

import msgspec

from bench.analysis.output import Sheet
from bench.instruments.engine import InstrumentError, MeasuredEngine
from bench.instruments.prompts import Prompts
from bench.instruments.steps import DecodeTime, PrefillTime, StepsPlan, measure_decodes, measure_prefills

Progress = Callable[[str], None]


class ConnectorArm(StrEnum):
    """State of the connector in one arm."""

    NONE = "none"
    """Engines with role none: no connector is loaded."""
    IDLE = "idle"
    """Engines as the fleet file has them; nothing is handed over."""
    USED = "used"
    """The same, measured after the first engine has handed KV to the second."""
    HOOKED = "hooked"
    """The same, with the connector's hooks recording every transfer."""


HANDING_OVER = (ConnectorArm.USED, ConnectorArm.HOOKED)
"""Arms with hand-offs."""


class OverheadPlan(msgspec.Struct, kw_only=True):
    """Extent of the measurement."""

    arms: tuple[ConnectorArm, ...] = (ConnectorArm.NONE, ConnectorArm.IDLE, ConnectorArm.USED)
    repeats: int = 3
    """Starts of every arm."""
    steps: StepsPlan = StepsPlan(prefills=((1_024, 0), (8_192, 0)), decodes=((1, 1_024), (8, 1_024)))
    hand_offs: int = 5
    hand_off_tokens: int = 2_048


class OverheadRow(msgspec.Struct, kw_only=True):
    """One start of one arm."""

    arm: ConnectorArm
    repeat: int
    order: int
    """Place among all starts."""
    start_s: float
    """From starting the engines until all are ready."""
    pool_tokens: int | None
    prefills: list[PrefillTime]
    decodes: list[DecodeTime]
    hand_offs_s: list[float]
    """D legs of the hand-offs, until the first token: the first one also sets up the pair's connection."""


StartArm = Callable[[ConnectorArm, int], AbstractAsyncContextManager[Sequence[MeasuredEngine]]]
"""(arm, number of the start) -> engines, ready; stopped at the end of the block."""


def starts(plan: OverheadPlan) -> list[tuple[ConnectorArm, int]]:
    """(arm, repeat) in the order in which they are measured."""
    arms = plan.arms
    return [
        (arms[(repeat + place) % len(arms)], repeat) for repeat in range(plan.repeats) for place in range(len(arms))
    ]


async def measure_overhead(
    plan: OverheadPlan,
    start: StartArm,
    prompts: Prompts,
    progress: Progress = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[OverheadRow]:
    """Measure every start; yields a row as soon as it is measured.

    Raises:
        InstrumentError: a request failed, or an arm with a hand-off has one engine.
    """
    for order, (arm, repeat) in enumerate(starts(plan)):
        progress(f"overhead: starting arm {arm.value}, repeat {repeat + 1}")
        began_s = clock()
        async with start(arm, order) as engines:
            start_s = clock() - began_s
            first = engines[0]
            hand_offs: list[float] = []
            if arm in HANDING_OVER:
                if len(engines) < 2:
                    raise InstrumentError(f"arm {arm.value} needs a fleet of two engines")
                hand_offs = await _hand_over(first, engines[1], plan, prompts)
            yield OverheadRow(
                arm=arm,
                repeat=repeat,
                order=order,
                start_s=start_s,
                pool_tokens=(await first.report()).pool_tokens,
                prefills=await measure_prefills(first, plan.steps, prompts, progress),
                decodes=await measure_decodes(first, plan.steps, prompts, progress),
                hand_offs_s=hand_offs,
            )


async def _hand_over(
    source: MeasuredEngine, target: MeasuredEngine, plan: OverheadPlan, prompts: Prompts
) -> list[float]:
    legs = []
    for _ in range(plan.hand_offs):
        prompt = prompts.fresh(plan.hand_off_tokens + 1)
        leg = await source.prefill(prompt)
        legs.append((await target.generate(prompt, 1, transfer=leg.decode_params)).ttft_s)
    return legs


def overhead_sheet(rows: Sequence[OverheadRow]) -> Sheet:
    """Medians over the starts, one line for each arm."""
    arms = list(dict.fromkeys(row.arm for row in sorted(rows, key=lambda row: list(ConnectorArm).index(row.arm))))
    sizes = [f"{each.new_tokens:,}+{each.cached_tokens:,}" for each in rows[0].prefills]
    streams = [f"{each.streams}" for each in rows[0].decodes]
    cells = []
    for arm in arms:
        found = [row for row in rows if row.arm is arm]
        pools = [row.pool_tokens for row in found if row.pool_tokens is not None]
        legs = [row.hand_offs_s for row in found if len(row.hand_offs_s) > 1]
        cells.append(
            (
                arm.value,
                f"{len(found)}",
                f"{median(row.start_s for row in found):.1f}",
                f"{median(pools):,.0f}" if pools else "-",
                *(_ms(median(row.prefills[place].median_s for row in found)) for place in range(len(sizes))),
                *(_ms(median(row.decodes[place].step_s for row in found)) for place in range(len(streams))),
                _ms(median(each[0] for each in legs)) if legs else "-",
                _ms(median(median(each[1:]) for each in legs)) if legs else "-",
            )
        )
    return Sheet(
        "Overhead of the KV connector, medians over the starts",
        (
            "connector",
            "n",
            "start s",
            "KV pool",
            *(f"TTFT {size} ms" for size in sizes),
            *(f"TPOT x{count} ms" for count in streams),
            "first D leg ms",
            "later D legs ms",
        ),
        cells,
        notes=["TTFT by new + cached tokens, idle; TPOT by streams. D legs: of hand-offs from the first engine."],
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"
