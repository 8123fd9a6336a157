"""Commands ``replay`` and ``summary``; the others are in `replayer.traces.cli` and `replayer.report.cli`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from replayer.traces.loading import LoadOptions

EXIT_INTERRUPTED = 130


class PromptMode(StrEnum):
    """What a prompt is sent as."""

    TOKENS = "tokens"
    TEXT = "text"
    CHAT = "chat"


class TimeUnit(StrEnum):
    """Unit of a trace's timestamps."""

    AUTO = "auto"
    S = "s"
    MS = "ms"
    US = "us"


class Sessions(StrEnum):
    """Where sessions come from when a trace has none."""

    DERIVED = "derived"
    SINGLE = "single"


class Chain(StrEnum):
    """What to do with ids that are not chained."""

    REPAIR = "repair"
    KEEP = "keep"
    ERROR = "error"


TracePath = Annotated[
    Path,
    typer.Argument(
        help="Trace: Bailian-style or Mooncake JSONL, agent text JSONL (each plain, .gz or .zst), or kv-cache-tester "
        "JSON (a file, a folder, .tar.zst, .tar.gz). The format is detected.",
        show_default=False,
    ),
]
BlockTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens per hash id; detected from the lengths when not given.")
]
Unit = Annotated[
    TimeUnit, typer.Option(help="Unit of timestamps; 'auto' takes the format's own and refuses unbelievable rates.")
]
SessionsOption = Annotated[
    Sessions, typer.Option(help="For traces without sessions (Mooncake): guess by prefix chaining, or none.")
]
ChainOption = Annotated[
    Chain, typer.Option(help="Ids that follow different parents: renumber them, keep them, or stop.")
]
AllowDeltas = Annotated[bool, typer.Option("--allow-deltas", help="Take prompts that do not repeat their history.")]


def replay_command(
    trace: TracePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Run file to write (JSONL).")] = Path("run.jsonl"),
    endpoint: Annotated[str, typer.Option(help="OpenAI endpoint, with or without /v1.")] = "http://127.0.0.1:9090",
    model: Annotated[str | None, typer.Option(help="Model name; by default the first of /v1/models.")] = None,
    label: Annotated[str, typer.Option(help="Name of the run in tables and reports.")] = "",
    time_scale: Annotated[float, typer.Option(help="Arrivals of sessions come this many times faster.")] = 1.0,
    think_scale: Annotated[
        float | None,
        typer.Option(help="Think times between turns pass this many times faster; default: as --time-scale."),
    ] = None,
    clock_scale: Annotated[
        float,
        typer.Option(
            help="The engines run this many times faster than real (simulated ones). All seconds given and reported "
            "are engine seconds = wall seconds times this."
        ),
    ] = 1.0,
    max_inflight_sessions: Annotated[
        int | None, typer.Option(min=1, help="Sessions under way at once, thinking ones included; default: no limit.")
    ] = None,
    request_limit: Annotated[
        int | None,
        typer.Option(min=1, help="Send so many requests: whole sessions by arrival, the last one cut to fit."),
    ] = None,
    idle_gap_cap: Annotated[float, typer.Option(min=0, help="Longest think time, seconds of the trace.")] = 60.0,
    timeout: Annotated[float, typer.Option(help="Seconds for one request, from sending to its last byte.")] = 3600.0,
    seed: Annotated[int, typer.Option(help="Chooses the tokens that ids stand for.")] = 0,
    prompt_mode: Annotated[
        PromptMode,
        typer.Option(help="'tokens': exact lengths and sharing. 'text' and 'chat': words, inexact."),
    ] = PromptMode.TOKENS,
    token_low: Annotated[int, typer.Option(min=0, help="Smallest token id in prompts.")] = 1000,
    token_high: Annotated[
        int, typer.Option(min=1, help="One more than the largest token id; at most the vocabulary's size.")
    ] = 100_000,
    block_tokens: BlockTokens = None,
    time_unit: Unit = TimeUnit.AUTO,
    sessions: SessionsOption = Sessions.DERIVED,
    chain: ChainOption = Chain.REPAIR,
    allow_deltas: AllowDeltas = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted --output; recorded requests are not sent again.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="WARMROUTE_API_KEY", help="Sent as bearer token.", show_default=False)
    ] = None,
) -> None:
    """Replay a trace against an OpenAI endpoint and record every request.

    Sessions arrive by the trace's clock (open loop); the turns of one session are sent strictly one after the other.
    The load this offers is printed before anything is sent. Every request ends in exactly one record; Ctrl-C leaves a
    file that --resume goes on with (exit code 130).
    """
    import asyncio

    import uvloop
    from rich.console import Console

    from replayer.records.runs import RecordError
    from replayer.records.summary import summarise
    from replayer.replay.endpoint import EndpointError
    from replayer.replay.plan import PlanOptions
    from replayer.replay.progress import ReplayProgress
    from replayer.replay.replay import ReplayOptions, replay_trace
    from replayer.tables import summary_lines, summary_table
    from replayer.traces.loading import load
    from replayer.traces.trace import TraceError

    console = Console()
    try:
        loaded = load(trace, _load_options(None, block_tokens, time_unit, sessions, chain, idle_gap_cap, allow_deltas))
        options = ReplayOptions(
            endpoint=endpoint,
            model=model,
            label=label,
            plan=PlanOptions(
                time_scale=time_scale,
                think_scale=think_scale,
                request_limit=request_limit,
                idle_gap_cap_s=idle_gap_cap,
            ),
            clock_scale=clock_scale,
            max_inflight_sessions=max_inflight_sessions,
            timeout_s=timeout,
            seed=seed,
            prompt_mode=prompt_mode.value,
            token_low=token_low,
            token_high=token_high,
            api_key=api_key,
        )
        for note in loaded.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        with ReplayProgress(console) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run = runner.run(
                replay_trace(
                    loaded, output, options, resume=resume, on_start=progress.start, on_record=progress.advance
                )
            )
    except KeyboardInterrupt:
        typer.echo(f"interrupted; what was recorded is in {output}; go on with --resume", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (TraceError, RecordError, EndpointError, ValueError, OSError) as error:
        _stop(error)
    summary = summarise(run)
    console.print(summary_table(summary))
    for line in summary_lines(summary):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"written: {output}", markup=False, soft_wrap=True)


