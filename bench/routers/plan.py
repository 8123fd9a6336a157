"""Order of the arms, their expected duration, and which of them fit a budget of machine time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bench.routers.arms import RouterArm

SETUP_S = 12.0
"""Emptying the caches, starting and ending a router, where no finished arm shows how long that takes."""


class RoutersRun(msgspec.Struct, frozen=True):
    """One arm at one load in one repeat."""

    repeat: int
    load: float
    arm: RouterArm
    prompt_mode: str

    @property
    def name(self) -> str:
        """Name of its record, without suffix."""
        load = f"{self.load:g}".replace(".", "_")
        return f"{self.prompt_mode}-x{load}-{self.arm.slug}-r{self.repeat}"


def order_of(
    arms: Sequence[RouterArm], loads: Sequence[float], repeats: Sequence[int], prompt_mode: str
) -> Iterator[RoutersRun]:
    """All runs, repeat by repeat. Each repeat of a load starts with another arm than the one before."""
    for repeat in repeats:
        for load in loads:
            for turn in range(len(arms)):
                yield RoutersRun(repeat, load, arms[(repeat + turn) % len(arms)], prompt_mode)


class RunLength(msgspec.Struct, frozen=True):
    """Duration of a finished run, setup included, wall seconds."""

    load: float
    label: str
    total_s: float


def estimates_of(runs: Sequence[RoutersRun], known: Sequence[RunLength], spans_s: Mapping[float, float]) -> list[float]:
    """Expected wall seconds of each run.

    Args:
        runs: what is planned.
        known: finished runs; the longest of the same arm and load counts, else the longest of the load.
        spans_s: load -> wall seconds of the plan if every call took as long as in the trace, for loads without a run.
    """
    found = []
    for run in runs:
        at_load = [each for each in known if each.load == run.load]
        same = [each for each in at_load if each.label == run.arm.label]
        guess = [spans_s[run.load] + SETUP_S]
        found.append(max((each.total_s for each in same or at_load), default=guess[0]))
    return found


def plan_lines(
    runs: Sequence[RoutersRun], estimates_s: Sequence[float], done: frozenset[str], budget_s: float | None
) -> list[str]:
    """The runs in order with expected seconds, their sum, and where the budget ends."""
    lines, total_s, spent = [], 0.0, False
    for number, (run, estimate_s) in enumerate(zip(runs, estimates_s, strict=True), 1):
        if run.name in done:
            lines.append(f"{number:3}  {run.name}: done")
            continue
        spent = spent or (budget_s is not None and total_s + estimate_s > budget_s)
        if spent:
            lines.append(f"{number:3}  {run.name}: {estimate_s:.0f} s, past the budget")
            continue
        total_s += estimate_s
        lines.append(f"{number:3}  {run.name}: {estimate_s:.0f} s, {total_s:.0f} s in all")
    return lines
