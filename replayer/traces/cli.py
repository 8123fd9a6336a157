"""Command group ``trace``: ``synth`` generates a trace, ``sample`` and ``repeat`` derive one from another."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

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
    from replayer.traces.trace import TraceRequest

TraceOutput = Annotated[
    Path,
    typer.Option("--output", "-o", help="New trace to write: Bailian-style JSONL, compressed if named .gz or .zst."),
]


def sample_command(
    trace: Annotated[Path, typer.Argument(help="Trace of any known format.", show_default=False)],
    output: TraceOutput,
    target_requests: Annotated[int, typer.Option(min=1, help="Approximate number of requests to keep.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the draw of sessions.")] = 0,
    rebase: Annotated[bool, typer.Option(help="Shift times so that the first request arrives at 0 s.")] = True,
    instances: Annotated[int, typer.Option(min=1, help="Instances assumed for the round-robin and sticky APC.")] = 8,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read at most this many requests. Default: all.", show_default=False)
    ] = None,
    block_tokens: BlockTokens = None,
    time_unit: Unit = TimeUnit.AUTO,
    sessions: SessionsOption = Sessions.DERIVED,
    chain: ChainOption = Chain.REPAIR,
    allow_deltas: AllowDeltas = False,
) -> None:
    """Pick whole sessions of a trace; print lengths, turns and cache sharing before and after.

    A sample thins arrivals: the rate falls with the number of sessions (replay it with a larger --arrival-speed). A
    small one also starts cold, so its APC is below the trace's.
    """
    from rich.console import Console

    from replayer.records.outputs import ExistingOutputError, OverwritesInputError, refuse_existing, refuse_inputs
    from replayer.traces.loading import LoadOptions, load
    from replayer.traces.sample import profile, sample
    from replayer.traces.tables import profiles_table
    from replayer.traces.trace import TraceError

    console = Console()
    try:
        refuse_inputs(output, [trace])
        refuse_existing(output)
        whole = load(
            trace,
            LoadOptions(
                limit=limit,
                block_tokens=block_tokens,
                time_unit=time_unit.value,
                sessions=sessions.value,
                chain=chain.value,
                allow_deltas=allow_deltas,
            ),
        )
        picked = sample(whole, target_requests, seed, rebase=rebase)
        _write(output, picked.requests)
        rows = [("before", profile(whole, instances)), ("after", profile(picked, instances))]
    except (OverwritesInputError, ExistingOutputError, TraceError, OSError) as error:
        _stop(error)
    for note in picked.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print(profiles_table(rows))
    console.print(f"written: {output}", markup=False, soft_wrap=True)


def synth_command(
    output: TraceOutput,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 1000,
    rate_per_s: Annotated[
        float | None,
        typer.Option(
            callback=finite, help="Mean arrivals per second. Default: 1, or as --duration-s gives.", show_default=False
        ),
    ] = None,
    duration_s: Annotated[
        float | None,
        typer.Option(
            callback=finite, help="Mean length of the trace in seconds, instead of --rate-per-s.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed; equal seeds give equal bytes.")] = 0,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per hash id.")] = 64,
    length_scale: Annotated[
        float, typer.Option(callback=finite, help="Factor on prompt and output lengths; 0.1 gives a small demo.")
    ] = 1.0,
    gap_scale: Annotated[
        float,
        typer.Option(
            callback=finite, help="Factor on the requests between a session's turns; more keeps more sessions open."
        ),
    ] = 1.0,
) -> None:
    """Generate an agentic trace with the published statistics of a production coding agent.

    Prints every target beside the generated value, and where targets contradict each other.
    """
    from rich.console import Console

    from replayer.records.outputs import ExistingOutputError, refuse_existing
    from replayer.traces.synth import SynthOptions, synthetic_trace
    from replayer.traces.synth_targets import compare_with_targets
    from replayer.traces.tables import targets_table
    from replayer.traces.trace import TraceError

    if rate_per_s is not None and duration_s is not None:
        _stop("give --rate-per-s or --duration-s, not both")
    if duration_s is not None and duration_s <= 0:
        _stop("--duration-s must be above 0")
    per_s = requests / duration_s if duration_s is not None else (1.0 if rate_per_s is None else rate_per_s)
    options = SynthOptions(
        requests=requests,
        seed=seed,
        rate_per_s=per_s,
        block_tokens=block_tokens,
        length_scale=length_scale,
        gap_scale=gap_scale,
    )
    try:
        refuse_existing(output)
        trace = synthetic_trace(options)
        _write(output, trace.requests)
    except (ExistingOutputError, TraceError, OSError) as error:
        _stop(error)
    console = Console()
    console.print(targets_table(compare_with_targets(trace, length_scale, gap_scale)))
    console.print(
        f"written: {output} ({counted(requests, 'request')}, {counted(len(trace.sessions()), 'session')}, "
        f"{trace.duration_s:,.0f} s)",
        markup=False,
        soft_wrap=True,
    )


def repeat_command(
    trace: Annotated[Path, typer.Argument(help="Trace of any known format.", show_default=False)],
    output: TraceOutput,
    times: Annotated[int, typer.Option(min=1, help="Number of repetitions.")] = 2,
    block_tokens: BlockTokens = None,
    time_unit: Unit = TimeUnit.AUTO,
    sessions: SessionsOption = Sessions.DERIVED,
    chain: ChainOption = Chain.REPAIR,
    allow_deltas: AllowDeltas = False,
) -> None:
    """Repeat a trace in time: a longer trace of the same statistics, for long runs.

    Every repetition has its own sessions and blocks; only blocks that several sessions of the trace share (system
    prompts) stay shared. Requests are written one by one, so memory does not limit the length.
    """
    from replayer.records.outputs import ExistingOutputError, OverwritesInputError, refuse_existing, refuse_inputs
    from replayer.traces.loading import LoadOptions, load
    from replayer.traces.repeat import repeated
    from replayer.traces.trace import TraceError

    try:
        refuse_inputs(output, [trace])
        refuse_existing(output)
        whole = load(
            trace,
            LoadOptions(
                block_tokens=block_tokens,
                time_unit=time_unit.value,
                sessions=sessions.value,
                chain=chain.value,
                allow_deltas=allow_deltas,
            ),
        )
        count = _write(output, repeated(whole, times))
    except (OverwritesInputError, ExistingOutputError, TraceError, OSError) as error:
        _stop(error)
    if any(request.text is not None for request in whole.requests):
        typer.echo("note: the text of the prompts is left out, as that of all repetitions would share a cache")
    typer.echo(f"written: {output} ({counted(count, 'request')}, {counted(len(whole.sessions()) * times, 'session')})")


def _write(output: Path, requests: Iterable[TraceRequest]) -> int:
    """Write a trace, of which a signal leaves nothing; the number of its requests."""
    from replayer.records.outputs import exit_on_signals, not_written
    from replayer.traces.formats import bailian

    try:
        with exit_on_signals():
            return bailian.write(output, requests)
    except OSError as error:
        _stop(not_written(error, output))


def _stop(error: object) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add the group ``trace`` to an application."""
    group = typer.Typer(no_args_is_help=True, help="Generate, sample and repeat traces.")
    group.command("synth")(synth_command)
    group.command("sample")(sample_command)
    group.command("repeat")(repeat_command)
    app.add_typer(group, name="trace")