def summary_command(
    run: Annotated[Path, typer.Argument(help="Run file written by `warmroute replay`.", show_default=False)],
    warm_below: Annotated[int, typer.Option(min=1, help="WARM: fewer new tokens than this.")] = 5_000,
    heavy_from: Annotated[int, typer.Option(min=1, help="HEAVY: as many new tokens or more.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Summarise a run: success, latencies by class, cache hits, prediction error, failures by reason."""
    from rich.console import Console

    from replayer.records.runs import RecordError, read_run
    from replayer.records.summary import summarise, summary_dict
    from replayer.tables import summary_lines, summary_table

    if heavy_from < warm_below:
        _stop("--heavy-from must not be below --warm-below")
    try:
        summary = summarise(read_run(run), warm_below=warm_below, heavy_from=heavy_from)
    except (RecordError, OSError) as error:
        _stop(error)
    console = Console()
    if as_json:
        import json

        typer.echo(json.dumps(summary_dict(summary), indent=2))
        return
    console.print(summary_table(summary))
    for line in summary_lines(summary):
        console.print(line, markup=False, soft_wrap=True)


def _load_options(
    limit: int | None,
    block_tokens: int | None,
    time_unit: TimeUnit,
    sessions: Sessions,
    chain: Chain,
    idle_gap_cap_s: float,
    allow_deltas: bool,
) -> LoadOptions:
    from replayer.traces.loading import LoadOptions

    return LoadOptions(
        limit=limit,
        block_tokens=block_tokens,
        time_unit=time_unit.value,
        sessions=sessions.value,
        chain=chain.value,
        idle_gap_cap_s=idle_gap_cap_s,
        allow_deltas=allow_deltas,
    )


def _stop(error: object) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add the replayer's commands to an application."""
    from replayer.report import cli as report_cli
    from replayer.traces import cli as trace_cli

    app.command("replay")(replay_command)
    trace_cli.register(app)
    app.command("summary")(summary_command)
    report_cli.register(app)
