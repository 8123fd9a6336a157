"""Command ``warmroute key``: generate and hash API keys."""

from __future__ import annotations

import getpass
import json
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NoReturn

import typer

from warmroute_yaml import problem_text

key_app = typer.Typer(no_args_is_help=True, help="Generate and hash API keys for `warmroute serve` (docs/security.md).")

_SHORTEST = 20
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_Name = Annotated[str, typer.Option(help="Name of the key's holder: letters, digits and . _ @ -; appears in logs.")]


_Weight = Annotated[float | None, typer.Option(help="Share of the fleet under load, relative to other keys' (1).")]
_Priority = Annotated[int | None, typer.Option(help="Waiting requests go ahead of those of keys with a lower one (0).")]
_Concurrent = Annotated[int | None, typer.Option(help="Maximum requests in flight.")]
_Sessions = Annotated[int | None, typer.Option(help="Maximum active sessions.")]
_Requests = Annotated[int | None, typer.Option(help="Maximum requests per minute.")]
_Tokens = Annotated[int | None, typer.Option(help="Maximum prompt and completion tokens per minute.")]
_AllowPriority = Annotated[bool, typer.Option("--allow-priority", help="Accept `priority` in requests.")]
_NamesTenant = Annotated[
    bool,
    typer.Option("--names-tenant", help="Key of a trusted front door: its requests name the tenant in a header."),
]


@key_app.command()
def new(
    name: _Name = "somebody",
    weight: _Weight = None,
    priority: _Priority = None,
    max_concurrent: _Concurrent = None,
    max_sessions: _Sessions = None,
    max_requests_per_min: _Requests = None,
    max_tokens_per_min: _Tokens = None,
    allow_priority: _AllowPriority = False,
    names_tenant: _NamesTenant = False,
) -> None:
    """Generate a random key, printed only this once, and the settings line with its hash.

    The other options are for client keys.
    """
    from proxy.access.keys import digest_of, new_key

    given = {
        "weight": weight,
        "priority": priority,
        "max_concurrent": max_concurrent,
        "max_sessions": max_sessions,
        "max_requests_per_min": max_requests_per_min,
        "max_tokens_per_min": max_tokens_per_min,
        "allow_priority": allow_priority or None,
        "names_tenant": names_tenant or None,
    }
    limits = {option: value for option, value in given.items() if value is not None}
    _check(name, limits)
    key = new_key()
    # Only the key goes to standard output, so that it can be piped.
    typer.echo("The key, shown only this once:", err=True)
    typer.echo(key)
    _show(name, digest_of(key), limits)


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


def _check(name: str, limits: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Exit with an error for a name or a limit that the settings would refuse."""
    if not _NAME.fullmatch(name):
        _fail(f"{name!r} is not a key name: use letters, digits and . _ @ -, 64 at most")
    if not limits:
        return
    from pydantic import ValidationError

    from proxy.settings import ClientKey

    try:
        ClientKey.model_validate({"name": name, "sha256": "0" * 64, **limits})
    except ValidationError as error:
        _fail("; ".join(f"{'.'.join(map(str, each['loc']))}: {problem_text(each)}" for each in error.errors()))


def _fail(message: str) -> NoReturn:
    typer.secho(message, fg="red", err=True)
    raise typer.Exit(2)


def _show(name: str, digest: str, limits: Mapping[str, Any] = MappingProxyType({})) -> None:
    sides = "`keys.client`" if limits else "`keys.client` or `keys.admin`"
    parts = "`client:`" if limits else "`client:` or `admin:`"
    typer.echo(f"For {sides} in the settings file, or {parts} in keys.file:", err=True)
    more = "".join(f", {option}: {json.dumps(value)}" for option, value in limits.items())
    typer.echo(f'  - {{name: "{name}", sha256: "{digest}"{more}}}')
