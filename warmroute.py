"""The ``warmroute`` command line: one Typer application put together from each folder's own commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from warmroute_names import RenamedGroup

__version__ = "0.1.0"

PANELS: Mapping[str, tuple[str, ...]] = {
    "Serve": ("serve", "settings", "key"),
    "Fleet": ("up", "down", "status", "doctor", "telemetry"),
    "Measure": ("demo", "replay", "simulate", "experiment", "trace", "sim"),
    "Analyse": ("summary", "compare", "report", "analyse"),
}
"""Help panel -> its commands and groups, in the order in which help shows them."""


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


class _Root(RenamedGroup):
    """The root group: commands in the order of the panels."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in PANELS.values() for name in names]


def build() -> typer.Typer:
    """The root application with every folder's commands."""
    from bench.analysis.cli import register as register_analysis
    from launch.cli import register as register_launch
    from proxy.cli import register as register_proxy
    from replayer.cli import register as register_replayer
    from sim.cli import register as register_sim

    # Markdown: paragraphs of help are wrapped to the terminal.
    app = typer.Typer(cls=_Root, no_args_is_help=True, pretty_exceptions_show_locals=False, rich_markup_mode="markdown")
    app.callback()(_options)
    for register in (register_proxy, register_replayer, register_launch, register_sim, register_analysis):
        register(app)
    panel_of = {name: panel for panel, names in PANELS.items() for name in names}
    for command in app.registered_commands:
        command.rich_help_panel = panel_of[str(command.name or getattr(command.callback, "__name__", ""))]
    for group in app.registered_groups:
        group.rich_help_panel = panel_of[str(group.name)]
    return app


def main() -> None:
    """Console entry point."""
    if not sys.stdout.isatty():
        # Output that is not a terminal has no width: tables must not be cut to 80 columns.
        os.environ.setdefault("COLUMNS", "140")
    build()()


if __name__ == "__main__":
    main()
