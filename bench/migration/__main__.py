"""``python -m bench.migration``: ``migrate`` against ``warm`` over traces, loads, pools and transports."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from bench.cells.options import Growing, Loads, Pools, Seeds, TraceDir
from bench.figures.result_file import write_cells
from bench.migration.cells import MigrationCell, compared, profiles
from bench.migration.tables import by_trace, effects, moved_turns
from bench.tournament.arena import Arena
from bench.tournament.results import GridCell
from bench.tournament.settings import TournamentError, read_settings

SCHEMA = 1
TRACES = ("glm_2h", "kct_v6", "mooncake", "miniswe")


def main(
    trace_dir: TraceDir,
    trace: Annotated[list[str] | None, typer.Option(help="Name of a trace. Repeatable.")] = None,
    load: Loads = None,
    pool: Pools = None,
    fleet: Annotated[int, typer.Option(min=2, help="Number of instances.")] = 8,
    seed: Seeds = None,
    output: Growing = None,
) -> None:
    """Compare migration of sessions with not moving them, in virtual time, at three prices of a transfer."""
    cells: list[MigrationCell] = []
    with TemporaryDirectory() as folder:
        try:
            priced, arena = profiles(Path(folder)), Arena(read_settings(), trace_dir)
            grid = product(seed or [1, 2, 3], trace or TRACES, pool or [1.0, 4.0], load or [0.8, 1.2])
            for number, name, hot_sets, share in grid:
                cell = GridCell(trace=name, load=share, pool=hot_sets, fleet=fleet)
                cells.append(compared(arena.stage(cell, number), priced))
                if output is not None:
                    write_cells(output, "migration", SCHEMA, {}, cells)
                moved = ", ".join(f"{arm.price} {arm.arm} {arm.legs.hand_offs}" for arm in cells[-1].arms)
                typer.echo(f"{cell}, seed {number}: hand-offs: {moved}", err=True)
        except TournamentError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
    tables = [effects(cells), moved_turns(cells), by_trace(cells, "migrate"), by_trace(cells, "always")]
    typer.echo("\n\n".join("\n".join(lines) for lines in tables))


if __name__ == "__main__":
    typer.run(main)
