"""Command group ``warmroute analyse``: studies of traces, models and hardware that need no engine."""

from __future__ import annotations

import typer

from bench.analysis.commands.cache import cache
from bench.analysis.commands.kv_wall import kv_wall
from bench.analysis.commands.pd_cost import pd_cost
from bench.analysis.commands.roofline import roofline
from bench.analysis.commands.workload import workload


def application() -> typer.Typer:
    """The group with all its commands."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
        help="Analyse a trace, a model or a GPU without running an engine: caches, workload, roofline, KV "
        "capacity, cost of PD.",
    )
    app.command("cache")(cache)
    app.command("workload")(workload)
    app.command("roofline")(roofline)
    app.command("kv-wall")(kv_wall)
    app.command("pd-cost")(pd_cost)
    return app


def register(app: typer.Typer) -> None:
    """Add the group ``analyse`` to an application."""
    app.add_typer(application(), name="analyse")
