"""``python -m bench.static_pd``: the table of one or more runs of the experiment ``static-pd``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.figures.result_file import writable
from bench.static_pd.figures import figures_of, table
from launch.experiment.definition.file import ExperimentError


def main(
    directories: Annotated[list[Path], typer.Argument(help="Directories of the experiment, one for each load.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=writable, help="Also write the figures to this file.")
    ] = None,
) -> None:
    """Print the arms' figures over all repeats."""
    try:
        loads = [figures_of(each) for each in directories]
    except (ExperimentError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode({"kind": "static_pd", "loads": loads}), indent=1))
    typer.echo("\n".join(table(loads)))


if __name__ == "__main__":
    typer.run(main)
