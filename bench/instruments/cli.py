"""Command group ``warmroute measure``, instruments that measure running engines, and ``warmroute calibrate``."""

from __future__ import annotations

import typer

from bench.instruments.commands import hooks
from bench.instruments.commands.calibrate import calibrate
from bench.instruments.commands.interference import interference
from bench.instruments.commands.overhead import overhead
from bench.instruments.commands.show import show_record
from bench.instruments.commands.transfer import transfer


def application() -> typer.Typer:
    """The group with all its instruments."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
        help="Measure running engines: interference, KV transfer, connector overhead.",
    )
    app.callback()(_group)
    app.command("interference")(interference)
    app.command("transfer")(transfer)
    app.command("overhead")(overhead)
    app.command("show")(show_record)
    app.add_typer(hooks.application(), name="hooks")
    return app


def _group() -> None:
    """Measure running engines, one quantity at a time; each prints a table and writes a record."""


def register(app: typer.Typer) -> None:
    """Add the group ``measure`` and the command ``calibrate`` to an application."""
    app.add_typer(application(), name="measure")
    app.command("calibrate")(calibrate)
