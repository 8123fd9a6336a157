"""``python -m bench.home_case``: one sustained run of a fleet as it is shipped, and its table.

``warmroute up FLEET --detach --run-dir DIR`` starts the fleet; ``run TRACE --run-dir DIR -o OUT`` replays a trace
through its proxy and keeps requests, the proxy's rows, GPU telemetry, memory over time and what is left afterwards;
``table OUT`` prints them as Markdown, without the fleet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
import uvloop

from bench.admission_shapes import write_rows
from bench.figures.result_file import writable
from bench.home_case.cut import SessionCut, first_turns
from bench.home_case.fleet import HomeCaseError, running_fleet
from bench.home_case.measure import HomeCase, sustained_run
from bench.home_case.record import SUSTAINED, read_files
from bench.home_case.table import lines_of
from bench.routers.engines import EngineSetError
from launch.run.signals import run_until_signal
from replayer.records.outputs import OverwritesInputError, refuse_inputs
from replayer.records.runs import RecordError
from replayer.replay.endpoint import EndpointError
from replayer.replay.plan import PlanOptions
from replayer.replay.replay import ReplayOptions
from replayer.traces.loading import load_trace
from replayer.traces.trace import TraceError

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)


def _output(folder: Path) -> Path:
    writable(folder / SUSTAINED)
    return folder


@app.command()
def run(
    trace: Annotated[Path, typer.Argument(help="Trace of any known format.")],
    run_dir: Annotated[Path, typer.Option(help="Run directory of a fleet that `warmroute up` started.")],
    output: Annotated[Path, typer.Option("--output", "-o", callback=_output, help="Folder for the files of the run.")],
    arrival_speed: Annotated[
        float, typer.Option(min=0.001, help="Sessions arrive this many times faster than in the trace.")
    ] = 1.0,
    think_speed: Annotated[float, typer.Option(min=0.001, help="Think times pass this many times faster.")] = 1.0,
    idle_gap_cap_s: Annotated[float, typer.Option(min=0, help="Longest think time, seconds of the trace.")] = 10.0,
    request_limit: Annotated[int | None, typer.Option(min=1, help="At most this many requests.")] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="Timeout of one request in seconds.")] = 600.0,
    engine_speed: Annotated[float, typer.Option(help="Simulated engines: engine seconds per wall second.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the tokens that hash ids stand for.")] = 0,
    token_low: Annotated[int, typer.Option(min=0, help="Smallest token id in prompts.")] = 1000,
    token_high: Annotated[int, typer.Option(min=1, help="One more than the largest token id.")] = 100_000,
    hardware: Annotated[str, typer.Option(help="Hardware of the engines, for the table.")] = "",
    limit_s: Annotated[
        float, typer.Option(min=1, help="The replay is cut off after this many wall seconds; what has ended counts.")
    ] = 400.0,
) -> None:
    """Make the run. Exit status 1 if something is left of it, 2 if it cannot be made, 130 or 143 if interrupted."""
    options = ReplayOptions(
        label="sustained",
        plan=PlanOptions(
            time_scale=arrival_speed,
            think_scale=think_speed,
            request_limit=request_limit,
            idle_gap_cap_s=idle_gap_cap_s,
        ),
        clock_scale=engine_speed,
        timeout_s=timeout_s,
        seed=seed,
        token_low=token_low,
        token_high=token_high,
    )

    async def measure() -> int:
        record = await sustained_run(case)
        for problem in (*record.problems, *record.leaks):
            typer.echo(f"warning: {problem}", err=True)
        return 1 if record.leaks else 0

    try:
        options.check()
        case = HomeCase(
            load_trace(trace), run_dir, running_fleet(run_dir), options, limit_s, hardware, output, typer.echo
        )
        code = run_until_signal(measure(), loop_factory=uvloop.new_event_loop)
    except (HomeCaseError, EngineSetError, EndpointError, TraceError, RecordError, ValueError, OSError) as error:
        _stop(error)
    if code >= 128:
        typer.echo("interrupted; nothing was written", err=True)
    else:
        typer.echo(f"written: {output}")
    raise typer.Exit(code)


@app.command()
def cut(
    trace: Annotated[Path, typer.Argument(help="Trace with long sessions, such as kct_v6.")],
    output: Annotated[Path, typer.Argument(help="Trace to write.")],
    copies: Annotated[int, typer.Option(min=1, help="Times that every session occurs, with prefixes of its own.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="First turns of a session that are kept.")] = 20,
    max_tokens: Annotated[int, typer.Option(help="A session ends before its first longer prompt.")] = 150_000,
    think_s: Annotated[float, typer.Option(min=0, help="Longest think time, seconds.")] = 5.0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Answers are cut to this many tokens.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the order in which sessions begin, one each second.")] = 1,
) -> None:
    """Write a trace for a run of minutes: the first turns of a trace's sessions, several copies of each."""
    try:
        refuse_inputs(output, [trace])
        whole = load_trace(trace)
    except (OverwritesInputError, TraceError) as error:
        _stop(error)
    rows = first_turns(whole, SessionCut(copies, turns, max_tokens, think_s, output_tokens, seed))
    if not rows:
        _stop(f"{trace}: no session begins with a prompt of at most {max_tokens} tokens")
    write_rows(rows, output)
    sessions = len({each["session_id"] for each in rows})
    mean = sum(each["input_length"] for each in rows) / len(rows)
    typer.echo(f"{len(rows)} requests of {sessions} sessions, {mean:,.0f} tokens a prompt")


@app.command()
def table(folder: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Print a run as Markdown."""
    try:
        for line in lines_of(read_files(folder)):
            typer.echo(line)
    except HomeCaseError as error:
        _stop(error)


def _stop(error: object) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
