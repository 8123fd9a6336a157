"""Options of the comparisons that play cells of the tournament, declared once.

Those that repeat are None where they are not given: each comparison has a grid of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TraceDir = Annotated[Path, typer.Option(envvar="WARMROUTE_TRACES", help="Folder of traces.")]
Traces = Annotated[list[str] | None, typer.Option(help="Name of a trace; default: all. Repeatable.")]
Loads = Annotated[list[float] | None, typer.Option(help="Share of saturation. Repeatable.")]
Pools = Annotated[list[float] | None, typer.Option(help="KV pool in hot sets. Repeatable.")]
Fleets = Annotated[list[int] | None, typer.Option(help="Number of instances. Repeatable.")]
Seeds = Annotated[list[int] | None, typer.Option(help="Repeatable.")]
Profile = Annotated[
    str, typer.Option(help="Hardware profile of the engines, by name or path. Default: configs/tournament.yaml's.")
]
Jobs = Annotated[int, typer.Option(min=1, help="Parallel processes.")]
Growing = Annotated[
    Path | None, typer.Option("--output", "-o", help="Also write all figures to this file, after every cell.")
]
"""A result file that has the cells played so far."""
