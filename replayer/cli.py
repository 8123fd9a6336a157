"""Commands ``replay`` and ``summary``; the others are in `replayer.traces.cli`, `.compare.cli` and `.report.cli`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

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
from warmroute_tls import CaFile, CertFile, CertKeyFile, TlsFiles

EXIT_INTERRUPTED = 130


class PromptMode(StrEnum):
    """Form in which a prompt is sent."""

    TOKENS = "tokens"
    TEXT = "text"
    CHAT = "chat"


TracePath = Annotated[
    Path,
    typer.Argument(
        help="Trace: Bailian-style, Mooncake, kv-cache-tester, agent text, Azure or BurstGPT. Detected.",
        show_default=False,
    ),
]


def _sendable_key(key: str | None) -> str | None:
    """Refuse a key that no header can carry, here: the HTTP library's error would name the endpoint."""
    if key and not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("the key has a line break or another character that no header can carry")
    return key


def replay_command(
    trace: TracePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Run file to write (JSONL).")] = Path("run.jsonl"),
    endpoint: Annotated[str, typer.Option(help="OpenAI endpoint, with or without /v1.")] = "http://127.0.0.1:9090",
    model: Annotated[
        str | None, typer.Option(help="Model name. Default: the first of /v1/models.", show_default=False)
    ] = None,
    label: Annotated[
        str,
        typer.Option(help="Name of the run in tables and reports. Default: its file's.", show_default=False),
    ] = "",
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
    engine_speed: Annotated[
        float,
        typer.Option(callback=finite, help="Simulated engines: engine seconds per wall second (factor)."),
    ] = 1.0,
    max_inflight_sessions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most sessions open at once, thinking ones included. Default: no limit.", show_default=False
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
    timeout_s: Annotated[
        float, typer.Option(callback=finite, help="Limit of one request from sending to its last byte, engine seconds.")
    ] = 3600.0,
    seed: Annotated[int, typer.Option(help="Seed of the tokens that hash ids stand for.")] = 0,
    prompt_mode: Annotated[
        PromptMode,
        typer.Option(help="tokens: exact lengths and sharing. text, chat: words, approximate."),
    ] = PromptMode.TOKENS,
    token_low: Annotated[int, typer.Option(min=0, help="Smallest token id in prompts.")] = 1000,
    token_high: Annotated[
        int, typer.Option(min=1, help="Largest token id in prompts plus one; at most the vocabulary size.")
    ] = 100_000,
    block_tokens: BlockTokens = None,
    time_unit: Unit = TimeUnit.AUTO,
    sessions: SessionsOption = Sessions.DERIVED,
    chain: ChainOption = Chain.REPAIR,
    allow_deltas: AllowDeltas = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted --output; recorded requests are not sent again.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="WARMROUTE_API_KEY",
            help="API key, sent as bearer token.",
            show_default=False,
            callback=_sendable_key,
        ),
    ] = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    cert_key_file: CertKeyFile = None,
) -> None:
    """Replay a trace against an OpenAI endpoint and record every request.

    Sessions arrive as timed in the trace (open loop); the turns of a session are sent one after the other. The offered
    load is printed before anything is sent. Every request ends in exactly one record; after Ctrl-C (exit status 130) or
    SIGTERM (143), --resume continues. Exit status 1: no request succeeded.
    """
    import asyncio

    import uvloop
    from rich.console import Console

    from replayer.records.outputs import not_written
    from replayer.records.runs import RecordError
    from replayer.records.summary import summarise
    from replayer.records.tables import summary_lines, summary_table
    from replayer.replay.endpoint import EndpointError
    from replayer.replay.plan import PlanOptions
    from replayer.replay.progress import ReplayProgress
    from replayer.replay.replay import ReplayOptions, replay_trace
    from replayer.replay.signals import until_signal
    from replayer.traces.loading import LoadOptions, load
    from replayer.traces.trace import TraceError

    console = Console()
    try:
        loaded = load(
            trace,
            LoadOptions(
                block_tokens=block_tokens,
                time_unit=time_unit.value,
                sessions=sessions.value,
                chain=chain.value,
                idle_gap_cap_s=idle_gap_cap_s,
                allow_deltas=allow_deltas,
            ),
        )
        options = ReplayOptions(
            endpoint=endpoint,
            model=model,
            label=label,
            plan=PlanOptions(
                time_scale=arrival_speed,
                think_scale=think_speed,
                request_limit=request_limit,
                idle_gap_cap_s=idle_gap_cap_s,
            ),
            clock_scale=engine_speed,
            max_inflight_sessions=max_inflight_sessions,
            timeout_s=timeout_s,
            seed=seed,
            prompt_mode=prompt_mode.value,
            token_low=token_low,
            token_high=token_high,
            api_key=api_key,
            tls=TlsFiles(ca_file, cert_file, cert_key_file),
        )
        for note in loaded.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        with ReplayProgress(console) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            replay = replay_trace(
                loaded, output, options, resume=resume, on_start=progress.start, on_record=progress.advance
            )
            run = runner.run(until_signal(replay))
    except (KeyboardInterrupt, SystemExit) as stopped:
        typer.echo(f"interrupted; {output} has the records so far; continue with --resume", err=True)
        if isinstance(stopped, SystemExit):
            raise
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (TraceError, RecordError, EndpointError, ValueError) as error:
        _stop(error)
    except OSError as error:
        _stop(not_written(error, output) if error.filename == str(output) else error)
    summary = summarise(run)
    console.print(summary_table(summary))
    for line in summary_lines(summary):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"written: {output}", markup=False, soft_wrap=True)
    if summary.requests and not summary.ok:
        typer.echo(f"error: none of {summary.requests:,} requests succeeded; the reasons are above", err=True)
        raise typer.Exit(1)


def summary_command(
    run: Annotated[Path, typer.Argument(help="Run file written by `warmroute replay`.", show_default=False)],
    medium_from_tokens: Annotated[
        int, typer.Option(min=1, help="New tokens from which a request is MEDIUM; below it is WARM.")
    ] = 5_000,
    heavy_from_tokens: Annotated[int, typer.Option(min=1, help="New tokens from which a request is HEAVY.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Summarise a run: latencies by class, cache hits, failures.

    Also success, prediction error of cached tokens, and failures by reason.
    """
    from rich.console import Console

    from replayer.records.runs import RecordError, read_run
    from replayer.records.summary import summarise, summary_dict
    from replayer.records.tables import summary_lines, summary_table

    if heavy_from_tokens < medium_from_tokens:
        _stop("--heavy-from-tokens must not be below --medium-from-tokens")
    try:
        summary = summarise(read_run(run), warm_below=medium_from_tokens, heavy_from=heavy_from_tokens)
    except RecordError as error:
        _stop(error)
    except IsADirectoryError:
        _stop(f"{run}: a folder; give one of its run files (an experiment's: arms/ARM/REPEAT/run.jsonl)")
    except OSError as error:
        _stop(f"{run}: {error.strerror}")
    console = Console()
    if as_json:
        import json

        typer.echo(json.dumps(summary_dict(summary), indent=2))
        return
    console.print(summary_table(summary))
    for line in summary_lines(summary):
        console.print(line, markup=False, soft_wrap=True)


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
