"""Commands ``warmroute serve`` and ``warmroute settings``."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from proxy.access.key_cli import key_app
from proxy.console.explain import explain
from proxy.console.top import top
from warmroute_yaml import load_yaml


def serve(
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML); see docs/proxy.md.")] = None,
    instance: Annotated[
        list[str] | None,
        typer.Option(
            help="URL, or URL,KEY=VALUE,… (data_parallel_size=2); repeat for each. Replaces the file's instances."
        ),
    ] = None,
    discovery: Annotated[
        str | None,
        typer.Option(help="Find engines by file:PATH, dns:NAME:PORT, srv:NAME, kubernetes:SELECTOR or ray:FLEET."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that serve the port together.")] = None,
    policy: Annotated[str | None, typer.Option(help="Routing policy, with its default parameters.")] = None,
    admission: Annotated[
        str | None, typer.Option(help="Admission rule; its parameters not given are the defaults.")
    ] = None,
    admission_param: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE: parameter of the admission rule. Repeatable.")
    ] = None,
    planner: Annotated[str | None, typer.Option(help="Offload planner, with its default parameters.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Hardware profile of `warmroute calibrate`, by name or file, for the cost models."),
    ] = None,
    shadow: Annotated[
        list[str] | None, typer.Option(help="Routing policy that decides too, without effect. Repeatable.")
    ] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of the admin listener (with --admin-port).")] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port for the admin endpoints alone; without it they share the main listener.")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate chain: serve HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's private key.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text, or json: one object per line.")] = None,
    access_log: Annotated[
        str | None, typer.Option(help="File for one JSON line per request; `-`: standard output.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the settings, probe every engine once, print a table, and exit.")
    ] = False,
) -> None:
    """Serve the OpenAI API in front of a fleet of engines.

    Settings come from --config, then WARMROUTE_ environment variables, then these flags; the later wins. With --check
    nothing is served: the exit status is 0 if every engine can be used, 1 if not, 2 for invalid settings.
    """
    if not check:
        # Its default would end the process. It waits until this one serves, which then reads the settings again.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

    from proxy.clients.uvicorn_check import UnsupportedUvicornError, check_uvicorn

    try:
        check_uvicorn()
    except UnsupportedUvicornError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from error

    from proxy.settings import SettingsError, load_settings
    from proxy.start.address import ListenError
    from proxy.start.check import check_fleet
    from proxy.start.environment import service_link
    from proxy.tokens.encoder import TokenizerError

    overrides: dict[str, Any] = {
        "host": host,
        "port": port,
        "workers": workers,
        "log_level": log_level,
        "log_format": log_format,
        "logs": _given(access=access_log),
        "admin": _given(host=admin_host, port=admin_port),
        "tls": _given(certificate=tls_certificate, key=tls_key),
        "policy": {"name": policy} if policy else None,
        "admission": _given(name=admission, params=_params(admission_param)),
        "offload": {"planner": planner} if planner else None,
        "hardware": hardware,
        "shadow": {"policies": shadow} if shadow else None,
        "instances": _instances(instance),
        "discovery": _discovery(discovery),
    }
    given = {key: value for key, value in overrides.items() if value is not None}
    load = partial(load_settings, config, **given)
    try:
        if port is None and (link := service_link(os.environ)):
            raise SettingsError(link)
        settings = load()
        if check:
            raise typer.Exit(0 if check_fleet(settings) else 1)
        if settings.workers > 1:
            # The parent of workers serves nothing: importing the application would double its time to start.
            from proxy.workers.supervisor import supervise

            raise typer.Exit(supervise(settings, config, _plain(given)))
        from proxy.server import run

        run(settings, load)
    except (SettingsError, ListenError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from error
    except TokenizerError as error:
        typer.secho(f"tokenizer: {error}", fg="red", err=True)
        raise typer.Exit(2) from error


def _given(**values: Any) -> dict[str, Any] | None:
    return {name: value for name, value in values.items() if value is not None} or None


def _plain(given: Any) -> Any:
    """Flags as JSON has them, for other processes."""
    if isinstance(given, dict):
        return {name: _plain(value) for name, value in given.items()}
    if isinstance(given, list):
        return [_plain(value) for value in given]
    return str(given.absolute()) if isinstance(given, Path) else given


def _instances(specifications: list[str] | None) -> list[dict[str, str]] | None:
    from proxy.settings.instance import instance_of

    try:
        return [instance_of(each) for each in specifications or ()] or None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--instance") from error


def _discovery(specification: str | None) -> dict[str, Any] | None:
    from proxy.settings.discovery import discovery_of

    try:
        return None if specification is None else discovery_of(specification)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--discovery") from error


def _params(pairs: list[str] | None) -> dict[str, Any] | None:
    """``KEY=VALUE`` pairs with values as in YAML; a pair that is none ends the command."""
    import yaml

    params: dict[str, Any] = {}
    for pair in pairs or ():
        key, found, value = pair.partition("=")
        try:
            if not key or not found:
                raise typer.BadParameter(f"{pair!r}: give parameters as KEY=VALUE")
            params[key] = load_yaml(value)
        except yaml.YAMLError as error:
            raise typer.BadParameter(f"{pair!r}: the value is not YAML") from error
    return params or None


def settings() -> None:
    """Print every setting of `warmroute serve` with its default, as Markdown."""
    from proxy.settings.reference import reference

    typer.echo(reference(), nl=False)


def register(app: typer.Typer) -> None:
    """Add this package's commands to the root application."""
    app.command()(serve)
    app.command()(settings)
    app.command()(top)
    app.command()(explain)
    app.add_typer(key_app, name="key")
