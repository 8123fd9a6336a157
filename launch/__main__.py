"""``python -m launch``: the launcher's commands without the rest of the command line."""

from __future__ import annotations

import typer

from launch.cli import register

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Start, look at and stop fleets.")
register(app)

if __name__ == "__main__":
    app()
