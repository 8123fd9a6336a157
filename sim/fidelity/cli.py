"""Command ``fidelity``: recorded runs of real engines against the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def fidelity(
    recordings: Annotated[
        list[Path],
        typer.Argument(help="Folders with a run.jsonl(.gz) of `warmroute replay` in them or below them."),
    ],
    trace: Annotated[Path, typer.Option(help="The trace they were recorded with; its prompts are needed.")],
    profile: Annotated[str, typer.Option(help="Hardware profile: a name in configs/hardware or a YAML file.")] = "h200",
    transport: Annotated[
        str | None, typer.Option(help="How KV moves; default: the transport in arm.json, else the profile's default.")
    ] = None,
    pool_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV pool of each engine in tokens; default: the profile's.")
    ] = None,
) -> None:
    """Send the requests of recorded runs to simulated engines, at the same times and instances, and compare the
    results.

    Prints latencies at p50, p90 and p99 (measured / simulated), the factor within which half of the requests are, the
    rank correlation over requests, and the number of equal cached-token counts. Prefills that were offloaded are
    offloaded to the same instance.
    """
    from replayer.traces.trace import TraceError, load_trace
    from sim.fidelity.comparison import compare, markdown
    from sim.fidelity.recording import RecordingError, find_recordings, read_recording
    from sim.fidelity.resimulate import resimulate
    from sim.offline.options import SimulationError

    try:
        loaded = load_trace(trace)
        results = []
        for folder in find_recordings(recordings):
            recording = read_recording(folder, loaded, f"{folder.parent.name}/{folder.name}")
            moved = transport or recording.note.transport
            results.append(compare(recording, resimulate(recording, profile, moved, pool_tokens)))
    except (RecordingError, TraceError, SimulationError, OSError) as error:
        typer.echo(f"fidelity: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(markdown(results))


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("fidelity")(fidelity)
