"""Command ``doctor``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    fleet_file: Annotated[
        Path | None,
        typer.Option("--fleet", help="Fleet file, or the name of a shipped one, to check for this machine."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    engine_python: Annotated[
        str | None,
        typer.Option(
            help="Python of the engines; its packages are listed, not imported. Default: the fleet "
            "file's, else WARMROUTE_ENGINE_PYTHON, else .venv-engines/bin/python, else this one."
        ),
    ] = None,
    list_checks: Annotated[
        bool, typer.Option("--list", help="Print the tables of checks and tested versions in Markdown, and exit.")
    ] = False,
) -> None:
    """Check this machine for problems that would stop a fleet or falsify its figures, with a fix for each. Read-only.

    Exit status 0: no problem (there may be warnings); 1: at least one problem; 2: the fleet file cannot be used.
    """
    from rich.console import Console

    from launch.doctor import report
    from launch.doctor.checks import all_checks
    from launch.doctor.findings import examine
    from launch.doctor.probe import gather
    from launch.fleet.file import FleetError, find_fleet, load_fleet

    checks = all_checks()
    if list_checks:
        typer.echo(report.reference(checks), nl=False)
        return
    try:
        source = find_fleet(fleet_file) if fleet_file is not None else None
        fleet = load_fleet(source) if source is not None else None
    except FleetError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    findings = examine(gather(fleet, source=str(source or ""), engine_python=engine_python), checks)
    made = report.make_report(findings)
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(made), indent=2).decode() + "\n")
    else:
        Console().print(report.findings_table(findings))
        typer.echo(report.summary(findings))
    raise typer.Exit(1 if made.problems else 0)
