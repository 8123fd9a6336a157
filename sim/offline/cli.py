"""Command ``simulate``: a trace on a simulated fleet, in virtual time; one run, or a sweep over settings."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from policies.admission.base import DEFAULT_RULE, MAX_HOLD_S
from policies.types import Role
from replayer.records.counted import counted
from replayer.traces.load_options import (
    AllowDeltas,
    BlockTokens,
    Chain,
    ChainOption,
    Sessions,
    SessionsOption,
    TimeUnit,
    Unit,
)
from replayer.traces.numbers import finite

if TYPE_CHECKING:
    from sim.offline.running import Ran
    from sim.offline.setup import Setup

LOOK_AHEAD_S = 600.0
"""Distance that a stream is read ahead of the clock unless another is given, seconds of the trace."""


def simulate_command(
    trace: Annotated[
        Path, typer.Argument(help="Trace of any format that `warmroute replay` reads.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="New run file (JSONL), default run.jsonl; with --sweep a new folder, default sweep.",
            show_default=False,
        ),
    ] = None,
    breakdown_output: Annotated[
        Path | None,
        typer.Option(
            help="Also write the proxy's /breakdown rows to this file (JSONL). Default: not written.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Name of the routing policy, or MODULE:Class.")] = "warm",
    policy_param: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE: parameter of the policy. Repeatable.", show_default=False)
    ] = None,
    planner: Annotated[str, typer.Option(help="Name of the offload planner, or MODULE:Class.")] = "never",
    planner_param: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE: parameter of the planner. Repeatable.", show_default=False)
    ] = None,
    admission: Annotated[str, typer.Option(help="Name of the admission rule, or MODULE:Class.")] = DEFAULT_RULE,
    admission_param: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE: parameter of the admission rule. Repeatable.", show_default=False),
    ] = None,
    max_hold_s: Annotated[
        float, typer.Option(callback=finite, help="Most seconds for which the admission rule may hold a request.")
    ] = MAX_HOLD_S,
    instances: Annotated[int, typer.Option(min=1, help="Number of instances.")] = 8,
    prefill_instances: Annotated[
        int,
        typer.Option(min=0, help="Number of instances that only prefill, the others only decode; 0: as --role says."),
    ] = 0,
    role: Annotated[
        Role | None,
        typer.Option(
            help="Of every instance, not kv_producer. Default: kv_both with a planner, joint or migrate, else none.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[str, typer.Option(help="Hardware profile: a name in configs/hardware or a YAML file.")] = "h200",
    pool_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="KV pool of each instance in tokens. Default: the profile's.", show_default=False),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token budget of a step. Default: the profile's.", show_default=False)
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Most running requests of an instance. Default: the profile's.", show_default=False),
    ] = None,
    scheduling_policy: Annotated[
        str,
        typer.Option(help="Order of waiting requests: fcfs, or priority, which a policy with a slowdown sets."),
    ] = "fcfs",
    long_prefill_token_threshold: Annotated[
        int, typer.Option(min=0, help="Most tokens of a step for one request; 0: the whole budget.")
    ] = 0,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Most tokens of prompt plus output. Default: the profile's limit, at most the pool.",
            show_default=False,
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="KV transport of the profile. Default: the profile's default.", show_default=False),
    ] = None,
    arrival_speed: Annotated[
        float, typer.Option(callback=finite, help="Sessions arrive this many times faster than in the trace (factor).")
    ] = 1.0,
    think_speed: Annotated[
        float | None,
        typer.Option(
            callback=finite,
            help="Think times pass this many times faster (factor). Default: --arrival-speed.",
            show_default=False,
        ),
    ] = None,
    request_limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Send at most this many requests, in whole sessions by arrival. Default: all.",
            show_default=False,
        ),
    ] = None,
    idle_gap_cap_s: Annotated[
        float, typer.Option(callback=finite, min=0, help="Longest think time, seconds of the trace.")
    ] = 60.0,
    block_tokens: BlockTokens = None,
    time_unit: Unit = TimeUnit.AUTO,
    sessions: SessionsOption = Sessions.DERIVED,
    chain: ChainOption = Chain.REPAIR,
    allow_deltas: AllowDeltas = False,
    max_inflight_sessions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most sessions open at once, thinking ones included. Default: no limit.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise; equal seeds give equal bytes.")] = 0,
    arrival_jitter_s: Annotated[
        float, typer.Option(callback=finite, min=0, help="Noise: standard deviation of session arrivals, seconds.")
    ] = 0.0,
    speed_sigma: Annotated[
        float, typer.Option(callback=finite, min=0, max=1, help="Noise: log-normal sigma of the instances' step times.")
    ] = 0.0,
    slowdown: Annotated[float, typer.Option(callback=finite, help="Factor on the duration of every step.")] = 1.0,
    speeds: Annotated[
        str,
        typer.Option(help="Speed of each instance over the profile's, in turn: of 1,0.5 every second is half as fast."),
    ] = "",
    label: Annotated[str, typer.Option(help="Name of the run in tables and reports. Default: the policy's name.")] = "",
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Read the trace while simulating, in a second process: for traces beyond memory."
        ),
    ] = False,
    look_ahead_s: Annotated[
        float | None,
        typer.Option(
            callback=finite,
            min=0,
            help=f"With --stream: read ahead of the clock by this, seconds of the trace. Default: {LOOK_AHEAD_S:g}.",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=V1,V2,...: every combination; KEY: an option, or policy.X, planner.X or admission.X. Repeatable.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="With --sweep: parallel processes. Default: one per processor.", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --sweep: continue the sweep in --output that was stopped or killed.")
    ] = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="With --sweep: on the Ray cluster that RAY_ADDRESS names (pip install 'warmroute[ray]')."
        ),
    ] = False,
) -> None:
    """Simulate a fleet and a routing policy on a trace, in virtual time.

    The engines are those of `warmroute sim engine`, the decisions those of `warmroute serve`. Sessions arrive by the
    trace's clock; a turn is sent when the one before has ended and its think time has passed. The run file has the
    format of `warmroute replay`: summary, compare and report read it. Times are engine seconds from the start of the
    run. Exit status 1: no request succeeded. Files appear when they are complete: a run that is stopped leaves none.

    With --sweep, --output is a folder: it gets a run file for every combination, and sweep.json with the figures.
    """
    from policies.registry import PolicyParameterError, UnknownPolicyError
    from policies.types import NoCandidateError, PolicyFailedError
    from replayer.records.outputs import exit_on_signals, not_written
    from replayer.traces.trace import TraceError
    from sim.offline.options import SimulationError
    from sim.offline.setup import Setup, parsed_params, parsed_speeds

    # Where a MODULE:Class is looked for last; a sweep's processes get this path too.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)

    try:
        setup = Setup(
            trace=str(trace),
            policy=policy,
            policy_params=parsed_params(policy_param or []),
            planner=planner,
            planner_params=parsed_params(planner_param or []),
            admission=admission,
            admission_params=parsed_params(admission_param or []),
            max_hold_s=max_hold_s,
            instances=instances,
            prefill_instances=prefill_instances,
            role=role,
            profile=profile,
            pool_tokens=pool_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_model_len=max_model_len,
            transport=transport,
            time_scale=arrival_speed,
            think_scale=think_speed,
            request_limit=request_limit,
            idle_gap_cap_s=idle_gap_cap_s,
            block_tokens=block_tokens,
            time_unit=time_unit.value,
            sessions=sessions.value,
            chain=chain.value,
            allow_deltas=allow_deltas,
            max_inflight_sessions=max_inflight_sessions,
            seed=seed,
            arrival_jitter_s=arrival_jitter_s,
            speed_sigma=speed_sigma,
            slowdown=slowdown,
            speeds=parsed_speeds(speeds),
            label=label,
        )
        if not sweep and (ray or resume or jobs is not None):
            _stop("--jobs, --resume and --ray are for sweeps: give --sweep KEY=V1,V2,...")
        if not stream and look_ahead_s is not None:
            _stop("--look-ahead-s is for streams: give --stream too")
        if sweep and (stream or breakdown_output is not None):
            _stop("--sweep cannot be given together with --stream or --breakdown-output")
        if breakdown_output is not None and breakdown_output.resolve() == (output or Path("run.jsonl")).resolve():
            _stop("--output and --breakdown-output name one file: give two")
        with exit_on_signals():
            if sweep:
                failed = _sweep(setup, sweep, output or Path("sweep"), jobs, ray=ray, resume=resume)
                raise typer.Exit(1 if failed else 0)
            setup.check()
            ahead_s = LOOK_AHEAD_S if look_ahead_s is None else look_ahead_s
            _run(setup, output or Path("run.jsonl"), breakdown_output, ahead_s if stream else None)
    except FileExistsError as error:
        _stop(f"{error.filename}: already exists; give another name, or remove it")
    except (SimulationError, TraceError, UnknownPolicyError, PolicyParameterError, PolicyFailedError, OSError) as error:
        outputs = {str(output or "run.jsonl"): "--output", str(breakdown_output): "--breakdown-output"}
        if isinstance(error, OSError) and error.filename in outputs:
            _stop(not_written(error, Path(error.filename), outputs[error.filename]))
        _stop(error)
    except NoCandidateError as error:
        _stop(f"{error}: policy {policy} accepts none of the instances")


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
    if ran.outcome.requests and not ran.outcome.ok:
        reason, count = max(ran.outcome.errors.items(), key=lambda each: each[1])
        # With a reason, since an experiment shows this line alone.
        typer.echo(f"error: none of {ran.outcome.requests:,} requests succeeded: {count:,} x {reason}", err=True)
        raise typer.Exit(1)


def _show(setup: Setup, ran: Ran, took_s: float, output: Path) -> None:
    from rich.console import Console

    from replayer.records.columns import print_table
    from sim.offline.tables import figures_table, load_line, sessions_table

    console = Console()
    for note in ran.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    rows = [(setup.label or setup.policy, ran.outcome.figures(), None)]
    print_table(console, figures_table(rows))
    print_table(console, sessions_table(rows))
    for error, count in ran.outcome.errors.items():
        console.print(f"failed: {count:,} x {error}", markup=False, soft_wrap=True)
    if short := ran.outcome.short_outputs:
        console.print(
            f"outputs cut short: {short:,}, where prompt and output exceed --max-model-len (at most the KV pool)",
            soft_wrap=True,
        )
    console.print(load_line(ran), markup=False, soft_wrap=True)
    requests = ran.end.requests
    console.print(f"{counted(requests, 'request')} in {took_s:.1f} s, reading the trace included", soft_wrap=True)
    console.print(f"written: {output}", markup=False, soft_wrap=True)


def _sweep(setup: Setup, sweeps: list[str], folder: Path, jobs: int | None, *, ray: bool, resume: bool) -> bool:
    """Simulate every combination and print the table; returns True if any failed."""
    from rich.console import Console

    from replayer.records.columns import print_table
    from sim.offline.sweeps.sweep import Point, PointResult, in_processes, on_ray, points_of, run_sweep
    from sim.offline.tables import figures_table, sessions_table

    console = Console()
    points = points_of(setup, sweeps)
    execute = on_ray(setup) if ray else in_processes(jobs or len(os.sched_getaffinity(0)))

    def done(point: Point, result: PointResult) -> None:
        console.print(f"{result.error or 'done'}: {point.name}", markup=False, soft_wrap=True)

    results = run_sweep(points, setup, folder, execute, done, resume=resume)
    rows = [(point.name, result.figures, result.error) for point, result in results]
    print_table(console, figures_table(rows))
    print_table(console, sessions_table(rows))
    written = sum(result.error is None for _, result in results)  # a failed point has no run file
    files = f"{written} run file{'' if written == 1 else 's'}"
    console.print(f"written: {folder} (sweep.json and {files})", markup=False, soft_wrap=True)
    return any(result.error is not None for _, result in results)


def _stop(error: object) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add ``simulate`` to an application."""
    app.command("simulate")(simulate_command)
