"""``python -m bench.long_prefills``: engines in which short prompts share steps with a long one, in virtual time.

Each cell of traces, loads and pools is played four times with ``warm``: on engines that compute in order of arrival,
with an order of prefills (``--scheduling-policy priority``), with a bound on one prompt's tokens in a step
(``--long-prefill-token-threshold``), and with both. Ratios are to the first, with paired intervals over sessions. With
``--admission`` an admission rule holds sessions back in all four alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from bench.cells.arenas import chosen_traces, prepared
from bench.cells.arms import ArmSetup, in_order, play_beside, ratios_table
from bench.cells.options import Growing, Jobs, Loads, Pools, Profile, Seeds, TraceDir, Traces
from bench.cells.placement import PlacementFigures, PlacementRatios
from bench.figures.result_file import write_cells
from bench.tournament.results import GridCell
from bench.tournament.settings import TournamentError, read_settings
from policies.admission.never_hold import NeverHold
from policies.registry import UnknownPolicyError, make_admission, make_routing
from policies.types import Role
from sim.hardware import ProfileError, load_profile

SCHEMA = 1
ARMS = ("order", "threshold", "both")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One cell to play, as plain data for another process."""

    folder: str
    cell: GridCell
    seed: int
    threshold: int
    profile: str = ""
    """Hardware profile of the engines; empty: that of the tournament's settings."""
    admission: str = NeverHold.name
    """Admission rule of all arms."""


class PlayedCell(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the four arms in one cell, and ratios to the first."""

    cell: GridCell
    seed: int
    sessions: int
    turns: int
    plain: PlacementFigures
    arms: dict[str, PlacementFigures]
    ratios: dict[str, PlacementRatios]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A kept result."""

    kind: str
    schema: int
    machine: dict[str, str]
    profile: str
    threshold: int
    admission: str = NeverHold.name
    cells: list[PlayedCell]


def play(work: Work) -> PlayedCell:
    """Play one cell four times.

    Raises:
        TournamentError: no such trace, or no request to judge.
        UnknownPolicyError: no such admission rule.
    """
    stage = prepared(work.folder, work.cell, work.seed, work.profile)
    ordered, plain = make_routing("warm", {}), make_routing("warm", {"slowdown": 0.0})
    rule = make_admission(work.admission)
    unchanged = replace(stage.options, role=Role.NONE)
    # Engines refuse a bound above their longest request, as vLLM does; in a pool that small it would bound nothing.
    pool_tokens = stage.options.pool_tokens
    bound = work.threshold if pool_tokens is None else min(work.threshold, pool_tokens)
    arms = {}
    for name, policy, scheduling, threshold in (
        ("order", ordered, "priority", 0),
        ("threshold", plain, "fcfs", bound),
        ("both", ordered, "priority", bound),
    ):
        options = replace(unchanged, scheduling_policy=scheduling, long_prefill_token_threshold=threshold)
        arms[name] = ArmSetup(options, policy, rule)
    played = play_beside(stage, ArmSetup(unchanged, plain, rule), arms)
    return PlayedCell(
        cell=stage.cell,
        seed=stage.seed,
        sessions=stage.sessions,
        turns=played.turns,
        plain=played.base,
        arms=played.arms,
        ratios=played.ratios,
    )


class Dimension(StrEnum):
    """Dimension of the cells that has rows of its own in the table."""

    TRACE = "trace"
    POOL = "pool"


def table_of(cells: Sequence[PlayedCell], by: Dimension = Dimension.TRACE) -> list[str]:
    """A Markdown table, a row for each trace, or pool, and arm (`bench.cells.arms.ratios_table`)."""
    rows: dict[tuple[str, str], list[PlacementRatios]] = defaultdict(list)
    for each in sorted(cells, key=lambda each: each.cell.trace if by is Dimension.TRACE else each.cell.pool):
        name = f"`{each.cell.trace}`" if by is Dimension.TRACE else f"{each.cell.pool:g}"
        for arm in ARMS:
            rows[name, arm].append(each.ratios[arm])
    return ratios_table(("trace" if by is Dimension.TRACE else "pool, hot sets", "engines"), rows.items())


def main(
    trace_dir: TraceDir,
    trace: Traces = None,
    load: Loads = None,
    pool: Pools = None,
    fleet: Annotated[int, typer.Option(min=1, help="Number of instances.")] = 8,
    seed: Seeds = None,
    threshold: Annotated[int, typer.Option(min=1, help="Most tokens of a step for one prompt.")] = 6144,
    admission: Annotated[str, typer.Option(help="Admission rule of all arms.")] = NeverHold.name,
    profile: Profile = "",
    by: Annotated[Dimension, typer.Option(help="Rows of the table that is printed.")] = Dimension.TRACE,
    jobs: Jobs = 1,
    output: Growing = None,
) -> None:
    """Compare engines with a bound on one prompt's tokens in a step, with an order, and with both, to neither."""
    try:
        make_admission(admission)
        traces = chosen_traces(trace_dir, trace or [])
        timed_by = load_profile(profile or read_settings().profile)
    except (TournamentError, ProfileError, UnknownPolicyError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    works = [
        Work(
            folder=str(trace_dir),
            cell=GridCell(trace=name, load=share, pool=hot_sets, fleet=fleet),
            seed=number,
            threshold=threshold,
            profile=profile,
            admission=admission,
        )
        for number in seed or [3, 4, 5]
        for name in traces
        for hot_sets in pool or [1.0, 4.0]
        for share in load or [0.9]
    ]
    cells: list[PlayedCell] = []
    for cell in in_order(play, works, jobs):
        cells.append(cell)
        if output is not None:
            setting = {"profile": timed_by.name, "threshold": threshold, "admission": admission}
            write_cells(output, "long-prefills", SCHEMA, setting, cells)
        shown = ", ".join(f"{arm} {cell.ratios[arm].ttft_p90[0]:.2f}" for arm in ARMS)
        typer.echo(f"{cell.cell}, seed {cell.seed}: TTFT p90 {shown}", err=True)
    typer.echo("\n".join(table_of(cells, by)))


if __name__ == "__main__":
    typer.run(main)
