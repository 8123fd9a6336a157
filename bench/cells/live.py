"""Write the requests of a simulated cell as a trace, to send them to real engines.

The cells of `bench.joint` and `bench.tournament` exist in virtual time only. A file of the same requests, replayed with
time and think scales of 1, shows what is left of a simulated result on a GPU::

    python -m bench.cells.live TRACES cell.jsonl --trace kct_raw --load 0.8 --pool 4 --fleet 4 --profile PROFILE
    python -m bench.gpu.routers_ab run cell.jsonl --config fleet/proxy.yaml -o DIR --idle-gap-cap-s 3600 ...
    python -m bench.gpu.routers_ab table DIR --skip-first-s JUDGED
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from bench.cells.arenas import prepared
from bench.tournament.results import GridCell
from bench.tournament.settings import TournamentError
from bench.tournament.workload import WARMING_LOAD, CellWorkload
from replayer.traces.formats.bailian import write
from replayer.traces.trace import TraceRequest
from sim.hardware import ProfileError

app = typer.Typer(add_completion=False)


def live_requests(
    workload: CellWorkload, *, judged_s: float, output_tokens: int, warming_load: float
) -> list[TraceRequest]:
    """The requests of a cell up to ``judged_s`` seconds after its first judged one, by time.

    Args:
        workload: Requests of the cell.
        judged_s: Seconds of the trace that are kept after the first judged request is due.
        output_tokens: Answers are cut to this many tokens, so that a run ends soon after its last request.
        warming_load: Share of the fleet's time that the requests before the stretch may take; they come closer
            together by its ratio to the cell's `WARMING_LOAD`, and everything after them earlier by what that saves.
    """
    requests = sorted(workload.trace.requests, key=lambda each: (each.timestamp_s, each.chat_id))
    warming = requests[: workload.warming]
    ramp_s = requests[workload.warming].timestamp_s if warming else 0.0
    shrink = WARMING_LOAD / warming_load
    saved_s = ramp_s * (1 - shrink)
    until_s = min(each.timestamp_s for each in requests if each.chat_id in workload.judged) + judged_s
    kept = []
    for number, each in enumerate(requests):
        if each.timestamp_s >= until_s:
            break
        at_s = each.timestamp_s * shrink if number < len(warming) else each.timestamp_s - saved_s
        kept.append(
            msgspec.structs.replace(each, timestamp_s=at_s, output_length=min(each.output_length, output_tokens))
        )
    return kept


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(metavar="TRACES", help="Folder of traces.")],
    output: Annotated[Path, typer.Argument(help="Trace to write.")],
    trace: Annotated[str, typer.Option(help="Name of a trace.")] = "kct_raw",
    load: Annotated[float, typer.Option(min=0.01, help="Share of saturation.")] = 0.8,
    pool: Annotated[
        float, typer.Option(min=0.01, help="KV pool in hot sets, of which the needed size is printed.")
    ] = 4,
    fleet: Annotated[int, typer.Option(min=1, help="Number of instances.")] = 8,
    seed: Annotated[int, typer.Option(help="Determines the stretch of the trace.")] = 1,
    profile: Annotated[
        str, typer.Option(help="Hardware profile of the engines, by name or path: it determines the request rate.")
    ] = "",
    judged_s: Annotated[float, typer.Option(min=1, help="Seconds kept after the first judged request.")] = 150.0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Answers are cut to this many tokens.")] = 2048,
    warming_load: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the fleet's time that warming requests may take.")
    ] = 1.0,
) -> None:
    """Write the requests of one cell as a trace."""
    try:
        stage = prepared(str(folder), GridCell(trace=trace, load=load, pool=pool, fleet=fleet), seed, profile)
    except (TournamentError, ProfileError, OSError) as error:
        _stop(error)
    requests = live_requests(stage.workload, judged_s=judged_s, output_tokens=output_tokens, warming_load=warming_load)
    write(output, requests)
    judged_from_s = min(each.timestamp_s for each in requests if each.chat_id in stage.workload.judged)
    sessions = len({each.session_id for each in requests})
    mean = sum(each.input_length for each in requests) / len(requests)
    typer.echo(
        f"{len(requests)} requests of {sessions} sessions in {requests[-1].timestamp_s:.0f} s, the first "
        f"{stage.workload.warming} for warming; judged from {math.floor(10 * judged_from_s) / 10:.1f} s on; "
        f"{mean:,.0f} tokens a prompt; pools of at least {stage.options.pool_tokens:,} tokens"
    )


def _stop(error: object) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
