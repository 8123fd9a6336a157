"""``python -m bench.staleness``: simulate what the results file lacks, print the tables.

Cells that the file already has are kept, so an interrupted run resumes. The figures are those of simulated time: equal
options give equal figures.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.staleness.cells import POLICIES, StalenessLoad, StalenessReport, cells, simulate_cell
from bench.staleness.curves import PAGE, RESULTS, factors, read, table, written


def main(
    output: Annotated[Path, typer.Option("--output", "-o", help="Results file; cells that it has are kept.")] = RESULTS,
    instances: Annotated[int, typer.Option(min=1, help="Simulated instances.")] = 1_000,
    replicas: Annotated[int, typer.Option(min=2, help="Replicas of the router.")] = 16,
    requests: Annotated[int, typer.Option(min=10, help="Requests of each trace.")] = 2_500,
    rate_per_s: Annotated[float, typer.Option(help="Arrivals per engine second.")] = 200.0,
    policies: Annotated[str, typer.Option(help="Policies, comma-separated.")] = ",".join(POLICIES),
    delays_s: Annotated[str, typer.Option(help="Seconds of staleness, comma-separated.")] = "0.05,0.5,2",
    seeds: Annotated[int, typer.Option(min=1, max=5, help="Seeds of each cell, from 1 on.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    write: Annotated[bool, typer.Option("--write", help="Also update the tables of docs/staleness.md.")] = False,
) -> None:
    """Simulate what is missing, write the results, print the tables as Markdown."""
    load = StalenessLoad(instances=instances, replicas=replicas, requests=requests, rate_per_s=rate_per_s)
    kept = read(output) if output.exists() else StalenessReport(load=load, figures=[])
    if kept.load != load:
        raise typer.BadParameter(f"{output} has results of another load: give another --output")
    known = {each.cell: each for each in kept.figures}
    wanted = cells(load, policies.split(","), [float(each) for each in delays_s.split(",")], seeds)
    missing = [cell for cell in wanted if cell not in known]
    output.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn")) as pool:
        for figures in pool.map(simulate_cell, [load] * len(missing), missing):
            known[figures.cell] = figures
            typer.echo(msgspec.json.encode(figures).decode(), err=True)
            report = StalenessReport(load=load, figures=list(known.values()))
            output.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    report = StalenessReport(load=load, figures=list(known.values()))
    for line in (*table(report), "", *factors(report)):
        typer.echo(line)
    if write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
