"""``python -m bench.data_plane``: our proxy, vLLM Router, SGLang's gateway and nginx in one interleaved run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from bench.data_plane.launches import BASELINE, LAUNCHES, VARIANTS, StackError
from bench.data_plane.measure import DataPlaneRecord, memory_after, run
from bench.data_plane.processes import ChildError
from bench.data_plane.quantities import FULL, QUICK, SIZES, measurements
from bench.data_plane.report.markdown import markdown
from bench.data_plane.report.table import show
from bench.data_plane.report.targets import check as check_targets
from bench.data_plane.report.watching import watching
from bench.data_plane.stacks import DIRECT
from bench.figures.result_file import writable

STACKS = (DIRECT, *LAUNCHES)
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


def _chosen(given: str, known: list[str], option: str) -> list[str]:
    chosen = [name.strip() for name in given.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}", param_hint=option)
    return chosen


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=0, help="Shuffled rounds; 0: 1 with --quick, else 5.")] = 0,
    only: Annotated[
        str, typer.Option(help=f"Stacks, with commas: {', '.join(STACKS)}; more: {', '.join(VARIANTS)}.")
    ] = ",".join(STACKS),
    sizes: Annotated[str, typer.Option(help="Prompt sizes, with commas.")] = ",".join(SIZES),
    measure: Annotated[str, typer.Option(help="Measurements, with commas; empty: all.")] = "",
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Start the stacks again in every round: two processes of the same program differ by several per cent.",
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few requests, one round: about two minutes.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the order.")] = 1,
    memory: Annotated[int, typer.Option(min=0, help="Also: memory after this many distinct 130 KB prompts.")] = 0,
    profile: Annotated[
        Path | None, typer.Option(help="Run warmroute under cProfile (py-spy for .svg) and write this.")
    ] = None,
    baseline_tree: Annotated[
        Path | None,
        typer.Option(help="Also measure warmroute from this source tree, as the stack `baseline`.", exists=True),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", callback=writable, help="Write all samples to this JSON file.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is missed.")] = False,
    table: Annotated[
        Path | None, typer.Option("--input", help="Only print the tables of this JSON file.", exists=True)
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Measure each router's added latency and CPU cost, in front of the same eight engine stubs on this host.

    All stacks run at once and are measured in turn, in shuffled order, so that other load on the machine affects all of
    them. Peers come from `python -m bench.data_plane.peers`, nginx from PATH.
    """
    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "160")))
    if table is not None:
        record = msgspec.json.decode(table.read_bytes(), type=DataPlaneRecord)
    else:
        scale = QUICK if quick else FULL
        chosen_sizes = _chosen(sizes, list(SIZES), "--sizes")
        names = _chosen(only, [*STACKS, *VARIANTS], "--only") + ([] if baseline_tree is None else [BASELINE])
        known = [each.name for each in measurements(scale, chosen_sizes)]
        chosen = _chosen(measure, known, "--measure")

        def progress(line: str) -> None:
            console.print(line, highlight=False, soft_wrap=True)

        # Routers survive a benchmark that ends abruptly: leave by an exception, which stops them.
        signal.signal(signal.SIGTERM, lambda *signalled: sys.exit(143))
        try:
            record = run(
                names,
                scale,
                rounds or (1 if quick else 5),
                seed,
                chosen_sizes,
                only_measurements=chosen,
                profile=profile,
                baseline_tree=baseline_tree,
                fresh=fresh,
                progress=progress,
            )
            if memory:
                record.samples += memory_after(names, memory, seed, progress)
                record.seconds = time.time() - record.started_unix_s
        except (StackError, ChildError) as error:
            typer.secho(str(error), fg="red", err=True)
            raise typer.Exit(2) from error
        if out is not None:
            out.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    if as_markdown:
        typer.echo(markdown(record), nl=False)
    else:
        show(record, console)
        if (observed := watching(record)) is not None:
            console.print(observed, highlight=False)
    if check:
        missed = [finding for finding in check_targets(record.samples) if not finding.met]
        for finding in missed:
            typer.secho(str(finding), fg="red", err=True)
        if missed:
            raise typer.Exit(1)


if __name__ == "__main__":
    app()
