"""Commands ``sample``, ``synth`` and ``repeat``: traces out of traces, and traces out of nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

TraceOutput = Annotated[
    Path,
    typer.Option("--output", "-o", help="Trace to write: Bailian-style JSONL, compressed if named .gz or .zst."),
]


def sample_command(
    trace: Annotated[Path, typer.Argument(help="Trace of any known format.", show_default=False)],
    output: TraceOutput,
    target_requests: Annotated[int, typer.Option(min=1, help="About how many requests to keep.")] = 200,
    seed: Annotated[int, typer.Option(help="Which sessions are drawn.")] = 0,
    rebase: Annotated[bool, typer.Option(help="Let time start at 0.")] = True,
    instances: Annotated[int, typer.Option(min=1, help="For the round-robin and sticky APC.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first requests of the trace.")] = None,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per hash id; detected by default.")] = None,
) -> None:
    """Pick whole sessions of a trace; print what that did to lengths, turns and cache sharing.

    A sample thins arrivals: the rate falls with the number of sessions (replay it with a larger --time-scale). A small
    one also starts cold, so its APC lies below the trace's.
    """
    from rich.console import Console

    from replayer.tables import profiles_table
    from replayer.traces.formats import bailian
    from replayer.traces.loading import LoadOptions, load
    from replayer.traces.sample import profile, sample
    from replayer.traces.trace import TraceError

    console = Console()
    try:
        whole = load(trace, LoadOptions(limit=limit, block_tokens=block_tokens))
        picked = sample(whole, target_requests, seed, rebase=rebase)
        bailian.write(output, picked.requests)
        rows = [("before", profile(whole, instances)), ("after", profile(picked, instances))]
    except (TraceError, OSError) as error:
        _stop(error)
    for note in picked.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print(profiles_table(rows))
    console.print(f"written: {output}", markup=False, soft_wrap=True)


def synth_command(
    output: TraceOutput,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 1000,
    rate: Annotated[
        float | None, typer.Option(help="Mean arrivals per second; default 1, or what --duration asks.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Mean length of the trace in seconds, instead of --rate.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per hash id.")] = 64,
    length_scale: Annotated[
        float, typer.Option(help="Multiplies prompt and output lengths; 0.1 makes a small demo.")
    ] = 1.0,
    gap_scale: Annotated[
        float,
        typer.Option(help="Multiplies the requests between a session's turns; more keeps more sessions open at once."),
    ] = 1.0,
) -> None:
    """Make an agentic trace with the published statistics of a production coding agent.

    Prints every target against what was generated, and says where targets contradict each other.
    """
    from rich.console import Console

    from replayer.tables import targets_table
    from replayer.traces.formats import bailian
    from replayer.traces.synth import SynthOptions, synthetic_trace
    from replayer.traces.synth_targets import compare_with_targets
    from replayer.traces.trace import TraceError

    if rate is not None and duration is not None:
        _stop("give --rate or --duration, not both")
    if duration is not None and duration <= 0:
        _stop("--duration must be above 0")
    per_s = requests / duration if duration is not None else (1.0 if rate is None else rate)
    options = SynthOptions(
        requests=requests,
        seed=seed,
        rate_per_s=per_s,
        block_tokens=block_tokens,
        length_scale=length_scale,
        gap_scale=gap_scale,
    )
    try:
        trace = synthetic_trace(options)
        bailian.write(output, trace.requests)
    except (TraceError, OSError) as error:
        _stop(error)
    console = Console()
    console.print(targets_table(compare_with_targets(trace, length_scale, gap_scale)))
    console.print(
        f"written: {output} ({requests:,} requests, {len(trace.sessions()):,} sessions, {trace.duration_s:,.0f} s)",
        markup=False,
        soft_wrap=True,
    )


def repeat_command(
    trace: Annotated[Path, typer.Argument(help="Trace of any known format.", show_default=False)],
    output: TraceOutput,
    times: Annotated[int, typer.Option(min=1, help="How often.")] = 2,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per hash id; detected by default.")] = None,
) -> None:
    """Repeat a trace in time: a long one of the same statistics, for what must run for long.

    Every repetition has sessions and blocks of its own; only blocks that several sessions of the trace share (system
    prompts) stay shared. The new trace is written as it is made, so its length is not bounded by memory.
    """
    from replayer.traces.formats import bailian
    from replayer.traces.loading import LoadOptions, load
    from replayer.traces.repeat import repeated
    from replayer.traces.trace import TraceError

    try:
        whole = load(trace, LoadOptions(block_tokens=block_tokens))
        count = bailian.write(output, repeated(whole, times))
    except (TraceError, OSError) as error:
        _stop(error)
    typer.echo(f"written: {output} ({count:,} requests, {len(whole.sessions()) * times:,} sessions)")


def _stop(error: object) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add ``sample``, ``synth`` and ``repeat`` to an application."""
    app.command("sample")(sample_command)
    app.command("synth")(synth_command)
    app.command("repeat")(repeat_command)
