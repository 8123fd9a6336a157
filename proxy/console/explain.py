"""Command ``explain``: one finished request in plain words."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer

from proxy.console.options import DEFAULT_URL, KeyOption, UrlOption
from proxy.console.printable import printable
from proxy.records.files import record_files
from warmroute_tls import CaFile, CertFile, CertKeyFile, TlsFiles

if TYPE_CHECKING:
    from rich.console import RenderableType

    from proxy.console.account import RequestAccount
    from proxy.console.admin_api import AdminApi

_SHOWN_CANDIDATES = 10
_MOST_ROWS = 100
_FIRST_LINE_BYTES = 4 * 1024 * 1024


class NoBreakdownError(Exception):
    """A file that is no breakdown; the message has the remedy."""


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="Value of x-request-id of the response.")],
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    cert_key_file: CertKeyFile = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Look in this file (breakdown.jsonl_path) and its older ones instead.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the row as JSON.")] = False,
) -> None:
    """Explain in plain words how one finished request was routed and served.

    The row comes from the proxy's memory, which also has the newest rows of earlier processes if breakdown.jsonl_path
    is set, or with --file from the files themselves. `POST /explain` is for requests not sent yet.

    Exit status 0: explained; 1: not found; 2: the proxy does not answer, or the file is no breakdown.
    """
    from proxy.console.admin_api import AdminApi, NoAnswerError

    started_unix_s: tuple[float, ...] = ()
    try:
        if file is not None:
            rows = rows_in(file, request_id)
            remedy = f"not in {', '.join(map(str, record_files(file))) or file}"
        else:
            with AdminApi(url, key, TlsFiles(ca_file, cert_file, cert_key_file)) as api:
                found = api.get("/breakdown", request_id=request_id, limit=_MOST_ROWS)
                rows, started_unix_s = found["rows"], started_of(found)
                remedy = "" if rows else _not_found(api, request_id)
    except (NoAnswerError, NoBreakdownError, OSError) as error:
        _stop(str(error), 2)
    if not rows:
        _stop(f"{request_id}: {remedy}", 1)
    row = rows[-1]
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(row), indent=2).decode() + "\n")
        return
    from rich.console import Console

    from proxy.console.account import account_of

    Console().print(shown(printable(request_id), account_of(row, started_unix_s), len(rows)))


def started_of(answer: Mapping[str, Any]) -> tuple[float, ...]:
    """Starts of the processes that answer: several with workers, none where the proxy names none."""
    workers = answer.get("workers_started_unix_s") or [answer.get("proxy_started_unix_s")]
    return tuple(started for started in workers if started is not None)


def rows_in(path: Path, request_id: str) -> list[dict[str, Any]]:
    """Rows of a request in a file, or in the newest of its older ones that has any; oldest first.

    With several workers, each has a file of its own beside the one that the settings name.

    Raises:
        OSError: there is no such file, or one cannot be read.
        NoBreakdownError: one has something else than rows.
    """
    files = record_files(path) or [file for each in _of_workers(path) for file in record_files(each)]
    if not files:
        raise FileNotFoundError(f"{path}: no such file")
    needle = msgspec.json.encode(request_id)
    for each in files:
        found = []
        with each.open("rb") as lines:
            _check_first(each, lines.readline(_FIRST_LINE_BYTES))
            lines.seek(0)
            for line in lines:
                if needle in line and (row := _row(line)) is not None and row.get("request_id") == request_id:
                    found.append(row)
        if found:
            return found
    return []


def _of_workers(path: Path) -> list[Path]:
    """The workers' files (`proxy.workers.own_settings`)."""
    name = re.compile(rf"{re.escape(path.stem)}\.worker-\d+{re.escape(path.suffix)}")
    return sorted(each for each in path.parent.iterdir() if name.fullmatch(each.name)) if path.parent.is_dir() else []


def shown(request_id: str, account: RequestAccount, rows: int = 1) -> RenderableType:
    """The account as a table of subjects, and the candidates with their scores below it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("id", Text(request_id))
    for part in account.parts:
        grid.add_row(part.subject, Text("\n".join(map(printable, part.sentences))))
    if rows > 1:
        grid.add_row("", Text(f"{rows} requests have this id; this is the last one."))
    if not account.candidates:
        return grid
    table = Table(title="candidates, lowest score first", title_justify="left")
    for name in ("instance", "score", "cached tokens", "inputs"):
        table.add_column(name, justify="right" if name in {"score", "cached tokens"} else "left")
    best = account.candidates[:_SHOWN_CANDIDATES]
    for each in (*best, *(late for late in account.candidates[_SHOWN_CANDIDATES:] if late.chosen)):
        mark = " (chosen)" if each.chosen else " (left out)" if each.skipped else ""
        table.add_row(
            Text(printable(each.instance) + mark),
            f"{each.score:,.6g}",
            "" if each.cached_tokens is None else f"{each.cached_tokens:,}",
            Text(printable(each.inputs)),
            style="bold" if each.chosen else None,
        )
    hidden = len(account.candidates) - _SHOWN_CANDIDATES
    more = [Text(f"{hidden} more; --json has all")] if hidden > 0 else []
    return Group(grid, Text(), table, *more)


def _not_found(api: AdminApi, request_id: str) -> str:
    """Remedy for a request that has no row. Raises NoAnswerError."""
    stats = api.get("/stats")
    for held in (stats.get("holding") or {}).get("line") or ():
        if held.get("request_id") == request_id:
            return f"it is in flight and has no row yet: {held.get('sentence') or 'admission holds it'}"
    in_flight = (stats.get("requests") or {}).get("in_flight", 0)
    return (
        f"no such row. A request has one when it has ended ({in_flight} are in flight). The proxy keeps the newest "
        "(breakdown.capacity) in memory; older ones are in the files of breakdown.jsonl_path, if that is set: --file "
        "PATH. The id is x-request-id of the response"
    )


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return row if isinstance(row, dict) and "arrived_unix_s" in row else None  # lines of the access log have none


def _check_first(path: Path, line: bytes) -> None:
    """Refuse a file by its first line; a row that a process was killed in has no end. Raises NoBreakdownError."""
    whole = line.endswith(b"\n")
    if (whole and _row(line) is None) or not (whole or line.startswith(b"{") or not line):
        raise NoBreakdownError(
            f"{path} is no breakdown: its first line is no row; give the file of breakdown.jsonl_path (or a run's "
            "breakdown.jsonl)"
        )


def _stop(message: str, status: int) -> NoReturn:
    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(status)
