"""Several arms beside a base in one cell, many cells in parallel, and the table of their ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

from bench.cells.placement import (
    METRICS,
    PlacementFigures,
    PlacementRatios,
    beyond,
    judged_sessions,
    means_of,
    placement_arm,
    ratios_of,
)
from bench.tournament.arena import PreparedCell
from policies.admission.base import AdmissionRule
from policies.routing.base import RoutingPolicy
from sim.offline.simulate import SimOptions

Work = TypeVar("Work")
Cell = TypeVar("Cell")


class ArmSetup(NamedTuple):
    """Engines, policy and admission rule of one run of a cell."""

    options: SimOptions
    policy: RoutingPolicy
    admission: AdmissionRule | None = None
    """None: everything is sent at once."""


class ArmsBeside(NamedTuple):
    """Figures of a base and of arms beside it, and their ratios to it."""

    turns: int
    """Judged turns."""
    base: PlacementFigures
    arms: dict[str, PlacementFigures]
    ratios: dict[str, PlacementRatios]


def play_beside(stage: PreparedCell, base: ArmSetup, arms: Mapping[str, ArmSetup]) -> ArmsBeside:
    """Play a prepared cell with the base and with every arm."""
    session_of = judged_sessions(stage)
    played = {name: placement_arm(stage, *arm) for name, arm in {"": base, **arms}.items()}
    beside = played.pop("")
    return ArmsBeside(
        session_of.size,
        beside.figures,
        {name: arm.figures for name, arm in played.items()},
        {name: ratios_of(arm, beside, session_of, stage.seed) for name, arm in played.items()},
    )


def in_order(play: Callable[[Work], Cell], works: Sequence[Work], jobs: int) -> Iterator[Cell]:
    """Each work's cell, in the order of works, from so many processes."""
    with ProcessPoolExecutor(min(jobs, len(works)), mp_context=get_context("spawn")) as processes:
        yield from processes.map(play, works)


def ratios_table(columns: Sequence[str], rows: Iterable[tuple[Sequence[str], Sequence[PlacementRatios]]]) -> list[str]:
    """A Markdown table: geometric means of the runs of each row.

    ``better`` and ``worse`` count figures whose interval excludes 1 on that side by more than 3 %.

    Args:
        columns: headings of the first cells.
        rows: the first cells, and the ratios of the row's runs.
    """
    lines = [
        f"| {' | '.join(columns)} | runs | {' | '.join(METRICS)} | better | worse |",
        f"|{' --- |' * len(columns)} ---: |{' ---: |' * len(METRICS)} ---: | ---: |",
    ]
    for cells, found in rows:
        better, worse = beyond(found)
        lines.append(f"| {' | '.join(cells)} | {len(found)} | {means_of(found)} | {better} | {worse} |")
    return lines
