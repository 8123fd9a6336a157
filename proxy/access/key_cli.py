"""Command ``warmroute key``: generate and hash API keys."""

from __future__ import annotations

import getpass
import re
import sys
from typing import Annotated

import typer

key_app = typer.Typer(no_args_is_help=True, help="Generate and hash API keys for `warmroute serve` (docs/security.md).")

_SHORTEST = 20
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_Name = Annotated[str, typer.Option(help="Name of the key's holder: letters, digits and . _ @ -; appears in logs.")]


@key_app.command()
def new(name: _Name = "somebody") -> None:
    """Generate a random key, printed only this once, and the settings line with its hash."""
    from proxy.access.keys import digest_of, new_key

    _check(name)
    key = new_key()
    # Only the key goes to standard output, so that it can be piped.
    typer.echo("The key, shown only this once:", err=True)
    typer.echo(key)
    _show(name, digest_of(key))


@key_app.command("hash")
def hash_(name: _Name = "somebody") -> None:
    """Hash a key read from standard input and print the settings line."""
    from proxy.access.keys import digest_of

    _check(name)
    key = (getpass.getpass("Key (not shown): ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    if len(key) < _SHORTEST or not re.fullmatch(r"[\x21-\x7e]+", key):
        typer.secho(
            f"a key is at least {_SHORTEST} characters of printable ASCII without spaces, and random: its hash is not "
            "salted. `warmroute key new` generates one.",
            fg="red",
            err=True,
        )
        raise typer.Exit(2)
    _show(name, digest_of(key))


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        typer.secho(f"{name!r} is not a key name: use letters, digits and . _ @ -, 64 at most", fg="red", err=True)
        raise typer.Exit(2)


def _show(name: str, digest: str) -> None:
    typer.echo(
        "For `keys.client` or `keys.admin` in the settings file, or `client:` or `admin:` in keys.file:", err=True
    )
    typer.echo(f'  - {{name: "{name}", sha256: "{digest}"}}')
