"""``warmroute key``: make and hash API keys."""

from __future__ import annotations

import getpass
import re
import sys
from typing import Annotated

import typer

key_app = typer.Typer(no_args_is_help=True, help="Make and hash API keys for `warmroute serve` (docs/security.md).")

_SHORTEST = 20
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_Name = Annotated[str, typer.Option(help="Who the key is for: letters, digits and . _ @ -; appears in logs.")]


@key_app.command()
def new(name: _Name = "somebody") -> None:
    """Make a random key, shown this once, and the line for the settings file, which has its hash only."""
    from proxy.access.keys import digest_of, new_key

    _check(name)
    key = new_key()
    # The key alone on standard output, so that it can be piped; the rest is for the reader.
    typer.echo("The key, shown this once:", err=True)
    typer.echo(key)
    _show(name, digest_of(key))


@key_app.command("hash")
def hash_(name: _Name = "somebody") -> None:
    """Hash a key read from standard input; prints the line for the settings file."""
    from proxy.access.keys import digest_of

    _check(name)
    key = (getpass.getpass("Key (not shown): ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    if len(key) < _SHORTEST or not re.fullmatch(r"[\x21-\x7e]+", key):
        typer.secho(
            f"a key is at least {_SHORTEST} characters of printable ASCII without spaces, and random: its hash is not "
            "salted. `warmroute key new` makes one.",
            fg="red",
            err=True,
        )
        raise typer.Exit(2)
    _show(name, digest_of(key))


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        typer.secho(f"{name!r} is no name for a key: use letters, digits and . _ @ -, 64 at most", fg="red", err=True)
        raise typer.Exit(2)


def _show(name: str, digest: str) -> None:
    typer.echo(
        "For `keys.client` or `keys.admin` in the settings file, or `client:` or `admin:` in keys.file:", err=True
    )
    typer.echo(f'  - {{name: "{name}", sha256: "{digest}"}}')
