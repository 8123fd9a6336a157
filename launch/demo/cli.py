"""Command ``demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    config: Annotated[Path | None, typer.Option(help="Settings; default: the shipped configs/demo.yaml.")] = None,
    arms: Annotated[
        str | None, typer.Option(help="Policies to run, separated by commas; the first is the baseline.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=10, help="Requests of the generated trace.")] = None,
    clock_scale: Annotated[
        float | None, typer.Option(min=1, help="Speed of the engines relative to real time.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the generated trace.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Directory for the results. Default: runs/demo-<time>.")] = None,
    base_port: Annotated[
        int, typer.Option(min=1024, max=60000, help="First port to try; a free range is searched from there.")
    ] = 18101,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two policies and 80 requests: a look at it in under a minute.")
    ] = False,
) -> None:
    """Compare routing policies on simulated engines: about three minutes, no further requirements.

    Generates a trace of agentic sessions; then, for each policy, starts fresh simulated engines and a proxy, proves
    them fresh, replays the trace and stops everything; then prints a matrix of policies and metrics, and writes an
    HTML report. Ctrl-C stops everything at once (exit status 130).
    """
    if quick:
        arms, requests = arms or "round_robin,warm", requests or 80
    try:
        raise typer.Exit(_run(config, arms, requests, clock_scale, seed, run_dir, base_port))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _run(
    config: Path | None,
    arms: str | None,
    requests: int | None,
    clock_scale: float | None,
    seed: int | None,
    run_dir: Path | None,
    base_port: int,
) -> int:
    from rich.console import Console

    from launch.arm import ArmError
    from launch.demo.run import run_demo
    from launch.demo.settings import DEMO_CONFIG, choose_base_port, load_demo
    from launch.fleet.file import FleetError
    from launch.freshness.proof import StaleEngineError
    from launch.run.processes import StartError
    from launch.run.signals import run_until_signal
    from launch.run.supervisor import new_run_dir
    from replayer.traces.trace import TraceError

    named = [name.strip() for name in arms.split(",") if name.strip()] if arms else None
    try:
        settings = load_demo(
            config or DEMO_CONFIG, arms=named, clock_scale=clock_scale, trace__requests=requests, trace__seed=seed
        )
        base = choose_base_port(settings, base_port)
    except FleetError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    directory = run_dir or new_run_dir("demo")
    try:
        directory.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        typer.echo(f"error: {directory} exists already; choose another --run-dir", err=True)
        return 2
    try:
        return run_until_signal(run_demo(settings, directory, base, Console()))
    except (StartError, StaleEngineError, ArmError, TraceError) as error:
        typer.echo(f"error: {error}", err=True)
        return 1
