"""Command ``fidelity``: recorded runs of real engines against the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def fidelity(
    recordings: Annotated[
        list[Path],
        typer.Argument(help="Folders that have a run.jsonl(.gz) of `warmroute replay` in them or below them."),
    ],
    trace: Annotated[Path, typer.Option(help="Trace that was replayed.")],
    profile: Annotated[str, typer.Option(help="Hardware profile: a name in configs/hardware or a YAML file.")] = "h200",
    transport: Annotated[
        str | None,
        typer.Option(help="KV transport. Default: arm.json's, else the profile's default.", show_default=False),
    ] = None,
    pool_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="KV pool of each engine in tokens. Default: the profile's.", show_default=False),
    ] = None,
) -> None:
    """Simulate recorded runs and compare the latencies.

    Every request is sent when, and to the instance where, it was sent in the recorded run.

    Prints latencies at p50, p90 and p99 (measured / simulated), the factor within which half of the requests are, the
    rank correlation over requests, and the number of equal cached-token counts. Prefills that were offloaded are
    offloaded to the same instance.
    """
    from replayer.traces.loading import load_trace
    from replayer.traces.trace import TraceError
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
