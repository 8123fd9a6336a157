"""``warmroute serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def serve(
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML); see docs/proxy.md.")] = None,
    instance: Annotated[
        list[str] | None, typer.Option(help="Engine URL; repeat for each. Replaces the file's instances.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    policy: Annotated[str | None, typer.Option(help="Routing policy, with its default parameters.")] = None,
    planner: Annotated[str | None, typer.Option(help="Offload planner, with its default parameters.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Serve the OpenAI API in front of a fleet of engines.

    Settings come from --config, then WARMROUTE_ environment variables, then these flags; the later wins.
    """
    from proxy.server import run
    from proxy.settings import SettingsError, load_settings
    from proxy.tokens.encoder import TokenizerError

    overrides: dict[str, Any] = {
        "host": host,
        "port": port,
        "log_level": log_level,
        "policy": {"name": policy} if policy else None,
        "offload": {"planner": planner} if planner else None,
        "instances": [{"url": url} for url in instance] if instance else None,
    }
    try:
        settings = load_settings(config, **{key: value for key, value in overrides.items() if value is not None})
    except SettingsError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from error
    try:
        run(settings)
    except TokenizerError as error:
        typer.secho(f"tokenizer: {error}", fg="red", err=True)
        raise typer.Exit(2) from error


def settings() -> None:
    """Print every setting of `warmroute serve` with its default, as Markdown."""
    from proxy.settings_reference import reference

    typer.echo(reference(), nl=False)


def register(app: typer.Typer) -> None:
    """Add this folder's commands to the root application."""
    app.command()(serve)
    app.command()(settings)
