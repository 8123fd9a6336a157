"""Command ``demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    config: Annotated[
        Path | None, typer.Option(help="Settings file. Default: the shipped configs/demo.yaml.", show_default=False)
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(
            help="Policies, comma-separated; the first is the baseline. Default: the file's.", show_default=False
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=10, help="Requests of the generated trace. Default: the file's.", show_default=False),
    ] = None,
    engine_speed: Annotated[
        float | None,
        typer.Option(min=1, help="Engine seconds per wall second (factor). Default: the file's.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the generated trace. Default: the file's.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New folder for the results. Default: runs/demo-TIME.", show_default=False),
    ] = None,
    base_port: Annotated[
        int, typer.Option(min=1024, max=60000, help="First port to try in the search for a free range.")
    ] = 18101,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run two policies and 80 requests, in under a minute.")
    ] = False,
    ui: Annotated[
        bool, typer.Option("--ui", help="Instead: endless traffic, and the address of the dashboard, until Ctrl-C.")
    ] = False,
) -> None:
    """Compare routing policies on simulated engines, in about three minutes.

    Generates a trace of agentic sessions; then, for each policy, starts fresh simulated engines and a proxy, proves
    them fresh, replays the trace and stops everything; then prints a matrix of policies and metrics, and writes an
    HTML report. Ctrl-C stops everything at once (exit status 130). With --ui nothing is compared: one fleet serves
    endless traffic for the dashboard.
    """
    if quick:
        arms, requests = arms or "round_robin,warm", requests or 80
    try:
        raise typer.Exit(_run(config, arms, requests, engine_speed, seed, output, base_port, ui=ui))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _run(
    config: Path | None,
    arms: str | None,
    requests: int | None,
    engine_speed: float | None,
    seed: int | None,
    output: Path | None,
    base_port: int,
    *,
    ui: bool,
) -> int:
    from rich.console import Console

    from launch.arm import ArmError
    from launch.demo.live import ENGINE_SPEED, run_live
    from launch.demo.run import run_demo
    from launch.demo.settings import DEMO_CONFIG, choose_base_port, load_demo
    from launch.fleet.file import FleetError
    from launch.freshness.proof import StaleEngineError
    from launch.run.processes import StartError
    from launch.run.signals import run_until_signal
    from launch.run.supervisor import new_run_dir
    from replayer.records.runs import RecordError
    from replayer.traces.trace import TraceError

    named = [name.strip() for name in arms.split(",") if name.strip()] if arms else None
    if ui:
        engine_speed = engine_speed or ENGINE_SPEED
    try:
        settings = load_demo(
            config or DEMO_CONFIG, arms=named, clock_scale=engine_speed, trace__requests=requests, trace__seed=seed
        )
        base = choose_base_port(settings, base_port)
    except FleetError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    directory = output or new_run_dir("demo")
    try:
        directory.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        typer.echo(f"error: {directory} exists already; choose another --output", err=True)
        return 2
    except OSError as error:
        typer.echo(f"error: {directory}: {error.strerror}; choose another --output", err=True)
        return 2
    run = run_live if ui else run_demo
    try:
        return run_until_signal(run(settings, directory, base, Console()))
    except (StartError, StaleEngineError, ArmError, RecordError, TraceError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        return 1
