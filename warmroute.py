"""The ``warmroute`` command line: one Typer application put together from each folder's own commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

__version__ = "0.1.0"


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"warmroute {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Cache-aware serving proxy and elastic prefill/decode router for agentic LLM traffic."""


def build() -> typer.Typer:
    """The root application with every folder's commands."""
    from bench.analysis.cli import register as register_analysis
    from launch.cli import register as register_launch
    from proxy.cli import register as register_proxy
    from replayer.cli import register as register_replayer
    from sim.cli import register as register_sim

    app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False, add_completion=False)
    app.callback()(_options)
    for register in (register_proxy, register_replayer, register_launch, register_sim, register_analysis):
        register(app)
    return app


def main() -> None:
    """Console entry point."""
    if not sys.stdout.isatty():
        # Where nobody says how wide the output is, tables must not be cut to 80 columns.
        os.environ.setdefault("COLUMNS", "140")
    build()()


if __name__ == "__main__":
    main()
