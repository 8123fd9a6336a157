"""``python -m bench.unequal_instances``: fleets whose instances differ in speed, in virtual time.

Each cell of traces, pools and loads is played once with each arm, and with ``warm`` that takes all instances as equally
fast. Ratios are to that, with paired intervals over sessions. The load is a share of what the fleet can compute: the
mean speed of its instances times that of as many of the profile's.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bench.cells.arenas import chosen_traces
from bench.cells.arms import in_order
from bench.cells.options import Growing, Jobs, Pools, Profile, Seeds, TraceDir, Traces
from bench.figures.result_file import write_cells
from bench.tournament.results import GridCell
from bench.tournament.settings import TournamentError, read_settings
from bench.unequal_instances.cells import BASE, UnequalCell, UnequalWork, play, policy_of, table_of
from policies.registry import PolicyParameterError, UnknownPolicyError
from sim.hardware import ProfileError, load_profile
from sim.offline.setup import parsed_speeds
from sim.offline.simulate import SimOptions, SimulationError

SCHEMA = 1
ARMS = ("warm", "joint", "llmd_affinity", "lmetric", "session_sticky")
SPEEDS = ("1,0.5", "1,0.5,0.5,0.5", "1,1,1,0.25")
"""Half or three quarters of the instances half as fast, as two generations of GPUs; one of four a quarter as fast, as a
faulty one.
"""


def main(
    trace_dir: TraceDir,
    trace: Traces = None,
    speeds: Annotated[
        list[str] | None,
        typer.Option(help=f"Speeds of the instances over the profile's, in turn. Repeatable. Default: {SPEEDS}."),
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help=f"POLICY[,KEY=VALUE...]. Repeatable. Default: {', '.join(ARMS)}.")
    ] = None,
    load: Annotated[float, typer.Option(help="Share of what the fleet can compute.")] = 0.8,
    pool: Pools = None,
    fleet: Annotated[int, typer.Option(min=1, help="Number of instances.")] = 8,
    seed: Seeds = None,
    profile: Profile = "",
    jobs: Jobs = 1,
    output: Growing = None,
) -> None:
    """Compare policies on fleets whose instances differ in speed with a warm that does not learn it."""
    arms = arm or list(ARMS)
    try:
        for each in (BASE, *arms):
            policy_of(each)
        for each in speeds or SPEEDS:
            if not parsed_speeds(each):
                raise SimulationError("--speeds: give at least one number")
            SimOptions(instances=fleet, speeds=parsed_speeds(each)).check()
        traces = chosen_traces(trace_dir, trace or [])
        timed_by = load_profile(profile or read_settings().profile)
    except (TournamentError, ProfileError, UnknownPolicyError, PolicyParameterError, SimulationError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    works = [
        UnequalWork(
            folder=str(trace_dir),
            cell=GridCell(trace=name, load=load, pool=hot_sets, fleet=fleet),
            seed=number,
            speeds=each,
            arms=arms,
            profile=profile,
        )
        for each in speeds or SPEEDS
        for number in seed or [1, 2]
        for name in traces
        for hot_sets in pool or [1.0, 4.0]
    ]
    cells: list[UnequalCell] = []
    for cell in in_order(play, works, jobs):
        cells.append(cell)
        if output is not None:
            write_cells(output, "unequal-instances", SCHEMA, {"profile": timed_by.name}, cells)
        shown = ", ".join(f"{name} {found.e2e_mean[0]:.2f}" for name, found in cell.ratios.items())
        typer.echo(f"{cell.cell}, speeds {cell.speeds}, seed {cell.seed}: mean E2E {shown}", err=True)
    typer.echo("\n".join(table_of(cells)))


if __name__ == "__main__":
    typer.run(main)
