"""Command ``doctor``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from warmroute_tls import CaFile, CertFile, CertKeyFile, TlsFiles, tls_context

if TYPE_CHECKING:
    from launch.doctor.probes.deep import HandOffs


def doctor_command(hand_offs: HandOffs | None = None) -> Callable[..., None]:
    """The command; ``hand_offs`` makes the hand-offs of ``--deep``, which need more than this folder may import."""

    def doctor(
        fleet_file: Annotated[
            Path | None,
            typer.Option(
                "--fleet", help="Fleet to check for: its file, or the name of a shipped one.", show_default=False
            ),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
        engine_python: Annotated[
            str | None,
            typer.Option(
                help="Python of the engines. Default: the fleet's, $WARMROUTE_ENGINE_PYTHON, .venv-engines, this one.",
                show_default=False,
            ),
        ] = None,
        proxy: Annotated[
            str | None,
            typer.Option(
                help="URL of a running proxy whose conditions to report. Default: the fleet's.", show_default=False
            ),
        ] = None,
        ca_file: CaFile = None,
        cert_file: CertFile = None,
        cert_key_file: CertKeyFile = None,
        deep: Annotated[
            bool,
            typer.Option(
                "--deep",
                help="Also make hand-offs between the engines of the running --fleet, and read topologies.",
            ),
        ] = False,
        list_checks: Annotated[
            bool, typer.Option("--list", help="Print the tables of checks and tested versions as Markdown and exit.")
        ] = False,
    ) -> None:
        """Check this machine for what would stop or falsify a fleet.

        Every finding comes with a remedy; nothing is changed. With --deep the fleet's engines get short prompts.
        --ca-file, --cert-file and --cert-key-file are for --proxy.

        Exit status 0: no problem (there may be warnings); 1: at least one problem; 2: the fleet file or another option
        cannot be used.
        """
        from rich.console import Console

        from launch.doctor import report
        from launch.doctor.checks import all_checks
        from launch.doctor.findings import examine
        from launch.doctor.probe import gather
        from launch.fleet.file import FleetError, find_fleet, load_fleet
        from proxy.connecting import checked_url

        checks = all_checks()
        if list_checks:
            typer.echo(report.reference(checks), nl=False)
            return
        try:
            source = find_fleet(fleet_file) if fleet_file is not None else None
            fleet = load_fleet(source) if source is not None else None
            files = TlsFiles(ca_file, cert_file, cert_key_file)
            options = {"--ca-file": ca_file, "--cert-file": cert_file, "--cert-key-file": cert_key_file}
            if proxy is None and (given := [option for option, path in options.items() if path is not None]):
                raise ValueError(f"{given[0]} is for --proxy: give its URL too")
            given_proxy = None if proxy is None else checked_url(proxy, "--proxy")
            tls_context(files)
        except (FleetError, ValueError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
        facts = gather(
            fleet,
            source=str(source or ""),
            engine_python=engine_python,
            proxy=given_proxy,
            proxy_files=files,
            deep=deep,
            hand_offs=hand_offs,
        )
        findings = examine(facts, checks)
        made = report.make_report(findings)
        if as_json:
            import msgspec

            sys.stdout.write(msgspec.json.format(msgspec.json.encode(made), indent=2).decode() + "\n")
        else:
            Console().print(report.findings_table(findings))
            typer.echo(report.summary(findings))
        raise typer.Exit(1 if made.problems else 0)

    return doctor
