"""Command ``simulate``: a trace on a simulated fleet, in virtual time; one run, or a sweep over settings."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from policies.types import Role

if TYPE_CHECKING:
    from sim.offline.running import Ran
    from sim.offline.setup import Setup


def simulate_command(
    trace: Annotated[
        Path, typer.Argument(help="Trace of any format that `warmroute replay` reads.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Run file to write (JSONL), default run.jsonl; with --sweep a folder, default sweep. Must be new.",
            show_default=False,
        ),
    ] = None,
    breakdown: Annotated[
        Path | None,
        typer.Option(help="Also write a row per request, with every candidate's score, as the proxy's /breakdown."),
    ] = None,
    policy: Annotated[str, typer.Option(help="Routing policy by name.")] = "warm",
    policy_param: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, a parameter of the policy; repeatable.", show_default=False)
    ] = None,
    planner: Annotated[str, typer.Option(help="Offload planner by name.")] = "never",
    planner_param: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, a parameter of the planner; repeatable.", show_default=False)
    ] = None,
    instances: Annotated[int, typer.Option(min=1, help="Instances of the fleet.")] = 8,
    prefill_instances: Annotated[
        int,
        typer.Option(
            min=0, help="Number of instances that only prefill, the others only decode; 0: roles from --role."
        ),
    ] = 0,
    role: Annotated[
        Role | None,
        typer.Option(help="Role of every instance; default: kv_both with a planner other than never, else none."),
    ] = None,
    profile: Annotated[str, typer.Option(help="Hardware profile: a name in configs/hardware or a YAML file.")] = "h200",
    pool_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV pool of each instance in tokens; default: the profile's.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token budget of a step; default: the profile's.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Most requests running on an instance; default: the profile's.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt plus output; default: what profile and pool allow.")
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="How KV moves between instances; default: the profile's default transport.")
    ] = None,
    time_scale: Annotated[float, typer.Option(help="Sessions arrive this many times faster.")] = 1.0,
    think_scale: Annotated[
        float | None,
        typer.Option(help="Think times between turns are divided by this; default: --time-scale."),
    ] = None,
    request_limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of requests to send: whole sessions by arrival, the last one cut to fit; with --stream the "
            "first.",
        ),
    ] = None,
    idle_gap_cap_s: Annotated[
        float, typer.Option("--idle-gap-cap", min=0, help="Longest think time, seconds of the trace.")
    ] = 60.0,
    max_inflight_sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Most sessions in progress at once, thinking ones included; default: no limit."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise; equal seeds give equal bytes.")] = 0,
    arrival_jitter_s: Annotated[
        float, typer.Option(min=0, help="Noise: standard deviation of a session's arrival, seconds.")
    ] = 0.0,
    speed_sigma: Annotated[
        float, typer.Option(min=0, max=1, help="Noise: spread of the instances' step times (log-normal).")
    ] = 0.0,
    slowdown: Annotated[float, typer.Option(help="Every step takes this many times as long.")] = 1.0,
    label: Annotated[str, typer.Option(help="Name of the run in tables and reports; default: the policy's.")] = "",
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Read the trace as it is used, by a second process: for traces beyond memory."),
    ] = False,
    look_ahead_s: Annotated[
        float, typer.Option(min=0, help="With --stream: distance read ahead of the clock, seconds of the trace.")
    ] = 600.0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=V1,V2,...: simulate every combination; repeatable. KEY is an option's name without dashes, "
            "policy.PARAMETER or planner.PARAMETER.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="With --sweep: parallel processes; default: one per processor.")
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="With --sweep: on the Ray cluster that RAY_ADDRESS names (pip install 'warmroute[ray]')."
        ),
    ] = False,
) -> None:
    """Simulate a fleet under a routing policy on a trace, in virtual time, without engines or GPUs.

    The engines are those of `warmroute engine`, the decisions those of `warmroute serve`. Sessions arrive by the
    trace's clock; the next turn is sent after the one before has ended and the think time has passed. The run file is
    that of `warmroute replay`: summary, compare and report read it. Its times are engine seconds from the start of the
    run.

    With --sweep, --output is a folder: it gets a run file for every combination, and sweep.json with the figures.
    """
    from policies.registry import PolicyParameterError, UnknownPolicyError
    from replayer.traces.trace import TraceError
    from sim.offline.options import SimulationError
    from sim.offline.setup import Setup, parsed_params

    try:
        setup = Setup(
            trace=str(trace),
            policy=policy,
            policy_params=parsed_params(policy_param or []),
            planner=planner,
            planner_params=parsed_params(planner_param or []),
            instances=instances,
            prefill_instances=prefill_instances,
            role=role,
            profile=profile,
            pool_tokens=pool_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            transport=transport,
            time_scale=time_scale,
            think_scale=think_scale,
            request_limit=request_limit,
            idle_gap_cap_s=idle_gap_cap_s,
            max_inflight_sessions=max_inflight_sessions,
            seed=seed,
            arrival_jitter_s=arrival_jitter_s,
            speed_sigma=speed_sigma,
            slowdown=slowdown,
            label=label,
        )
        if not sweep and (ray or jobs is not None):
            _stop("--jobs and --ray are for sweeps: give --sweep KEY=V1,V2,...")
        if sweep and (stream or breakdown is not None):
            _stop("--sweep cannot be given together with --stream or --breakdown")
        if sweep:
            failed = _sweep(setup, sweep, output or Path("sweep"), jobs, ray)
            raise typer.Exit(1 if failed else 0)
        setup.check()
        _run(setup, output or Path("run.jsonl"), breakdown, look_ahead_s if stream else None)
    except FileExistsError as error:
        _stop(f"{error.filename}: already exists; give another name, or remove it")
    except (SimulationError, TraceError, UnknownPolicyError, PolicyParameterError, OSError) as error:
        _stop(error)


def _run(setup: Setup, output: Path, breakdown: Path | None, look_ahead_s: float | None) -> None:
    """Simulate once and print the result; with ``look_ahead_s`` None the trace is loaded whole."""
    from sim.offline.running import new_files, run_setup, run_streamed

    started_s = time.perf_counter()
    with new_files(output, breakdown) as (lines, rows):
        assert lines is not None
        if look_ahead_s is None:
            ran = run_setup(setup, lines, rows)
        else:
            ran = run_streamed(setup, look_ahead_s, lines, rows)
    _show(setup, ran, time.perf_counter() - started_s, output)


def _show(setup: Setup, ran: Ran, took_s: float, output: Path) -> None:
    from rich.console import Console

    from sim.offline.tables import figures_table, load_line

    console = Console()
    for note in ran.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print(figures_table([(setup.label or setup.policy, ran.outcome.figures(), None)]))
    for error, count in ran.outcome.errors.items():
        console.print(f"failed: {count:,} x {error}", markup=False, soft_wrap=True)
    console.print(load_line(ran), markup=False, soft_wrap=True)
    requests = ran.end.requests
    console.print(f"{requests:,} requests in {took_s:.1f} s, reading the trace included", soft_wrap=True)
    console.print(f"written: {output}", markup=False, soft_wrap=True)


def _sweep(setup: Setup, sweeps: list[str], folder: Path, jobs: int | None, ray: bool) -> bool:
    """Simulate every combination and print the table; returns True if any failed."""
    from rich.console import Console

    from sim.offline.sweep import Point, PointResult, in_processes, on_ray, points_of, run_sweep
    from sim.offline.tables import figures_table

    console = Console()
    points = points_of(setup, sweeps)
    execute = on_ray(setup) if ray else in_processes(jobs or len(os.sched_getaffinity(0)))

    def done(point: Point, result: PointResult) -> None:
        console.print(f"{result.error or 'done'}: {point.name}", markup=False, soft_wrap=True)

    results = run_sweep(points, setup, folder, execute, done)
    console.print(figures_table([(point.name, result.figures, result.error) for point, result in results]))
    console.print(f"written: {folder} (sweep.json and {len(points)} run files)", markup=False, soft_wrap=True)
    return any(result.error is not None for _, result in results)


def _stop(error: object) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add ``simulate`` to an application."""
    app.command("simulate")(simulate_command)
