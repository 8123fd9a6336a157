"""``python -m bench.joint``: ``joint`` against ``warm`` over traces, loads, pools and fleets, in virtual time."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated

import typer

from bench.cells.arenas import chosen_traces
from bench.cells.options import Fleets, Growing, Jobs, Loads, Pools, Profile, Seeds, TraceDir, Traces
from bench.figures.result_file import write_cells
from bench.joint.cells import BASELINE, JointCell, JointWork, report
from bench.joint.tables import harmed, summary_of
from bench.tournament.results import GridCell
from bench.tournament.settings import TournamentError, read_settings
from policies.registry import PolicyParameterError, make_routing
from sim.hardware import ProfileError, load_profile
from sim.offline.setup import parsed_params

SCHEMA = 1


def main(
    trace_dir: TraceDir,
    trace: Traces = None,
    load: Loads = None,
    pool: Pools = None,
    fleet: Fleets = None,
    seed: Seeds = None,
    param: Annotated[list[str] | None, typer.Option(help="KEY=VALUE: parameter of joint. Repeatable.")] = None,
    base_param: Annotated[list[str] | None, typer.Option(help="KEY=VALUE: parameter of warm. Repeatable.")] = None,
    priority_scheduling: Annotated[
        bool,
        typer.Option(
            "--priority-scheduling",
            help="Engines compute waiting prompts in the policies' order; --base-param slowdown=0: warm has none.",
        ),
    ] = False,
    profile: Profile = "",
    transport: Annotated[
        str, typer.Option(help="Of the profile, to hand over KV; none: instances without a connector.")
    ] = "nvlink",
    jobs: Jobs = 1,
    output: Growing = None,
) -> None:
    """Compare joint placement with warm, in virtual time. Exits with 1 if a cell is harmed."""
    try:
        make_routing("joint", parsed_params(param or []))
        make_routing(BASELINE, parsed_params(base_param or []))
        traces = chosen_traces(trace_dir, trace or [])
        timed_by = load_profile(profile or read_settings().profile)
        over = None if transport == "none" else timed_by.transport_name(transport)
    except (TournamentError, PolicyParameterError, ProfileError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    scheduling_policy = "priority" if priority_scheduling else "fcfs"
    setting: dict[str, object] = {"profile": timed_by.name, "transport": transport, "params": param or []}
    if priority_scheduling or base_param:
        setting |= {"base_params": base_param or [], "scheduling_policy": scheduling_policy}
    works = [
        JointWork(
            folder=str(trace_dir),
            cell=GridCell(trace=name, load=share, pool=hot_sets, fleet=instances),
            seed=number,
            params=param or [],
            base_params=base_param or [],
            profile=profile,
            transport=over,
            scheduling_policy=scheduling_policy,
        )
        for instances in fleet or [4, 8, 16]
        for number in seed or [1, 2]
        for name in traces
        for hot_sets in pool or [0.25, 1.0, 4.0]
        for share in load or [0.5, 0.8, 1.0]
    ]
    cells: list[JointCell] = []
    with ProcessPoolExecutor(min(jobs, len(works)), mp_context=get_context("spawn")) as processes:
        for cell in processes.map(report, works):
            cells.append(cell)
            if output is not None:
                write_cells(output, "joint", SCHEMA, setting, cells)
            ratios = cell.ratios
            typer.echo(
                f"{cell.cell}, seed {cell.seed}: TTFT p90 {ratios.ttft_p90[0]:.2f}, mean E2E {ratios.e2e_mean[0]:.2f}, "
                f"{cell.joint.handed_off} hand-offs",
                err=True,
            )
    for title, chosen_on in (("chosen on", True), ("held out", False)):
        typer.echo("\n".join([title, "", *summary_of(cells, chosen_on=chosen_on), ""]))
    found = harmed(cells)
    typer.echo(f"{len(cells)} cells, {len(found)} figures more than 3 % worse beyond their interval")
    for line in found:
        typer.echo(line)
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
